"""Messages that were pulled for a faster handler are returned, so that others can have them."""

from __future__ import annotations

import threading
from typing import Any

from qmq_client.consumer import consumer
from qmq_client.testing import FakeClock, drain
from tests.client.consumer.kit import GROUP, SUBJECT, Bench
from tests.client.consumer.prefetching import (
    LONG_S,
    handle_one,
    prefetch_of,
    received,
    sizes,
    take_one,
    taken_by,
    working,
)
from tests.kit.waiting import wait_for

SECOND = 1_000
LEASE_MS = 30 * SECOND


def test_C6_what_waits_behind_calls_that_run_longer_than_it_was_to_last_is_surplus() -> None:
    clock = FakeClock()
    prefetch = prefetch_of(clock)
    handle_one(prefetch, clock, 1)
    prefetch.put(received(*[1] * 201))
    assert len(taken_by(prefetch)) == 1
    clock.advance(250)
    assert prefetch.take_surplus() == []
    clock.advance(1)
    assert len(prefetch.take_surplus()) == 200
    assert (prefetch.count, prefetch.room(is_blocking=False)) == (1, 0)


def test_C6_while_one_worker_is_free_or_has_just_begun_what_waits_is_no_surplus() -> None:
    clock = FakeClock()
    prefetch = prefetch_of(clock, concurrency=2)
    handle_one(prefetch, clock, 1)
    prefetch.put(received(*[1] * 100))
    may_end = threading.Event()
    worker = working(prefetch, until=may_end)
    wait_for(lambda: len(prefetch.running()) == 1)
    clock.advance(10_000)
    assert prefetch.take_surplus() == []
    assert len(taken_by(prefetch)) == 1
    assert prefetch.take_surplus() == []
    clock.advance(251)
    assert len(prefetch.take_surplus()) == 98
    may_end.set()
    worker.join(LONG_S)


def test_C6_what_would_last_far_longer_than_it_was_pulled_for_is_surplus_the_newest_first() -> None:
    clock = FakeClock()
    prefetch = prefetch_of(clock)
    handle_one(prefetch, clock, 1)
    messages = received(*[1] * 240)
    prefetch.put(messages)
    assert prefetch.take_surplus() == []
    for _ in range(20):
        take_one(prefetch, clock, 100)
    surplus = prefetch.take_surplus()
    assert set(surplus) == set(messages[-len(surplus) :])
    assert 10 <= prefetch.count <= 11, "what lasts about a second"
    assert prefetch.take_surplus() == []


def test_C6_what_comes_alone_behind_the_very_first_call_is_surplus_when_that_hangs() -> None:
    clock = FakeClock()
    prefetch = prefetch_of(clock, batch_size=50)
    prefetch.put(received(*[2] * 50))
    assert len(taken_by(prefetch)) == 1
    clock.advance(251)
    assert len(prefetch.take_surplus()) == 49
    prefetch.finish(1)
    prefetch.put(received(1))
    assert sizes(prefetch) == [1], "nothing that comes alone is left to be waited for"


def test_C6_what_waits_behind_a_handler_that_became_slow_goes_to_an_idle_consumer_as_no_attempt(
    bench: Bench,
) -> None:
    """It would wait for three quarters of its lease."""
    handled: list[Any] = []

    @consumer(SUBJECT, group=GROUP, lease_ms=LEASE_MS, max_attempts=1)
    def slow(body: Any) -> None:
        if body != "slow":
            return
        bench.clock.advance(SECOND)
        member.settle_once()
        drain(idle)

    @consumer(SUBJECT, group=GROUP, lease_ms=LEASE_MS, max_attempts=1)
    def fast(body: Any) -> None:
        handled.append(body)

    consumers, idle = bench.consumers(slow), bench.consumers(fast)
    (member,) = consumers.members
    bench.put(*["warm"] * 100)
    drain(consumers)
    bench.put("slow", *range(100))
    member.pull_once(is_blocking=False)
    assert member.prefetch.count > 50
    member.work_once(is_blocking=False)
    assert sorted(handled) == list(range(100))
    member.settle_once()
    assert bench.broker.lag(SUBJECT, GROUP) == 0
    assert bench.broker.dead_letters(SUBJECT, GROUP) == []


def test_what_is_never_delivered_again_stays_behind_a_handler_that_became_slow(
    bench: Bench,
) -> None:
    handled: list[Any] = []

    @consumer(SUBJECT, group=GROUP, at_most_once=True, prefetch_max=10)
    def handler(body: Any) -> None:
        handled.append(body)
        if body == "slow":
            bench.clock.advance(10 * SECOND)
            member.settle_once()

    consumers = bench.consumers(handler)
    (member,) = consumers.members
    bench.put(*["warm"] * 20)
    drain(consumers)
    bench.put("slow", *range(9))
    assert member.pull_once(is_blocking=False).count == 10
    while member.work_once(is_blocking=False).count:
        pass
    assert handled[20:] == ["slow", *range(9)]
