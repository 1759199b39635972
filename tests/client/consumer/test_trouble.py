"""A broker that cannot be reached, is busy, or talks nonsense: bounded calls, nothing lost."""

from __future__ import annotations

from typing import Any

import pytest

from qmq_client.consumer import Consumers, consumer
from qmq_client.consumer.member import Lines
from qmq_client.errors import BrokerRefusedError, BrokerUnreachableError
from qmq_client.testing import drain
from qmq_client.transport.memory import MemoryTransport
from qmq_client.wire.deliveries import Deliveries
from qmq_client.wire.requests import ErrorAnswer, PullRequest, SettleAnswer, SettleRequest
from tests.client.consumer.kit import GROUP, SUBJECT, Bench


def remembering(**settings: Any) -> tuple[Any, list[Any]]:
    seen: list[Any] = []

    @consumer(SUBJECT, group=GROUP, **settings)
    def handler(body: Any) -> None:
        seen.append(body)

    return handler, seen


def test_C9_an_unreachable_broker_costs_one_call_per_pass_with_growing_pauses(
    bench: Bench,
) -> None:
    handler, seen = remembering()
    bench.put(1)
    bench.broker.faults.is_unreachable = True
    member = bench.consumers(handler).members[0]
    pauses = [member.pull_once(is_blocking=False).pause_s for _ in range(12)]
    assert 0.08 <= pauses[0] <= 0.1
    assert pauses[1] > pauses[0]
    assert 0.8 <= pauses[-1] <= 1
    assert bench.transport.calls["pull"] == 12
    bench.broker.faults.is_unreachable = False
    assert member.pull_once(is_blocking=False).count == 1
    member.work_once(is_blocking=False)
    assert seen == [1]
    bench.broker.faults.is_unreachable = True
    assert member.pull_once(is_blocking=False).pause_s <= 0.1


