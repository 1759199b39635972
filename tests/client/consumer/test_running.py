"""`Consumers` on threads: start, stop within a deadline, and loops that nothing ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from qmq_client.consumer import Consumers, consumer
from qmq_client.errors import BrokerUnreachableError, ConfigurationError
from qmq_client.message import Message
from qmq_client.testing import MemoryBroker, MemoryTransport, drain
from qmq_client.wire.deliveries import Deliveries
from qmq_client.wire.requests import PullRequest, SettleAnswer, SettleRequest
from tests.client.consumer.kit import GROUP, SUBJECT, WAIT_S, wait_for_the_stop
from tests.kit.waiting import wait_for


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker()


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = [one for one in threading.enumerate() if one not in before and one.is_alive()]
    assert [one.name for one in left if one.name.startswith("qmq-")] == []


def put(broker: MemoryBroker, *bodies: Any) -> list[str]:
    return broker.put(*[Message(SUBJECT, body) for body in bodies])


def test_messages_are_handled_by_all_workers_and_acked(broker: MemoryBroker) -> None:
    together = threading.Barrier(3)
    done = threading.Semaphore(0)

    @consumer(SUBJECT, group=GROUP, concurrency=3, wait_ms=20)
    def handler(body: int) -> None:
        together.wait(WAIT_S)
        done.release()

    put(broker, *range(9))
    with Consumers([handler], MemoryTransport(broker)):
        for _ in range(9):
            assert done.acquire(timeout=WAIT_S)
    assert broker.lag(SUBJECT, GROUP) == 0


def test_a_message_sent_while_the_consumer_waits_is_handled_and_settled_while_it_is_idle(
    broker: MemoryBroker,
) -> None:
    handled = threading.Event()

    @consumer(SUBJECT, group=GROUP)
    def handler(body: int) -> None:
        handled.set()

    with Consumers([handler], MemoryTransport(broker)):
        put(broker, 1)
        assert handled.wait(WAIT_S)
        wait_for(lambda: broker.lag(SUBJECT, GROUP) == 0, within_s=WAIT_S)


def test_C8_a_stop_lets_the_running_handler_finish_and_gives_the_rest_back(
    broker: MemoryBroker,
) -> None:
    begun, may_finish = threading.Event(), threading.Event()
    handled: list[int] = []

    @consumer(SUBJECT, group=GROUP, batch_size=2, lease_ms=60_000)
    def handler(bodies: list[int]) -> None:
        begun.set()
        assert may_finish.wait(WAIT_S)
        handled.extend(bodies)

    put(broker, 0, 1)
    consumers = Consumers([handler], MemoryTransport(broker))
    consumers.start()
    assert begun.wait(WAIT_S)
    member = consumers.members[0]
    waiting = member._lines.pulling.pull(
        PullRequest(subject=SUBJECT, group=GROUP, consumer=consumers.consumer_id)
    )
    assert waiting.messages == ()
    put(broker, 2, 3)
    stopping = threading.Thread(target=consumers.stop, args=(WAIT_S,))
    stopping.start()
    wait_for_the_stop(consumers)
    may_finish.set()
    stopping.join(WAIT_S)
    report = consumers.stop()
    assert (report.is_clean, report.running, report.unsettled) == (True, 0, 0)
    assert handled == [0, 1]
    assert broker.in_flight(SUBJECT, GROUP) == 0
    assert broker.lag(SUBJECT, GROUP) == 2


def test_C8_what_was_pulled_and_not_begun_is_given_back_at_once(broker: MemoryBroker) -> None:
    @consumer(SUBJECT, group=GROUP, batch_size=5)
    def handler(bodies: list[int]) -> None: ...

    put(broker, *range(5))
    consumers = Consumers([handler], MemoryTransport(broker))
    consumers.members[0].pull_once(is_blocking=False)
    assert broker.in_flight(SUBJECT, GROUP) == 5
    assert consumers.members[0].stop() == 5
    consumers.members[0].settle_once()
    assert broker.in_flight(SUBJECT, GROUP) == 0
    again = broker.pull(PullRequest(subject=SUBJECT, group=GROUP, consumer="other"))
    assert len(again.messages) == 5


def test_C8_a_stop_makes_no_dead_letter_of_what_was_not_begun(broker: MemoryBroker) -> None:
    @consumer(SUBJECT, group=GROUP, batch_size=5, max_attempts=1)
    def handler(bodies: list[int]) -> None: ...

    put(broker, *range(5))
    consumers = Consumers([handler], MemoryTransport(broker))
    consumers.members[0].pull_once(is_blocking=False)
    consumers.members[0].stop()
    consumers.members[0].settle_once()
    assert broker.dead_letters(SUBJECT, GROUP) == []
    report = drain(Consumers([handler], MemoryTransport(broker)))
    assert (report.handled, broker.lag(SUBJECT, GROUP)) == (5, 0)


class GateTransport(MemoryTransport):
    """Holds back the answer to a pull that has messages until it is let go."""

    def __init__(self, broker: MemoryBroker) -> None:
        super().__init__(broker)
        self.is_holding = threading.Event()
        self.may_go = threading.Event()

    def pull(self, request: PullRequest) -> Deliveries:
        deliveries = super().pull(request)
        if deliveries.messages:
            self.is_holding.set()
            assert self.may_go.wait(WAIT_S)
        return deliveries


def test_C8_what_a_pull_brings_after_the_stop_began_is_given_back(broker: MemoryBroker) -> None:
    handled: list[int] = []

    @consumer(SUBJECT, group=GROUP)
    def handler(body: int) -> None:
        handled.append(body)

    put(broker, 1)
    transport = GateTransport(broker)
    consumers = Consumers([handler], transport)
    consumers.start()
    assert transport.is_holding.wait(WAIT_S)
    stopping = threading.Thread(target=consumers.stop, args=(WAIT_S,))
    stopping.start()
    wait_for_the_stop(consumers)
    transport.may_go.set()
    stopping.join(WAIT_S)
    assert consumers.stop().is_clean
    assert handled == []
    assert broker.in_flight(SUBJECT, GROUP) == 0


def test_C8_a_handler_that_does_not_finish_does_not_hold_up_the_stop(
    broker: MemoryBroker,
) -> None:
    begun, may_finish = threading.Event(), threading.Event()

    @consumer(SUBJECT, group=GROUP)
    def handler(body: int) -> None:
        begun.set()
        may_finish.wait(WAIT_S)

    put(broker, 1)
    consumers = Consumers([handler], MemoryTransport(broker))
    consumers.start()
    assert begun.wait(WAIT_S)
    report = consumers.stop(1.0)
    assert (report.is_clean, report.running) == (False, 1), "it is back while the handler goes on"
    may_finish.set()
    for thread in consumers._threads.all():
        thread.join(WAIT_S)
    assert broker.lag(SUBJECT, GROUP) == 1, "it was told to come again, and that holds"


def test_C8_an_async_handler_is_cancelled_at_the_deadline_and_its_message_given_back(
    broker: MemoryBroker,
) -> None:
    begun = threading.Event()
    ended: list[str] = []

    @consumer(SUBJECT, group=GROUP)
    async def handler(body: int) -> None:
        begun.set()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    put(broker, 1)
    consumers = Consumers([handler], MemoryTransport(broker))
    consumers.start()
    assert begun.wait(WAIT_S)
    report = consumers.stop(2.0)
    assert ended == ["cancelled"]
    assert report.is_clean
    assert broker.in_flight(SUBJECT, GROUP) == 0


def test_C8_a_stop_without_a_broker_ends_at_its_deadline_and_tells_what_is_unsettled(
    broker: MemoryBroker,
) -> None:
    handled = threading.Event()

    @consumer(SUBJECT, group=GROUP)
    def handler(body: int) -> None:
        broker.faults.is_unreachable = True
        handled.set()

    put(broker, 1)
    consumers = Consumers([handler], MemoryTransport(broker))
    consumers.start()
    assert handled.wait(WAIT_S)
    report = consumers.stop(1.0)
    assert (report.is_clean, report.unsettled) == (False, 1)


class HiccupTransport(MemoryTransport):
    """Does not take the first settlements after it was told to."""

    refusals = 0

    def settle(self, request: SettleRequest) -> SettleAnswer:
        if self.refusals:
            self.refusals -= 1
            raise BrokerUnreachableError("a hiccup")
        return super().settle(request)


def test_C8_the_last_outcomes_are_tried_again_until_the_deadline(broker: MemoryBroker) -> None:
    transport = HiccupTransport(broker)

    @consumer(SUBJECT, group=GROUP, wait_ms=0)
    def handler(body: int) -> None:
        transport.refusals = 3

    put(broker, 1)
    consumers = Consumers([handler], transport)
    consumers.members[0].pull_once(is_blocking=False)
    name = consumers.members[0].options.name
    consumers._threads.add("settle", name, lambda: consumers._settle(member))
    member = consumers.members[0]
    member.work_once(is_blocking=False)
    for thread in consumers._threads.all():
        thread.start()
    assert consumers.stop(WAIT_S).is_clean
    assert transport.refusals == 0
    assert broker.lag(SUBJECT, GROUP) == 0


def test_C8_stopping_twice_or_before_the_start_is_harmless(broker: MemoryBroker) -> None:
    consumers = Consumers(
        [consumer(SUBJECT, group=GROUP)(lambda body: None)], MemoryTransport(broker)
    )
    assert consumers.stop().is_clean
    assert consumers.stop().is_clean
    with pytest.raises(ConfigurationError, match="started before"):
        consumers.start()


def test_C8_starting_and_stopping_many_times_leaves_nothing(broker: MemoryBroker) -> None:
    handled: list[int] = []

    @consumer(SUBJECT, group=GROUP, concurrency=2, wait_ms=20)
    def handler(body: int) -> None:
        handled.append(body)

    for number in range(15):
        put(broker, number)
        with Consumers([handler], MemoryTransport(broker)):
            pass
        assert broker.in_flight(SUBJECT, GROUP) == 0
    with Consumers([handler], MemoryTransport(broker)):
        wait_for(lambda: broker.lag(SUBJECT, GROUP) == 0, within_s=WAIT_S)
    assert sorted(handled) == list(range(15))


class BrokenTransport(MemoryTransport):
    """Fails once in a way that no transport may."""

    left = 1

    def pull(self, request: PullRequest) -> Deliveries:
        if self.left:
            self.left -= 1
            raise ZeroDivisionError("a fault of ours")
        return super().pull(request)


def test_C9_even_a_fault_of_ours_does_not_end_the_loop(broker: MemoryBroker) -> None:
    handled = threading.Event()

    @consumer(SUBJECT, group=GROUP)
    def handler(body: int) -> None:
        handled.set()

    put(broker, 1)
    with Consumers([handler], BrokenTransport(broker)):
        assert handled.wait(WAIT_S)


def test_C9_a_worker_outlives_every_exception_of_its_handler(broker: MemoryBroker) -> None:
    done = threading.Event()

    @consumer(SUBJECT, group=GROUP, max_attempts=1, wait_ms=20)
    def handler(body: str) -> None:
        if body == "last":
            done.set()
            return
        raise {"exit": GeneratorExit, "base": BaseException, "value": ValueError}[body]

    put(broker, "exit", "base", "value", "last")
    with Consumers([handler], MemoryTransport(broker)):
        assert done.wait(WAIT_S)
    assert len(broker.dead_letters(SUBJECT, GROUP)) == 3


def test_a_handler_that_ends_the_interpreter_stops_run_and_is_raised_by_it(
    broker: MemoryBroker,
) -> None:
    @consumer(SUBJECT, group=GROUP, wait_ms=20)
    def handler(body: int) -> None:
        raise SystemExit(7)

    put(broker, 1)
    with pytest.raises(SystemExit) as caught:
        Consumers([handler], MemoryTransport(broker)).run()
    assert caught.value.code == 7
    assert broker.in_flight(SUBJECT, GROUP) == 0


def test_an_async_handler_that_ends_the_interpreter_stops_run_too(broker: MemoryBroker) -> None:
    @consumer(SUBJECT, group=GROUP, wait_ms=20)
    async def handler(body: int) -> None:
        raise SystemExit(7)

    put(broker, 1)
    with pytest.raises(SystemExit):
        Consumers([handler], MemoryTransport(broker)).run()


def test_run_ends_when_a_handler_asks_for_it(broker: MemoryBroker) -> None:
    @consumer(SUBJECT, group=GROUP, wait_ms=20)
    def handler(body: int) -> None:
        consumers.request_stop()

    put(broker, 1)
    consumers = Consumers([handler], MemoryTransport(broker))
    assert consumers.run().is_clean
    assert broker.lag(SUBJECT, GROUP) == 0
