"""Runs that wait: found by sequence, given out by time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq_client.group.history import LEASE_ENDED
from qmq_client.group.long_retries import LongRetryRun
from qmq_client.group.redelivery import SUSPECT_AFTER, Redelivery, RedeliveryHeap
from qmq_client.wire.backoff import ExponentialBackoff


def run(first: int, count: int, retry_at_ms: int, attempts: int = 1) -> Redelivery:
    return Redelivery(
        first=first, next=first + count, attempts=attempts, retry_at_ms=retry_at_ms, error=""
    )


def suspect(first: int, count: int, retry_at_ms: int) -> Redelivery:
    given = run(first, count, retry_at_ms)
    return replace(given, error=LEASE_ENDED, attempts=SUSPECT_AFTER)


def test_runs_are_due_in_the_order_of_their_times_and_not_before() -> None:
    heap: RedeliveryHeap[Redelivery] = RedeliveryHeap()
    heap.add(run(10, 2, 300))
    heap.add(run(20, 2, 100))
    heap.add(run(30, 2, 200))
    assert heap.next_due_ms() == 100
    assert heap.due(99, 10) == []
    assert [found.first for found in heap.due(250, 10)] == [20, 30]
    assert [found.first for found in heap.due(300, 10)] == [20, 30, 10]
    assert heap.count == 6, "looking takes nothing away"


def test_a_run_is_cut_to_the_messages_that_are_wanted() -> None:
    heap: RedeliveryHeap[Redelivery] = RedeliveryHeap()
    heap.add(run(0, 10, 100))
    assert [(found.first, found.next) for found in heap.due(100, 4)] == [(0, 4)]
    heap.take(0, 4)
    assert [(found.first, found.next) for found in heap.due(100, 100)] == [(4, 10)]


def test_taking_from_the_middle_leaves_both_sides_to_come() -> None:
    heap: RedeliveryHeap[Redelivery] = RedeliveryHeap()
    heap.add(run(0, 10, 100))
    heap.take(3, 5)
    assert sorted((found.first, found.next) for found in heap.due(100, 100)) == [(0, 3), (5, 10)]


def test_B10_suspects_are_due_apart_and_in_order_and_what_was_taken_leaves_no_entries() -> None:
    heap: RedeliveryHeap[Redelivery] = RedeliveryHeap()
    for number in range(200):
        heap.add(suspect(10 + number, 1, 1_000 + 37 * number % 200))
    for _ in range(2_000):
        heap.add(suspect(1, 1, 9_000))
        heap.take(1, 2)
    assert len(heap._suspects_by_time) <= 1_000
    heap.add(run(5, 1, 100))
    assert [found.first for found in heap.due(10_000, 10)] == [5]
    assert not heap.has_suspect(999)
    times = []
    while (found := heap.suspect(10_000)) is not None:
        assert found.next == found.first + 1
        times.append(found.retry_at_ms)
        heap.take(found.first, found.next)
    assert times == sorted(times)
    assert (len(times), heap.next_suspect_ms(), heap.next_due_ms()) == (200, None, 100)


def test_a_suspect_in_a_long_retry_is_due_like_the_others() -> None:
    waiting: RedeliveryHeap[LongRetryRun] = RedeliveryHeap()
    waiting.add(
        LongRetryRun(
            first=1,
            next=2,
            retry_id=7,
            retry_at_ms=100,
            error=LEASE_ENDED,
            attempts=SUSPECT_AFTER,
        )
    )
    assert [found.first for found in waiting.due(100, 10)] == [1]


def test_a_message_that_is_no_suspect_any_more_is_among_the_others() -> None:
    heap: RedeliveryHeap[Redelivery] = RedeliveryHeap()
    heap.add(suspect(1, 1, 100))
    heap.take(1, 2)
    heap.add(run(1, 1, 100))
    assert (heap.suspect(100), [found.first for found in heap.due(100, 10)]) == (None, [1])
    heap.take(1, 2)
    heap.add(suspect(1, 1, 100))
    assert (heap.suspect(100), heap.due(100, 10)) == (suspect(1, 1, 100), [])


@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(0, 30), st.integers(1, 5), st.integers(0, 50)),
        max_size=200,
    ),
    st.integers(0, 60),
)
def test_what_is_due_is_what_a_list_of_messages_says(
    steps: list[tuple[bool, int, int, int]], now_ms: int
) -> None:
    heap: RedeliveryHeap[Redelivery] = RedeliveryHeap()
    model: dict[int, int] = {}
    for is_add, first, count, retry_at_ms in steps:
        sequences = range(first, first + count)
        if not is_add:
            heap.take(first, first + count)
            for sequence in sequences:
                model.pop(sequence, None)
        elif not any(sequence in model for sequence in sequences):
            heap.add(run(first, count, retry_at_ms))
            model.update(dict.fromkeys(sequences, retry_at_ms))
    assert heap.count == len(model)
    assert heap.next_due_ms() == min(model.values(), default=None)
    due = heap.due(now_ms, 1000)
    given_out = [sequence for found in due for sequence in range(found.first, found.next)]
    assert sorted(given_out) == sorted(s for s, at_ms in model.items() if at_ms <= now_ms)
    assert [found.retry_at_ms for found in due] == sorted(found.retry_at_ms for found in due)


@pytest.mark.parametrize(
    ("attempts", "random", "expected_ms"),
    [(1, 0.0, 1_000), (2, 0.0, 2_000), (4, 0.0, 8_000), (1, 1.0, 800), (40, 0.0, 600_000),
     (10**9, 0.0, 600_000)],
)  # fmt: skip
def test_the_wait_doubles_up_to_ten_minutes_less_a_random_share(
    attempts: int, random: float, expected_ms: int
) -> None:
    assert ExponentialBackoff().delay_ms(attempts, random) == expected_ms
