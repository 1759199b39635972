"""Whoever begins, is moved or replayed while old segments are about to go, begins behind them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from qmq_broker.errors import NoRoomError
from qmq_broker.storage import retention
from qmq_broker.storage.files.background import Work, at_once
from qmq_broker.storage.queues.consume_queue import ConsumeQueue
from qmq_client.group.queue import Place
from qmq_client.wire.operations import DeadRequest
from qmq_client.wire.start import Start, StartKind
from tests.broker.service.retaining import (
    HOUR_MS,
    LONG_MS,
    RETAINING,
    first_sequence,
    keep_house,
    send,
)
from tests.broker.service.rig import GROUP, SUBJECT, Rig

COUNT = 20
DAY_MS = 24 * HOUR_MS


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path, store_options=RETAINING)
    yield made
    made.close()


def decide(rig: Rig) -> list[Work]:
    """Retention decides what goes, and the writer has not begun with it; returns what is to be done."""
    waiting: list[Work] = []
    rig.store.retention.background.start = waiting.append
    rig.clock.pass_ms(HOUR_MS)
    rig.broker.step()
    assert rig.store.retention.asked_offset > rig.store.first_offset
    return waiting


def begin(rig: Rig) -> list[Work]:
    """The same, and the writer has begun with it: where the queues will begin is being noted."""
    waiting = decide(rig)
    rig.broker.writer.step()
    assert len(waiting) == 1
    assert not rig.store.retention.asked_offset
    return waiting


def finish(rig: Rig, waiting: list[Work]) -> None:
    rig.store.retention.background.start = at_once
    for work in waiting:
        work()
    assert keep_house(rig) > 0


def is_moved(rig: Rig, start: Start) -> int:
    return rig.broker.changes.seek(SUBJECT, GROUP, start, rig.now_ms)


def is_new(rig: Rig, start: Start) -> int:
    rig.broker.changes.remove(SUBJECT, GROUP, rig.now_ms)
    given = rig.pull(max_messages=1, start=str(start))
    rig.settle(given.nack(delay_ms=0))
    return given.sequences[0]


Come = Callable[[Rig, Start], int]
STARTS = (Start(StartKind.EARLIEST), Start(StartKind.SEQUENCE, 1), Start(StartKind.TIME, 0))


@pytest.mark.parametrize("start", STARTS, ids=str)
@pytest.mark.parametrize("come", [is_moved, is_new])
@pytest.mark.parametrize("prepare", [decide, begin])
def test_B12_a_group_gets_everything_from_the_place_that_it_is_given(
    rig: Rig, prepare: Callable[[Rig], list[Work]], come: Come, start: Start
) -> None:
    send(rig, COUNT)
    rig.settle(rig.pull(max_messages=COUNT, lease_ms=LONG_MS).ack())
    waiting = prepare(rig)
    told = come(rig, start)
    finish(rig, waiting)
    assert 0 < first_sequence(rig) <= told < COUNT
    assert rig.pull(max_messages=COUNT).sequences == list(range(told, COUNT))
    (status,) = rig.broker.query.groups()
    assert status.lost == 0


@pytest.mark.parametrize("prepare", [decide, begin])
def test_B12_a_group_may_begin_at_the_end_while_old_segments_go(
    rig: Rig, prepare: Callable[[Rig], list[Work]]
) -> None:
    send(rig, COUNT)
    rig.settle(rig.pull(max_messages=COUNT, lease_ms=LONG_MS).ack())
    waiting = prepare(rig)
    assert is_moved(rig, Start(StartKind.LATEST)) == COUNT
    finish(rig, waiting)
    assert rig.pull().sequences == []


@pytest.mark.parametrize("prepare", [decide, begin])
def test_B12_dead_letters_are_told_to_be_gone_when_their_messages_are_about_to_go(
    rig: Rig, prepare: Callable[[Rig], list[Work]]
) -> None:
    send(rig, COUNT)
    rig.settle(rig.pull(max_messages=COUNT, lease_ms=LONG_MS).reject("no"))
    rig.clock.pass_ms(8 * DAY_MS)
    waiting = prepare(rig)
    answer = rig.broker.changes.replay(DeadRequest(subject=SUBJECT, group=GROUP), rig.now_ms)
    finish(rig, waiting)
    assert answer.gone >= first_sequence(rig) > 0
    assert rig.pull(max_messages=COUNT).sequences == list(range(answer.gone, COUNT))
    (status,) = rig.broker.query.groups()
    assert (status.lost, status.dead) == (0, answer.gone)


def test_B12_a_place_is_found_although_old_segments_go_meanwhile(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(rig, COUNT)
    rig.settle(rig.pull(max_messages=COUNT, lease_ms=LONG_MS).ack())
    waiting, places = begin(rig), ConsumeQueue.places

    def places_later(self: ConsumeQueue, first: int, count: int) -> list[Place]:
        while waiting:
            waiting.pop()()
            rig.store.step()
        return places(self, first, count)

    with monkeypatch.context() as patched:
        patched.setattr(ConsumeQueue, "places", places_later)
        told = is_moved(rig, Start(StartKind.EARLIEST))
    assert told == first_sequence(rig) > 0


def no_room(*_: Any) -> None:
    raise NoRoomError("for the test")


@pytest.mark.parametrize("step", ["sync", "note"])
def test_B12_a_deletion_that_had_no_room_keeps_nobody_away_and_is_tried_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    send(rig, COUNT)
    rig.settle(rig.pull(max_messages=COUNT, lease_ms=LONG_MS).ack())
    with monkeypatch.context() as patched:
        if step == "sync":
            patched.setattr(rig.store.actions, "sync", no_room)
        else:
            patched.setattr(retention, "write_retained", no_room)
        decide(rig)
        rig.store.retention.background.start = at_once
        rig.broker.writer.step()
    assert is_moved(rig, Start(StartKind.EARLIEST)) == 0
    is_moved(rig, Start(StartKind.LATEST))
    assert keep_house(rig) > 0
