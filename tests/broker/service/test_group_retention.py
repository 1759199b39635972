"""What the retention takes from groups that hold, wait or have dead letters: counted, never stuck."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qmq_broker.service.delivery.needed_log import first_copy, first_needed
from qmq_broker.service.limits import ServiceLimits
from qmq_broker.storage.queues.consume_queue import ConsumeQueue
from qmq_client.group.queue import Place
from qmq_client.wire.operations import DeadAnswer, DeadRequest
from tests.broker.service.rig import GROUP, STORE, SUBJECT, Given, Rig

#: Segments of a few messages; ids are forgotten at once, so that they hold nothing back.
OPTIONS = replace(
    STORE, segment_bytes=2048, growth_bytes=512, dedupe_ids=1, checkpoint_ms=1, queue_flush_bytes=1
)
DAY_MS = 24 * 3_600_000


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path / "data", store_options=OPTIONS)
    yield made
    made.close()


def send(rig: Rig, count: int, **fields: Any) -> None:
    for _ in range(count):
        rig.send(b"b" * 300, **fields)
        rig.clock.pass_ms(5)
        rig.broker.writer.step()


def give_up_all_but_the_last(rig: Rig) -> int:
    """By force; returns the first sequence that is left."""
    for _ in range(3):
        rig.clock.pass_ms(5)
        rig.store.step()
    rig.store.give_up_below(rig.store.durable_offset)
    queue = rig.store.queue(SUBJECT)
    assert queue is not None
    assert queue.first_sequence > 5
    return queue.first_sequence


def pull(rig: Rig, **changes: Any) -> Given:
    return rig.pull(ordered=True, **changes)


@pytest.mark.parametrize("outcome", ["acked", "waiting", "silent"])
def test_B12_an_ordered_group_continues_behind_what_was_given_up_by_force(
    rig: Rig, outcome: str
) -> None:
    send(rig, 20, key="a")
    head = pull(rig)
    assert head.sequences == [0]
    if outcome == "waiting":
        rig.settle(head.nack(delay_ms=0))
    first = give_up_all_but_the_last(rig)
    if outcome == "acked":
        rig.settle(head.ack())
    rig.restart()
    if outcome == "silent":
        rig.pass_ms(30_000)
        rig.pass_ms(1_000)
    assert pull(rig).sequences == [first]
    (status,) = rig.broker.query.groups()
    assert status.lost == first - (outcome == "acked")
    assert (status.held, status.in_flight) == (20 - first - 1, 1)


def test_B12_an_ordered_group_holds_the_log_back_for_what_it_holds(rig: Rig) -> None:
    send(rig, 20, key="a")
    given = pull(rig)
    for _ in range(10):
        rig.settle(given.ack())
        given = pull(rig)
    queue = rig.store.queue(SUBJECT)
    assert queue is not None
    (entry,) = queue.entries(given.sequences[0], 1)
    assert rig.broker.delivery.needed_log.first_offset(0) == entry.physical_offset


def test_B12_dead_letters_whose_messages_are_gone_are_reported_when_they_are_replayed(
    rig: Rig,
) -> None:
    send(rig, 20)
    rig.settle(rig.pull(max_messages=100).reject("no"))
    first = give_up_all_but_the_last(rig)
    listed = rig.broker.query.dead_letters(SUBJECT, GROUP, records_bytes=1_000_000)
    assert [one.sequence for one in listed if one.record is None] == list(range(first))
    request = DeadRequest(subject=SUBJECT, group=GROUP)
    answer = rig.broker.changes.replay(request, rig.now_ms)
    assert (answer.count, answer.gone) == (20 - first, first)
    assert len(rig.pull(max_messages=100).records) == 20 - first
    assert rig.broker.changes.purge(request, rig.now_ms).count == first


def test_B12_dead_letters_behind_very_many_that_are_gone_are_replayed(tmp_path: Path) -> None:
    limits = ServiceLimits(dead_letters_per_request=3)
    rig = Rig(tmp_path, store_options=OPTIONS, limits=limits)
    send(rig, 20)
    rig.settle(rig.pull(max_messages=100).reject("no"))
    first = give_up_all_but_the_last(rig)
    request = DeadRequest(subject=SUBJECT, group=GROUP, first=1)
    answer = rig.broker.changes.replay(request, rig.now_ms)
    assert answer == DeadAnswer(count=3, gone=first - 1, has_more=True)
    answer = rig.broker.changes.replay(request, rig.now_ms)
    assert answer == DeadAnswer(count=20 - first - 3, gone=first - 1)
    ends_there = DeadRequest(subject=SUBJECT, group=GROUP, next=2)
    assert rig.broker.changes.replay(ends_there, rig.now_ms) == DeadAnswer(count=0, gone=2)
    assert rig.pull(max_messages=100).sequences == list(range(first, 20))
    rig.close()


def test_B12_a_paused_group_holds_its_messages_back_and_a_removed_one_does_not(rig: Rig) -> None:
    send(rig, 20)
    rig.pull(max_messages=1)
    rig.broker.changes.pause(SUBJECT, GROUP, rig.now_ms, is_paused=True)
    rig.pass_ms(30 * DAY_MS)
    queue = rig.store.queue(SUBJECT)
    assert queue is not None
    (entry,) = queue.entries(0, 1)
    assert rig.broker.delivery.needed_log.first_offset(rig.now_ms) == entry.physical_offset
    rig.broker.changes.remove(SUBJECT, GROUP, rig.now_ms)
    assert rig.broker.delivery.needed_log.first_offset(rig.now_ms) == rig.store.durable_offset


def test_B12_each_subject_is_looked_at_once_however_many_groups_it_has(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(rig, 20)
    for number in range(1, 20):
        rig.settle(rig.pull(group=f"g{number}", max_messages=number).ack(), group=f"g{number}")
    asked: list[int] = []
    places = ConsumeQueue.places

    def noted(self: ConsumeQueue, first: int, count: int) -> list[Place]:
        asked.append(first)
        return places(self, first, count)

    monkeypatch.setattr(ConsumeQueue, "places", noted)
    needed_offset = rig.broker.delivery.needed_log.first_offset(0)
    assert asked == [1]
    queue = rig.store.queue(SUBJECT)
    assert queue is not None
    assert needed_offset == queue.entries(1, 1)[0].physical_offset


def test_B12_a_dead_letter_holds_the_log_back_up_to_the_last_moment_of_its_time(rig: Rig) -> None:
    send(rig, 2)
    rig.settle(rig.pull(max_messages=1).reject("no"))
    state = rig.broker.delivery.group(SUBJECT, GROUP)
    assert state is not None
    died_ms = state.dead[0].at_ms
    assert first_needed(state, died_ms) == 0
    assert first_needed(state, died_ms + 1) == state.cursor == 1
    state.long_retries.copies[0] = 7  # as after a long retry
    assert first_needed(state, died_ms) == 1
    assert first_copy(state, died_ms) == 7
    assert first_copy(state, died_ms + 1) is None
