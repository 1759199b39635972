"""The routes about delayed messages: what they find, and what they answer about what became of it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from qmq_broker.service.delay import delayed, query
from qmq_broker.storage.schedule.columns import DelayedMessage
from qmq_broker.storage.schedule.copy import ScheduleCopier
from qmq_broker.storage.schedule.states import DelayedState
from qmq_client.wire.names import COPIES
from tests.broker.delay.delay_rig import HOUR_MS, DelayRig, delayed_frame
from tests.broker.delay.long_retry_rig import LongRetryRig
from tests.broker.face.asgi import Client, Reply
from tests.broker.face.delayed import cancel, ids_of
from tests.broker.service.rig import make_frame, new_ids

DEADLINE_S = 60


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


def test_D4_who_puts_off_what_is_taken_back_meanwhile_learns_that_it_was_cancelled(
    rig: DelayRig,
) -> None:
    first, second = rig.find_all()
    answers = change_at_once(rig, first, lambda: rig.cancel(first) == [DelayedState.CANCELLED])
    assert answers == ["cancelled"]
    assert rig.find_all() == [second]


def test_D4_who_puts_off_what_another_puts_off_meanwhile_is_the_later_one(rig: DelayRig) -> None:
    first = rig.find_all()[0]
    frame = rig.broker.delayed.query.rescheduled_frame(first, rig.now_ms + 9 * HOUR_MS)

    def put_off() -> bool:
        (placed,) = rig.store.append([frame])
        rig.store.commit_and_step()
        return placed.physical_offset > 0

    assert change_at_once(rig, first, put_off) == ["rescheduled"]
    moved = rig.find_all()
    assert [one.due_at_ms - rig.now_ms for one in moved] == [2 * HOUR_MS, 3 * HOUR_MS]


def change_at_once(rig: DelayRig, message: DelayedMessage, change: Callable[[], bool]) -> Any:
    """Put a message off, and change it otherwise before the writer sees that; what the first is told."""
    client = Client(rig)
    body = {"message_id": message.message_id.hex(), "deliver_at_ms": rig.now_ms + 3 * HOUR_MS}

    async def both() -> Reply:
        client.is_writing = False
        call = client.call("POST", "/v1/delayed/reschedule", json.dumps(body).encode())
        asked = asyncio.ensure_future(call)
        async with asyncio.timeout(DEADLINE_S):
            while not rig.broker.writer.waiting_bytes:
                await asyncio.sleep(0)
            assert change()
            while not asked.done():
                rig.commit()
                await asyncio.sleep(0)
            return await asked

    return asyncio.run(both()).json["outcomes"]


def test_D4_what_was_taken_back_is_not_put_off_and_that_is_said(rig: DelayRig) -> None:
    first, second = ids_of(rig)
    assert cancel(Client(rig), first) == ["cancelled"]
    for _ in range(2):
        client = Client(rig)
        for after_ms in (HOUR_MS, 5 * HOUR_MS):
            reply = reschedule(client, first, rig.now_ms + after_ms)
            assert reply.json["outcomes"] == ["cancelled"]
        assert ids_of(rig) == [second]
        rig.restart()
    assert rig.pass_and_release(9 * HOUR_MS) == 1


def test_what_is_due_then_already_is_put_off_without_a_write(rig: DelayRig) -> None:
    client = Client(rig)
    first, _ = ids_of(rig)
    later_ms = rig.now_ms + 5 * HOUR_MS
    assert reschedule(client, first, later_ms).json["outcomes"] == ["rescheduled"]
    written = rig.store.written_offset
    assert reschedule(client, first, later_ms).json["outcomes"] == ["rescheduled"]
    assert rig.store.written_offset == written
    assert len(client.get(f"/v1/delayed/{first}").json["places"]) == 2


def test_D4_its_first_due_time_beside_its_id_takes_back_a_message_that_was_put_off(
    rig: DelayRig,
) -> None:
    client = Client(rig)
    first, second = ids_of(rig)
    reschedule(client, first, rig.now_ms + 9 * HOUR_MS)
    assert cancel(client, first, deliver_at_ms=rig.now_ms + HOUR_MS) == ["cancelled"]
    assert ids_of(rig) == [second]


@pytest.mark.parametrize("is_put_off_again", [False, True])
def test_D4_a_message_that_is_just_being_put_off_is_found_where_it_goes(
    rig: DelayRig, is_put_off_again: bool
) -> None:
    client = Client(rig)
    first, second = rig.find_all()
    frame = rig.broker.delayed.query.rescheduled_frame(first, rig.now_ms + 7 * HOUR_MS)
    rig.store.append([frame])  # and it is not synced yet
    name = first.message_id.hex()
    if is_put_off_again:
        reply = reschedule(client, name, rig.now_ms + 9 * HOUR_MS)
        assert reply.json["outcomes"] == ["rescheduled"]
        assert rig.find_all()[-1].due_at_ms == rig.now_ms + 9 * HOUR_MS
    else:
        assert cancel(client, name) == ["cancelled"]
        assert rig.find_all() == [second]


def test_D4_what_went_from_a_bucket_that_is_kept_to_one_that_is_gone_is_reported_by_its_queue(
    tmp_path: Path,
) -> None:
    rig = DelayRig(tmp_path, dedupe_ids=1)
    client = Client(rig)
    rig.send_delayed({b"gone": rig.now_ms + 900 * HOUR_MS, b"stays": rig.now_ms + 900 * HOUR_MS})
    (name,) = [one.message_id.hex() for one in rig.find_all() if rig.body(one) == b"gone"]
    reschedule(client, name, rig.now_ms + HOUR_MS)
    rig.pass_and_release(HOUR_MS)
    rig.pass_and_release(3 * HOUR_MS)
    rig.send(b"lets the log's time go on")
    ScheduleCopier(rig.store.schedule, epoch=rig.store.epoch).copy_all()
    shown = client.get(f"/v1/delayed/{name}").json
    assert [place["state"] for place in shown["places"]] == ["rescheduled"]
    assert reschedule(client, name, rig.now_ms + HOUR_MS).json["outcomes"] == ["too_late"]
    assert cancel(client, name) == ["too_late"]
    rig.close()


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
    rig.broker.delayed.releaser.look_again([bucket for bucket, _, _ in rig.store.schedule.states()])
    rig.release()
    assert cancel(client, one, two) == ["cancelled", "cancelled"]


@pytest.mark.parametrize("is_copied", [False, True], ids=["in the log", "in its bucket's file"])
def test_B4_of_a_message_that_cannot_be_read_place_and_time_are_reported_and_what_is_damaged(
    tmp_path: Path, is_copied: bool
) -> None:
    rig = DelayRig(tmp_path)
    due_ms = rig.now_ms + 2 * HOUR_MS
    rig.send_delayed({b"alone": due_ms})
    if is_copied:
        rig.restart()
    (name,) = ids_of(rig)
    (path,) = tmp_path.glob("schedule/*/*" if is_copied else "commitlog/0*")
    position = path.read_bytes().index(b"alone")
    with path.open("r+b") as file:
        file.seek(position)
        file.write(b"A")
    client = Client(rig)
    reply = client.get(f"/v1/delayed/{name}")
    assert reply.status == 200
    (told,) = reply.json["messages"]
    assert told["message"] is None
    (place,) = reply.json["places"]
    assert (place["state"], place["due_at_ms"]) == ("pending", due_ms)
    damage = told["damage"]
    assert damage["code"] == "corruption"
    assert "qmq store verify" in damage["remedy"]
    file_name, offset = re.findall(r"(\S+) is damaged at offset ([0-9]+)", damage["message"])[0]
    assert file_name == str(path.relative_to(tmp_path))
    assert 0 < position - int(offset) < 200, "the offset of the record"
    assert reschedule(client, name, due_ms + HOUR_MS).json["code"] == "corruption"
    with path.open("r+b") as file:
        file.seek(position)
        file.write(b"a")
    (shown,) = client.get(f"/v1/delayed/{name}").json["messages"]
    assert (shown["message"]["message_id"], shown["damage"]) == (name, None)
    rig.close()


def test_D4_of_an_id_that_was_sent_twice_the_newest_place_is_reported(rig: DelayRig) -> None:
    client = Client(rig)
    again = next(new_ids())
    for after_ms in (1_000, HOUR_MS):
        rig.submit(delayed_frame({b"again": rig.now_ms + after_ms}, ids=iter([again])))
        rig.commit()
        rig.send_delayed({b"between": rig.now_ms})
        rig.pass_and_release(1_000)
    shown = client.get(f"/v1/delayed/{again.hex()}").json
    assert [place["state"] for place in shown["places"]] == ["released", "pending"]
    assert [one["message"]["message_id"] for one in shown["messages"]] == [again.hex()]
    assert cancel(client, again.hex()) == ["cancelled"]
    assert rig.pass_and_release(HOUR_MS // 2) == 0
    assert rig.bodies().count(b"again") == 1


def test_D3_a_copy_that_a_group_waits_for_is_neither_taken_back_nor_put_off(tmp_path: Path) -> None:
    rig = LongRetryRig(tmp_path)
    rig.start_long_retries(b"a")
    client = Client(rig)
    (listed,) = client.get("/v1/delayed").json["delayed"]
    assert listed["subject"] == COPIES
    assert cancel(client, listed["message_id"]) == ["unknown"]
    assert reschedule(client, listed["message_id"], rig.now_ms + HOUR_MS).status == 404
    rig.close()


def test_D4_a_message_that_was_put_off_often_is_taken_back_all_the_same(
    rig: DelayRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delayed, "CANCELLED_MAX", 3)
    client = Client(rig)
    first, second = ids_of(rig)
    for hours in range(3, 8):
        reply = reschedule(client, first, rig.now_ms + hours * HOUR_MS)
        assert reply.json["outcomes"] == ["rescheduled"]
    assert cancel(client, first) == ["cancelled"]
    assert ids_of(rig) == [second]
