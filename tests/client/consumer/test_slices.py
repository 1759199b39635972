"""A worker of a quick handler takes several messages at once; what it has not begun is still free."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from qmq_client import Delivery, Retry, consumer
from qmq_client.testing import FakeClock, drain
from tests.client.consumer.kit import GROUP, SUBJECT, Bench
from tests.client.consumer.prefetching import (
    LONG_S,
    handle_one,
    prefetch_of,
    received,
    taken_by,
    working,
)
from tests.kit.waiting import wait_for


def quick(clock: FakeClock, **settings: Any) -> Any:
    """A prefetch that knows its handler as quick, with 400 messages."""
    prefetch = prefetch_of(clock, **settings)
    handle_one(prefetch, clock, 0)
    prefetch.put(received(*[1] * 400))
    return prefetch


def test_what_a_quick_handler_begins_is_taken_a_hundred_at_a_time(bench: Bench) -> None:
    @consumer(SUBJECT, group=GROUP)
    def handler(body: Any) -> None: ...

    bench.put(*range(500))
    (member,) = bench.consumers(handler).members
    passes: list[int] = []
    while (
        count := member.pull_once(is_blocking=False).count
        + member.work_once(is_blocking=False).count
    ):
        passes.append(count)
    assert sum(passes) == 2 * 500
    assert len(passes) <= 500 / 100 + 3, "the first call alone tells how quick it is"
    member.settle_once()
    assert bench.broker.lag(SUBJECT, GROUP) == 0


def test_C6_an_idle_worker_takes_what_waits_behind_a_call_that_hangs() -> None:
    clock = FakeClock()
    prefetch = quick(clock, concurrency=2)
    may_end = threading.Event()
    hangs = working(prefetch, until=may_end)
    wait_for(lambda: bool(prefetch.running()))
    (stuck,) = prefetch.running()
    assert len(stuck.rest) == 100
    left = 399
    while left:
        assert len(taken_by(prefetch)) == 1
        prefetch.finish(1)
        left -= 1
    assert prefetch.take(is_blocking=False) is None
    assert prefetch.count == 1
    may_end.set()
    hangs.join(LONG_S)
    assert prefetch.count == 0


def test_C8_a_stop_takes_what_a_worker_has_not_begun() -> None:
    prefetch = quick(FakeClock())
    running = prefetch.take(is_blocking=False)
    assert len(running.rest) == 100
    assert len(prefetch.stop()) == 399
    assert not running.begin_next(0.0)
    prefetch.finish(1)
    assert prefetch.count == 0


def test_what_is_done_of_a_slice_leaves_room_before_its_end() -> None:
    clock = FakeClock()
    prefetch = quick(clock)
    running = prefetch.take(is_blocking=False)
    while running.done < 60:
        assert running.begin_next(clock.monotonic_s())
    assert prefetch.count == 340
    assert prefetch.room(is_blocking=False) == 660


def test_a_slice_ends_when_its_time_is_up_and_the_rest_waits_again_in_order() -> None:
    clock = FakeClock()
    prefetch = quick(clock)
    running = prefetch.take(is_blocking=False)
    clock.advance(6)
    assert not running.begin_next(clock.monotonic_s())
    prefetch.finish(1)
    (next_one,) = taken_by(prefetch)
    assert (next_one.sequence, prefetch.count) == (1, 399)


def test_C2_what_was_handled_is_acked_while_a_later_call_of_the_slice_hangs(bench: Bench) -> None:
    acked: list[int] = []

    @consumer(SUBJECT, group=GROUP)
    def handler(body: Any) -> None:
        if body == "slow":
            (settlement,) = member.ledger.drain().settlements
            acked.extend(after - first for first, after in settlement.acks)

    consumers = bench.consumers(handler)
    (member,) = consumers.members
    bench.put("warm")
    drain(consumers)
    bench.put(*range(20), "slow", *range(20))
    member.pull_once(is_blocking=False)
    member.work_once(is_blocking=False)
    assert acked == [20]


@pytest.mark.parametrize("error", [ValueError("no"), Retry(after=5)], ids=["error", "retry"])
def test_a_failure_is_of_its_own_message_alone_and_ends_the_slice(
    bench: Bench, error: Exception
) -> None:
    @consumer(SUBJECT, group=GROUP)
    def handler(body: Any) -> None:
        if body == "bad":
            raise error

    consumers = bench.consumers(handler)
    (member,) = consumers.members
    bench.put("warm")
    drain(consumers)
    bench.put(*range(10), "bad", *range(10))
    member.pull_once(is_blocking=False)
    assert [member.work_once(is_blocking=False).count for _ in range(3)] == [11, 10, 0]
    counted = bench.counters(consumers)
    assert (counted["acked"], counted["nacked"]) == (21, 1)


def test_C9_a_handler_that_ends_the_interpreter_is_called_with_nothing_further(
    bench: Bench,
) -> None:
    calls: list[Any] = []

    @consumer(SUBJECT, group=GROUP)
    def handler(body: Any) -> None:
        calls.append(body)
        if body == "exit":
            raise SystemExit(3)

    consumers = bench.consumers(handler)
    bench.put("warm")
    drain(consumers)
    bench.put("exit", *range(10))
    with pytest.raises(SystemExit):
        drain(consumers)
    assert calls == ["warm", "exit"]


def test_what_is_settled_by_hand_is_taken_one_by_one(bench: Bench) -> None:
    @consumer(SUBJECT, group=GROUP, auto_ack=False)
    def handler(delivery: Delivery) -> None:
        delivery.ack()

    consumers = bench.consumers(handler)
    (member,) = consumers.members
    bench.put("warm")
    drain(consumers)
    bench.put(*range(10))
    member.pull_once(is_blocking=False)
    assert member.work_once(is_blocking=False).count == 1