def test_a_pull_that_ends_because_of_the_stop_is_no_trouble(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    consumers = bench.consumers(consumer(SUBJECT, group=GROUP)(lambda body: None))
    (member,) = consumers.members

    class ClosingTransport(MemoryTransport):
        def pull(self, request: PullRequest) -> Deliveries:
            member.stop()
            raise BrokerUnreachableError("Bad file descriptor")

    member._lines = Lines(pulling=ClosingTransport(bench.broker), settling=bench.transport)
    assert member.pull_once().has_failed
    assert caplog.text == ""


def test_a_busy_broker_is_left_alone_as_long_as_it_asks(bench: Bench) -> None:
    handler, _ = remembering()
    bench.broker.faults.busy_retry_after_s = 7.5
    member = bench.consumers(handler).members[0]
    done = member.pull_once(is_blocking=False)
    assert done.pause_s == 7.5
    assert not done.is_outage, "an answer to others must not end this wait"
    bench.broker.faults.busy_retry_after_s = None
    bench.broker.faults.is_unreachable = True
    assert member.pull_once(is_blocking=False).is_outage


@pytest.mark.parametrize("fault", ["lost_answers", "garbage_answers"])
def test_C1_messages_of_a_lost_answer_come_again_after_their_lease(
    bench: Bench, fault: str
) -> None:
    handler, seen = remembering(lease_ms=1_000)
    bench.put(1)
    setattr(bench.broker.faults, fault, 1)
    consumers = bench.consumers(handler)
    drain(consumers)
    for _ in range(2):  # the lease, then the backoff
        bench.clock.advance(1_000)
        drain(consumers)
    assert seen == [1]
    assert bench.broker.lag(SUBJECT, GROUP) == 0


def test_outcomes_wait_for_the_broker_to_come_back(bench: Bench) -> None:
    handler, seen = remembering()
    bench.put(1, 2, 3)
    consumers = bench.consumers(handler)
    member = consumers.members[0]
    member.pull_once(is_blocking=False)
    member.work_once(is_blocking=False)
    bench.broker.faults.is_unreachable = True
    for _ in range(5):
        assert member.settle_once().pause_s > 0
        assert member.pull_once(is_blocking=False).pause_s > 0
    bench.broker.faults.is_unreachable = False
    drain(consumers)
    assert seen == [1, 2, 3]
    assert bench.broker.lag(SUBJECT, GROUP) == 0
    assert "stale" not in bench.counters(consumers)


def test_C3_an_outcome_that_was_taken_and_whose_answer_was_lost_is_not_called_late(
    bench: Bench,
) -> None:
    @consumer(SUBJECT, group=GROUP)
    def fail(_: int) -> None:
        raise ValueError("not today")

    bench.put(1)
    consumers = bench.consumers(fail)
    member = consumers.members[0]
    member.pull_once(is_blocking=False)
    member.work_once(is_blocking=False)
    bench.broker.faults.lost_answers = 1
    assert member.settle_once().has_failed
    assert member.settle_once().count == 1, "given back already, so it is refused now"
    assert "stale" not in bench.counters(consumers)


class Picky(MemoryTransport):
    """Refuses every settlement that names this pull sequence, for ever."""

    bad = 2
    status = 422

    def settle(self, request: SettleRequest) -> SettleAnswer:
        for settlement in request.settlements:
            for first, after in settlement.acks:
                if first <= self.bad < after:
                    self.calls["settle"] += 1
                    raise BrokerRefusedError(self.status, ErrorAnswer(code="x", message="y"))
        return super().settle(request)

    def pull(self, request: PullRequest) -> Deliveries:
        if request.settlements:
            self.settle(
                SettleRequest(
                    subject=request.subject,
                    group=request.group,
                    consumer=request.consumer,
                    settlements=request.settlements,
                )
            )
        return super().pull(
            PullRequest(
                subject=request.subject,
                group=request.group,
                consumer=request.consumer,
                max_messages=request.max_messages,
            )
        )


def handled_but_unsettled(bench: Bench, transport: MemoryTransport, count: int) -> Consumers:
    handler, _ = remembering(batch_size=100)
    bench.put(*range(count))
    consumers = Consumers([handler], transport, clock=bench.clock)
    member = consumers.members[0]
    member.pull_once(is_blocking=False)
    member.work_once(is_blocking=False)
    return consumers


def test_one_outcome_the_broker_will_never_take_costs_no_other(bench: Bench) -> None:
    transport = Picky(bench.broker)
    consumers = handled_but_unsettled(bench, transport, 64)
    member = consumers.members[0]
    member.pull_once(is_blocking=False)  # refused as well; the outcomes are kept
    assert len(member.ledger) == 64
    member.settle_once()
    assert len(member.ledger) == 0
    assert bench.broker.lag(SUBJECT, GROUP) == 1
    assert bench.counters(consumers)["settle_refused"] == 1
    assert transport.calls["settle"] <= 2 * 7 + 2


def test_who_is_refused_asks_again_by_its_own_waits_whatever_others_are_answered(
    bench: Bench,
) -> None:
    transport = Picky(bench.broker)
    transport.status = 403
    member = handled_but_unsettled(bench, transport, 8).members[0]
    done = member.settle_once()
    assert done.has_failed
    assert not done.is_outage


def test_outcomes_are_kept_when_it_is_not_they_that_are_refused(bench: Bench) -> None:
    transport = Picky(bench.broker)
    transport.status = 403
    consumers = handled_but_unsettled(bench, transport, 8)
    member = consumers.members[0]
    assert member.settle_once().pause_s > 0
    assert len(member.ledger) == 8
    transport.bad = -1
    member.settle_once()
    assert bench.broker.lag(SUBJECT, GROUP) == 0


def test_outcomes_of_neighbours_travel_as_one_range(bench: Bench) -> None:
    requests: list[SettleRequest] = []

    class Listening(MemoryTransport):
        def settle(self, request: SettleRequest) -> SettleAnswer:
            requests.append(request)
            return super().settle(request)

    consumers = handled_but_unsettled(bench, Listening(bench.broker), 100)
    consumers.members[0].settle_once()
    (request,) = requests
    (settlement,) = request.settlements
    assert settlement.acks == ((0, 100),)


def test_outcomes_under_two_epochs_of_the_broker_are_told_apart(bench: Bench) -> None:
    handler, seen = remembering()
    bench.put(1)
    consumers = bench.consumers(handler)
    member = consumers.members[0]
    member.pull_once(is_blocking=False)
    member.work_once(is_blocking=False)
    bench.broker.restart()
    bench.put(2)
    drain(consumers)
    assert seen == [1, 2]
    assert bench.broker.lag(SUBJECT, GROUP) == 0


def test_more_outcomes_than_one_request_carries_go_in_several(bench: Bench) -> None:
    handler, seen = remembering(batch_size=1000)
    bench.put(*range(4_000))
    consumers = bench.consumers(handler)
    member = consumers.members[0]
    for _ in range(4):
        received = member._lines.pulling.pull(
            PullRequest(
                subject=SUBJECT,
                group=GROUP,
                consumer=consumers.consumer_id,
                max_messages=1_000,
                max_bytes=2**40,
            )
        )
        member._receive(received, bench.clock.monotonic_s())
        member.work_once(is_blocking=False)
    assert [len(batch) for batch in seen] == [1_000] * 4
    sent = [member.settle_once().count for _ in range(3)]
    assert sent == [1_500, 1_500, 1_000]
    assert bench.broker.lag(SUBJECT, GROUP) == 0
