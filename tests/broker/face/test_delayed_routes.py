"""The routes about delayed messages: what they find, and what they answer about what became of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qmq_broker.service.delay import query
from qmq_broker.storage.schedule.fates import Fate
from qmq_client.wire.names import COPIES
from tests.broker.delay.aside_rig import AsideRig
from tests.broker.delay.delay_rig import HOUR_MS, DelayRig, delayed_frame
from tests.broker.face.asgi import Client, Reply
from tests.broker.service.rig import make_frame, new_ids

DEADLINE_S = 60


def ids_of(rig: DelayRig) -> list[str]:
    """Of what waits, in the order of due times."""
    return [one.message_id for one in rig.broker.delayed.query.listed(None, 0, 2**63, 10)]


def cancel(client: Client, *message_ids: str, **more: Any) -> Any:
    """The outcome of each."""
    body = {"message_ids": list(message_ids), **more}
    return client.post("/v1/delayed/cancel", body).json["outcomes"]


def reschedule(client: Client, message_id: str, at_ms: int) -> Any:
    """The answer."""
    body = {"message_id": message_id, "deliver_at_ms": at_ms}
    return client.post("/v1/delayed/reschedule", body)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[DelayRig]:
    """Two messages, due in one and in two hours; few ids are remembered."""
    made = DelayRig(tmp_path, dedupe_ids=1)
    made.send_delayed({b"one": made.now_ms + HOUR_MS, b"two": made.now_ms + 2 * HOUR_MS})
    yield made
    made.close()


def test_a_list_says_whether_there_is_more_and_not_when_it_is_just_full(rig: DelayRig) -> None:
    client = Client(rig)
    answers = [client.get(f"/v1/delayed?count={count}").json for count in (1, 2, 3)]
    assert [(len(one["delayed"]), one["has_more"]) for one in answers] == [
        (1, True),
        (2, False),
        (2, False),
    ]


def test_a_list_begins_in_the_middle_of_a_bucket_and_ends_before_its_end(rig: DelayRig) -> None:
    client, due_ms = Client(rig), rig.now_ms + HOUR_MS

    def listed(**bounds: int) -> int:
        question = "&".join(f"{name}={value}" for name, value in bounds.items())
        return len(client.get(f"/v1/delayed?{question}").json["delayed"])

    assert due_ms % HOUR_MS, "it is no bucket's first"
    assert [listed(**{"from": due_ms + more}) for more in (0, 1)] == [2, 1]
    assert [listed(to=due_ms + more) for more in (0, 1)] == [0, 1]


def test_a_histogram_of_too_many_spans_has_the_rest_in_its_last(
    rig: DelayRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(query, "SPANS_MAX", 2)
    first_ms = rig.now_ms // HOUR_MS * HOUR_MS + 10 * HOUR_MS
    rig.send_delayed({b"%d" % n: first_ms + n * HOUR_MS for n in range(3)})
    rows = Client(rig).get("/v1/delayed/histogram?span=hour").json["rows"]
    assert [row["count"] for row in rows] == [1, 4]


def test_D4_a_wrong_due_time_beside_its_id_takes_a_message_back_as_well(rig: DelayRig) -> None:
    client = Client(rig)
    first, second = ids_of(rig)
    assert cancel(client, first, deliver_at_ms=rig.now_ms + 900 * HOUR_MS) == ["cancelled"]
    assert ids_of(rig) == [second]


def test_D4_what_was_released_is_too_late_to_take_back_or_to_put_off(rig: DelayRig) -> None:
    client = Client(rig)
    first, second = ids_of(rig)
    rig.pass_and_release(HOUR_MS)
    assert cancel(client, first, second) == ["too_late", "cancelled"]
    assert reschedule(client, first, rig.now_ms + HOUR_MS).json["outcomes"] == ["too_late"]
    assert rig.bodies() == [b"one"]


def test_D4_what_never_waited_is_too_late_and_what_nobody_knows_is_unknown(rig: DelayRig) -> None:
    stored, other = next(new_ids()), next(new_ids())
    rig.submit(make_frame([b"at once"], ids=iter([stored])))
    rig.commit()
    assert cancel(Client(rig), stored.hex(), other.hex()) == ["too_late", "unknown"]


def test_D4_who_puts_off_what_is_taken_back_meanwhile_is_told_that_it_is_too_late(
    rig: DelayRig,
) -> None:
    client = Client(rig)
    first, second = rig.find_all()
    body = {"message_id": first.message_id.hex(), "deliver_at_ms": rig.now_ms + 3 * HOUR_MS}

    async def both() -> Reply:
        client.is_writing = False
        call = client.call("POST", "/v1/delayed/reschedule", json.dumps(body).encode())
        asked = asyncio.ensure_future(call)
        async with asyncio.timeout(DEADLINE_S):
            while not rig.broker.writer.waiting_bytes:
                await asyncio.sleep(0)
            assert rig.cancel(first) == [Fate.CANCELLED]
            return await asked

    assert asyncio.run(both()).json["outcomes"] == ["too_late"]
    assert rig.find_all() == [second]


def test_D4_where_damage_may_hide_a_message_nothing_is_taken_back_before_that_is_mended(
    rig: DelayRig, tmp_path: Path
) -> None:
    one, two = ids_of(rig)
    stored, other = next(new_ids()), next(new_ids())
    rig.submit(make_frame([b"at once"], ids=iter([stored])))
    rig.commit()
    rig.restart()
    path = min(tmp_path.glob("schedule/*/*"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-20] + bytes([whole[-20] ^ 1]) + whole[-19:])
    client = Client(rig)
    for ids in ([one], [two, other.hex()], [one, two]):
        reply = client.post("/v1/delayed/cancel", {"message_ids": ids})
        assert (reply.status, reply.json["code"]) == (503, "held")
        assert "qmq delayed retry" in reply.json["remedy"]
    assert client.get(f"/v1/delayed/{one}").status == 503
    assert reschedule(client, one, rig.now_ms + 5 * HOUR_MS).status == 503
    assert ids_of(rig) == [two], "nothing of a refused request was done"
    assert cancel(client, stored.hex()) == ["too_late"]
    path.write_bytes(whole)
    rig.broker.delayed.delay.look_again([bucket for bucket, _, _ in rig.store.schedule.states()])
    rig.release()
    assert cancel(client, one, two) == ["cancelled", "cancelled"]


def test_D4_of_an_id_that_was_sent_twice_the_newest_place_is_told(rig: DelayRig) -> None:
    client = Client(rig)
    again = next(new_ids())
    for after_ms in (1_000, HOUR_MS):
        rig.submit(delayed_frame({b"again": rig.now_ms + after_ms}, ids=iter([again])))
        rig.commit()
        rig.send_delayed({b"between": rig.now_ms})
        rig.pass_and_release(1_000)
    shown = client.get(f"/v1/delayed/{again.hex()}").json
    assert [place["state"] for place in shown["places"]] == ["released", "pending"]
    assert shown["message"]["message_id"] == again.hex()
    assert cancel(client, again.hex()) == ["cancelled"]
    assert rig.pass_and_release(HOUR_MS // 2) == 0
    assert rig.bodies().count(b"again") == 1


def test_D3_a_copy_that_a_group_waits_for_is_neither_taken_back_nor_put_off(tmp_path: Path) -> None:
    rig = AsideRig(tmp_path)
    rig.put_away(b"a")
    client = Client(rig)
    (listed,) = client.get("/v1/delayed").json["delayed"]
    assert listed["subject"] == COPIES
    assert cancel(client, listed["message_id"]) == ["unknown"]
    assert reschedule(client, listed["message_id"], rig.now_ms + HOUR_MS).status == 404
    rig.close()
