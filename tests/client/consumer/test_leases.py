"""Leases: kept while a handler runs, given up in time, and never settled late without a word."""

from __future__ import annotations

from typing import Any

import pytest

from qmq_client.consumer import StaleDelivery, consumer
from qmq_client.testing import drain
from tests.client.consumer.kit import GROUP, SUBJECT, Bench

SECOND = 1_000
LEASE_MS = 30 * SECOND


def test_C3_a_lease_is_prolonged_while_its_handler_runs(bench: Bench) -> None:
    @consumer(SUBJECT, group=GROUP, lease_ms=LEASE_MS)
    def handler(body: Any) -> None:
        for _ in range(10):
            bench.clock.advance(LEASE_MS // 2 + 1)
            member.settle_once()

    bench.put(1)
    consumers = bench.consumers(handler)
    member = consumers.members[0]
    drain(consumers)
    assert bench.broker.lag(SUBJECT, GROUP) == 0
    assert bench.counters(consumers) == {"pulled": 1, "acked": 1}


def test_C3_a_lease_is_not_prolonged_forever(bench: Bench) -> None:
    @consumer(SUBJECT, group=GROUP, lease_ms=LEASE_MS, lease_ms_max=2 * LEASE_MS)
    def handler(body: Any) -> None:
        for _ in range(10):
            bench.clock.advance(LEASE_MS // 2 + 1)
            member.settle_once()
        in_flight.append(bench.broker.in_flight(SUBJECT, GROUP))

    in_flight: list[int] = []
    bench.put(1)
    consumers = bench.consumers(handler)
    member = consumers.members[0]
    member.pull_once(is_blocking=False)
    member.work_once(is_blocking=False)
    assert in_flight == [0]


def test_C3_an_ack_after_the_lease_is_refused_and_reported_to_the_handlers_owner(
    bench: Bench,
) -> None:
    reported: list[StaleDelivery] = []

    @consumer(SUBJECT, group=GROUP, lease_ms=LEASE_MS, on_stale=reported.extend)
    def handler(body: Any) -> None:
        if len(calls) == 0:
            bench.clock.advance(LEASE_MS + 1)
        calls.append(body)

    calls: list[Any] = []
    (message_id,) = bench.put("late")
    consumers = bench.consumers(handler)
    drain(consumers)
    assert reported == [
        StaleDelivery(
            subject=SUBJECT,
            group=GROUP,
            message_id=message_id,
            sequence=0,
            attempt=1,
            outcome="ack",
        )
    ]
    assert bench.counters(consumers)["stale"] == 1
    bench.clock.advance(SECOND)
    drain(consumers)
    assert calls == ["late", "late"]
    assert bench.broker.lag(SUBJECT, GROUP) == 0


def test_C3_the_time_an_answer_was_under_way_is_taken_off_its_lease(bench: Bench) -> None:
    """The broker counts from when it gave the message, so by then somebody else may have it."""
    calls: list[Any] = []

    @consumer(SUBJECT, group=GROUP, lease_ms=LEASE_MS)
    def handler(body: Any) -> None:
        calls.append(body)

    bench.put("late")
    consumers = bench.consumers_far_away(handler, answer_ms=5 * SECOND)
    (member,) = consumers.members
    member.pull_once(is_blocking=False)
    bench.clock.advance(LEASE_MS - 5 * SECOND)
    member.work_once(is_blocking=False)
    assert calls == []
    assert bench.counters(consumers) == {"pulled": 1, "late": 1}


def test_a_pull_that_waited_long_for_its_message_keeps_most_of_the_lease(bench: Bench) -> None:
    """How long it waited at the broker cannot be told from how long its answer was under way."""
    calls: list[Any] = []

    @consumer(SUBJECT, group=GROUP, lease_ms=LEASE_MS)
    def handler(body: Any) -> None:
        calls.append(body)

    bench.put("in time")
    consumers = bench.consumers_far_away(handler, answer_ms=LEASE_MS)
    (member,) = consumers.members
    member.pull_once(is_blocking=False)
    bench.clock.advance(LEASE_MS * 3 // 4 - 1)
    member.work_once(is_blocking=False)
    assert calls == ["in time"]


def test_C9_an_owner_who_fails_on_the_report_stops_nothing(bench: Bench) -> None:
    def fail(_: Any) -> None:
        raise ValueError("owner")

    @consumer(SUBJECT, group=GROUP, lease_ms=LEASE_MS, on_stale=fail)
    def handler(body: Any) -> None:
        calls.append(body)
        if len(calls) == 1:
            bench.clock.advance(LEASE_MS + 1)

    calls: list[Any] = []
    bench.put(1, 2)
    consumers = bench.consumers(handler)
    drain(consumers)
    bench.clock.advance(SECOND)
    drain(consumers)
    assert sorted(calls) == [1, 1, 2]


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()], ids=["exit", "Ctrl-C"])
def test_C9_an_owner_who_ends_the_interpreter_on_the_report_stops_the_consumers_in_order(
    bench: Bench, error: BaseException
) -> None:
    def leave(_: Any) -> None:
        raise error

    @consumer(SUBJECT, group=GROUP, lease_ms=LEASE_MS, on_stale=leave)
    def handler(body: Any) -> None:
        bench.clock.advance(LEASE_MS + 1)

    bench.put(1)
    with pytest.raises(type(error)) as raised:
        bench.consumers(handler).run()
    assert raised.value is error


def test_an_ack_repeated_after_a_lost_answer_is_not_reported(bench: Bench) -> None:
    reported: list[StaleDelivery] = []

    @consumer(SUBJECT, group=GROUP, lease_ms=LEASE_MS, on_stale=reported.extend)
    def handler(body: Any) -> None:
        raise ValueError("so it is a nack, which cannot be repeated")

    bench.put(1)
    consumers = bench.consumers(handler)
    member = consumers.members[0]
    member.pull_once(is_blocking=False)
    member.work_once(is_blocking=False)
    bench.broker.faults.lost_answers = 1
    assert member.settle_once().pause_s > 0
    assert member.settle_once().count == 1
    assert reported == []


def test_C3_what_waited_past_its_lease_is_not_handed_to_the_handler(bench: Bench) -> None:
    calls: list[Any] = []

    @consumer(SUBJECT, group=GROUP, lease_ms=LEASE_MS)
    def handler(body: Any) -> None:
        calls.append(body)

    bench.put(1)
    consumers = bench.consumers(handler)
    member = consumers.members[0]
    member.pull_once(is_blocking=False)
    bench.clock.advance(LEASE_MS)
    member.work_once(is_blocking=False)
    assert calls == []
    assert bench.counters(consumers) == {"pulled": 1, "late": 1}
    assert member.prefetch.count == 0


def test_C4_what_no_handler_can_begin_is_given_back_in_time_and_is_no_attempt_that_failed(
    bench: Bench,
) -> None:
    calls: list[Any] = []

    @consumer(SUBJECT, group=GROUP, lease_ms=LEASE_MS, max_attempts=1)
    def handler(body: Any) -> None:
        calls.append(body)

    bench.put(1)
    consumers = bench.consumers(handler)
    member = consumers.members[0]
    member.pull_once(is_blocking=False)
    bench.clock.advance(LEASE_MS * 3 // 4 - 1)
    member.settle_once()
    assert member.prefetch.count == 1
    bench.clock.advance(1)
    member.settle_once()
    assert member.prefetch.count == 0
    assert calls == []
    drain(consumers)
    assert calls == [1]
    assert bench.broker.lag(SUBJECT, GROUP) == 0


def test_what_waited_past_its_lease_is_let_go_while_a_handler_hangs(bench: Bench) -> None:
    @consumer(SUBJECT, group=GROUP, lease_ms=LEASE_MS)
    def handler(body: Any) -> None: ...

    bench.put(1)
    consumers = bench.consumers(handler)
    member = consumers.members[0]
    member.pull_once(is_blocking=False)
    assert member.prefetch.count == 1
    bench.clock.advance(LEASE_MS)
    member.settle_once()
    assert member.prefetch.count == 0


def test_a_slow_handler_holds_no_more_than_it_can_begin(bench: Bench) -> None:
    in_flight: list[int] = []

    @consumer(SUBJECT, group=GROUP)
    def handler(body: Any) -> None:
        in_flight.append(bench.broker.in_flight(SUBJECT, GROUP))
        bench.clock.advance(10 * SECOND)

    bench.put(*range(5))
    bench.drain(handler)
    assert in_flight == [1, 1, 1, 1, 1]


def test_a_fast_handler_is_fed_ahead_up_to_the_bound(bench: Bench) -> None:
    @consumer(SUBJECT, group=GROUP, prefetch_max=50)
    def handler(body: Any) -> None:
        in_flight.append(bench.broker.in_flight(SUBJECT, GROUP))

    in_flight: list[int] = []
    bench.put(*range(200))
    bench.drain(handler)
    assert len(in_flight) == 200
    assert 45 <= max(in_flight) <= 2 * 50
    assert bench.transport.calls["pull"] < 20


def test_a_handler_that_hangs_gets_nothing_put_before_its_door(bench: Bench) -> None:
    @consumer(SUBJECT, group=GROUP, concurrency=2)
    def handler(body: Any) -> None:
        if body == "hang":
            bench.clock.advance(20 * SECOND)
            rooms.append(member.prefetch.room(is_blocking=False))

    rooms: list[int] = []
    bench.put(1, 2, 3, "hang")
    consumers = bench.consumers(handler)
    member = consumers.members[0]
    drain(consumers)
    assert rooms == [1]


def test_while_a_batch_may_wait_to_fill_messages_gather_at_the_broker(bench: Bench) -> None:
    batches: list[list[Any]] = []

    @consumer(SUBJECT, group=GROUP, batch_size=3, max_wait_ms=200)
    def handler(bodies: list[Any]) -> None:
        batches.append(bodies)

    consumers = bench.consumers(handler)
    member = consumers.members[0]
    bench.put(1)
    assert member.pull_once(is_blocking=False).pause_s == 0.1
    assert member.work_once(is_blocking=False).count == 0
    bench.put(2, 3)
    assert member.pull_once(is_blocking=False).count == 2
    assert member.work_once(is_blocking=False).count == 3
    bench.put(4)
    member.pull_once(is_blocking=False)
    assert member.work_once(is_blocking=False).count == 0
    bench.clock.advance(200)
    assert member.work_once(is_blocking=False).count == 1
    assert batches == [[1, 2, 3], [4]]


def test_what_comes_alone_is_followed_by_the_next_pull_at_once(bench: Bench) -> None:
    """It joins no batch, so nothing is gained by letting more gather."""

    @consumer(SUBJECT, group=GROUP, batch_size=3, max_wait_ms=15_000)
    def handler(body: list[Any]) -> None:
        raise ValueError("not yet")

    bench.put(1)
    (member,) = bench.consumers(handler).members
    assert member.pull_once(is_blocking=False).pause_s == 7.5
    bench.clock.advance(15 * SECOND)
    member.work_once(is_blocking=False)
    member.settle_once()
    bench.clock.advance(2 * SECOND)
    again = member.pull_once(is_blocking=False)
    assert (again.count, again.pause_s) == (1, 0.0)


@pytest.mark.parametrize(("answer_ms", "pause_s"), [(0, 0.1), (40, 0.06), (1_000, 0.0)])
def test_a_pull_that_brought_nothing_is_not_followed_by_the_next_at_once(
    bench: Bench, answer_ms: int, pause_s: float
) -> None:
    @consumer(SUBJECT, group=GROUP, wait_ms=0)
    def handler(body: Any) -> None: ...

    (member,) = bench.consumers_far_away(handler, answer_ms=answer_ms).members
    assert member.pull_once().pause_s == pytest.approx(pause_s)
    bench.put(1)
    assert member.pull_once().pause_s == 0.0
