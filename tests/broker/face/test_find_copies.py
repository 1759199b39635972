"""A message in a long retry is found by its id when only its copy is left, until its group is done with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qmq_broker.service import query
from tests.broker.delay.long_retry_rig import DAY_MS, MONTH_MS, LongRetryRig
from tests.broker.delay.test_held import spoil_marks
from tests.broker.delay.test_lost_copies import copied
from tests.broker.face.asgi import Client
from tests.broker.service.rig import GROUP, SUBJECT, make_frame

MESSAGE_ID = bytes(range(16))
PULL = {"subject": SUBJECT, "group": GROUP, "consumer": "one"}


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[LongRetryRig]:
    made = LongRetryRig.forgetful(tmp_path)
    made.submit(make_frame([b"far"], ids=iter([MESSAGE_ID])))
    made.commit()
    made.settle(made.pull().nack(MONTH_MS, "not before spring"))
    made.turn()
    yield made
    made.close()


def shown(rig: LongRetryRig) -> dict[str, Any]:
    answer = Client(rig).get(f"/v1/messages?id={MESSAGE_ID.hex()}")
    assert answer.status == 200
    found: dict[str, Any] = answer.json
    return found


def test_a_message_of_which_only_the_copy_is_left_is_found_by_its_id(rig: LongRetryRig) -> None:
    (original,) = shown(rig)["messages"]
    rig.let_segments_go()
    assert rig.store.search.by_id(MESSAGE_ID, 1).found == []
    found = shown(rig)
    (away,) = found["messages"]
    assert found["is_complete"]
    assert (away["subject"], away["sequence"], away["body_base64"]) == (
        SUBJECT,
        0,
        original["body_base64"],
    )
    assert (away["groups"][0]["group"], away["groups"][0]["state"]) == (GROUP, "waiting")
    rig.restart()
    rig.pass_and_turn(MONTH_MS + DAY_MS)
    (back,) = shown(rig)["messages"]
    assert (back["sequence"], back["groups"][0]["attempts"]) == (0, 1)
    trace = Client(rig).get(f"/v1/messages/{MESSAGE_ID.hex()}/trace").json
    assert [place["sequence"] for place in trace["places"]] == [0]
    given = rig.pull()
    assert given.bodies == [b"far"]
    (in_flight,) = shown(rig)["messages"]
    assert in_flight["groups"][0]["state"] == "in flight"
    rig.settle(given.ack())
    assert shown(rig)["messages"] == []


def test_the_copy_of_a_group_that_is_no_more_is_not_shown(rig: LongRetryRig) -> None:
    rig.let_segments_go()
    rig.broker.changes.remove(SUBJECT, GROUP, rig.now_ms)
    assert shown(rig)["messages"] == []


def test_a_search_through_too_many_copies_says_so(
    rig: LongRetryRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.let_segments_go()
    monkeypatch.setattr(query, "READ_BYTES_MAX", 10)
    found = shown(rig)
    assert (found["messages"], found["is_complete"]) == ([], False)


def test_a_search_beside_a_damaged_list_of_delayed_messages_says_that_it_is_not_complete(
    rig: LongRetryRig,
) -> None:
    rig.let_segments_go()
    copied(rig)
    (path,) = rig.directory.glob("schedule/*/*")
    whole = spoil_marks(path)
    found = shown(rig)
    assert (found["messages"], found["is_complete"]) == ([], False)
    path.write_bytes(whole)
    found = shown(rig)
    assert (len(found["messages"]), found["is_complete"]) == (1, True)
