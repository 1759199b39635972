"""A broker that is away: short waits, few words, and everybody back at the first answer."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from qmq_client.consumer import Consumers, consumer
from qmq_client.consumer.outage import RETRY_BACKOFF, Failures, Outage
from qmq_client.errors import BrokerBusyError, BrokerRefusedError, BrokerUnreachableError
from qmq_client.ids import MESSAGE_IDS
from qmq_client.message import Message, message_to_record
from qmq_client.testing import FakeClock, MemoryBroker, MemoryTransport
from qmq_client.transport.http import HttpTransport
from qmq_client.wire.deliveries import Deliveries
from qmq_client.wire.frame import build_message_frame
from qmq_client.wire.record import encode_record
from qmq_client.wire.requests import ErrorAnswer, PullRequest
from tests.client.consumer.kit import GROUP, SUBJECT, WAIT_S, Bench
from tests.kit.broker_process import BrokerProcess
from tests.kit.waiting import wait_for

#: A wait that is not ended fails its test.
FOR_EVER_S = 3_600.0
REFUSED = BrokerRefusedError(409, ErrorAnswer(code="group_conflict", message="other tags"))
GONE = BrokerUnreachableError("gone")
NAME = "orders/audit"


def waiting(outage: Outage, seconds: float = FOR_EVER_S) -> threading.Thread:
    seen = outage.marks()
    outage.begin("pull", NAME, GONE)
    thread = threading.Thread(target=outage.wait, args=(seconds, seen), daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("ending", ["end", "wake"])
def test_an_answer_to_anybody_and_a_stop_end_the_waits_of_all(ending: str) -> None:
    outage = Outage()
    threads = [waiting(outage) for _ in range(3)]
    getattr(outage, ending)()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()


def test_an_answer_during_the_call_that_failed_is_not_missed() -> None:
    outage = Outage()
    seen = outage.marks()
    outage.begin("pull", NAME, GONE)
    outage.end()
    outage.wait(FOR_EVER_S, seen)


def test_answers_in_peace_wake_nobody_and_mark_nothing() -> None:
    outage = Outage()
    seen = outage.marks()
    outage.end()
    assert outage.marks() == seen


def test_no_wait_is_longer_than_an_idle_consumers_poll() -> None:
    assert RETRY_BACKOFF.max_ms == 1_000


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines since this was last asked."""
    lines = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return lines


def test_W8_a_row_of_refusals_is_reported_less_and_less_often_and_its_end_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    failures = Failures("pull", NAME, Outage())
    for _ in range(1_000):
        failures.pause_s(REFUSED)
    failures.answered()
    failures.answered()
    lines = told(caplog)
    assert len(lines) == 10 + 1  # 1, 2, 4 … 512, and the end
    assert lines[-1] == "pull_resumed consumer=orders/audit failures=1000"
    assert failures.pause_s(GONE) <= 0.1, "the next row begins from the first wait"


def test_a_refusal_after_an_outage_is_reported_at_once(caplog: pytest.LogCaptureFixture) -> None:
    failures = Failures("pull", NAME, Outage())
    for _ in range(5):
        failures.pause_s(GONE)
    told(caplog)
    failures.pause_s(REFUSED)
    (line,) = told(caplog)
    assert line.startswith("pull_failed consumer=orders/audit")
    assert line.endswith("error=409 group_conflict: other tags")


def test_W8_an_outage_of_many_handlers_is_reported_as_one(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = FakeClock()
    outage = Outage(clock)
    handlers = [Failures("pull", f"orders/{number}", outage) for number in range(200)]
    lines: list[str] = []
    for _ in range(3_600):
        for handler in handlers:
            handler.pause_s(GONE)
        lines += told(caplog)
        clock.advance(1_000)
    at_s = [float(line.split()[1].removeprefix("seconds=")) for line in lines]
    assert at_s == [0, 10, 30, 70, 150, 310, 630, 1270, 2550]
    assert lines[0] == (
        "broker_unreachable seconds=0.0 failures=1 call=pull consumer=orders/0 error=gone"
    )
    for handler in handlers:
        handler.answered()
    assert told(caplog) == ["broker_reachable seconds=3600.0 failures=720000"]


def test_W8_an_outage_that_comes_and_goes_is_reported_as_rarely_as_one_that_lasts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As when one kind of call is never answered, and others are."""
    caplog.set_level(logging.INFO)
    clock = FakeClock()
    outage = Outage(clock)
    pulls, settlements = Failures("pull", NAME, outage), Failures("settle", NAME, outage)
    for _ in range(3_600):
        settlements.pause_s(GONE)
        clock.advance(1_000)
        pulls.answered()
    assert len(told(caplog)) == 9 * 2


def test_after_a_minute_of_peace_an_outage_is_news(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    failures = Failures("pull", NAME, Outage(clock))
    for pause_s, lines in ((0, 1), (5, 0), (59, 1), (61, 1), (1, 0)):
        clock.advance(pause_s * 1_000)
        failures.pause_s(GONE)
        assert len(told(caplog)) == lines, pause_s
        failures.answered()


class Fallible(MemoryTransport):
    """Pulls of one group fail until they are let through; tells how often they were tried."""

    def __init__(self, broker: MemoryBroker, group: str, error: Exception) -> None:
        super().__init__(broker)
        self.group = group
        self.error: Exception | None = error
        self.tried = threading.Semaphore(0)

    def pull(self, request: PullRequest) -> Deliveries:
        if request.group == self.group and self.error is not None:
            self.tried.release()
            raise self.error
        return super().pull(request)


def test_C9_a_busy_broker_is_not_asked_sooner_because_it_answers_others(bench: Bench) -> None:
    broker = MemoryBroker()
    error = BrokerBusyError("busy", retry_after_s=FOR_EVER_S)
    transport = Fallible(broker, "refused", error)
    handled = threading.Semaphore(0)

    @consumer(SUBJECT, group="refused")
    def refused(body: Any) -> None: ...

    @consumer(SUBJECT, group=GROUP, wait_ms=20)
    def served(body: Any) -> None:
        handled.release()

    consumers = Consumers([refused, served], transport)
    consumers.start()
    assert transport.tried.acquire(timeout=WAIT_S)
    for number in range(5):
        broker.put(Message(SUBJECT, number))
        assert handled.acquire(timeout=WAIT_S)
    assert not transport.tried.acquire(blocking=False)
    assert consumers.stop().is_clean


def test_C9_consumers_continue_when_the_broker_is_back() -> None:
    broker = MemoryBroker()
    broker.faults.is_unreachable = True
    transport = MemoryTransport(broker)
    handled = threading.Semaphore(0)

    @consumer(SUBJECT, group=GROUP)
    def one(body: Any) -> None:
        handled.release()

    @consumer(SUBJECT, group="other")
    def two(body: Any) -> None:
        handled.release()

    broker.put(Message(SUBJECT, 1))
    with Consumers([one, two], transport) as consumers:
        wait_for(lambda: transport.calls["pull"] > 5)
        broker.faults.is_unreachable = False
        for _ in range(2):
            assert handled.acquire(timeout=WAIT_S)
        counted = consumers.counters().values()
        assert all(each["pull_failures"] for each in counted)


def test_C9_consumers_continue_after_their_broker_was_killed_and_came_back(tmp_path: Path) -> None:
    handled = Queue[Any]()

    @consumer(SUBJECT, group=GROUP, wait_ms=100)
    def handler(body: Any) -> None:
        handled.put(body)

    data = tmp_path / "data"
    with BrokerProcess(data) as broker:
        url, listen = broker.url, f"{broker.host}:{broker.port}"
        consumers = Consumers(handler, url)
        consumers.start()
        send(url, 1)
        assert handled.get(timeout=WAIT_S) == 1
        broker.kill()
    counted = f"{SUBJECT}/{GROUP}"
    wait_for(lambda: consumers.counters()[counted]["pull_failures"] > 2)
    with BrokerProcess(data, listen=listen):
        send(url, 2)
        while handled.get(timeout=WAIT_S) != 2:  # the first may come again: its ack was not synced
            continue
        assert consumers.stop().is_clean


def send(url: str, body: Any) -> None:
    transport = HttpTransport(url)
    record = message_to_record(Message(SUBJECT, body), new_id=MESSAGE_IDS.next_id(), now_ms=1)
    transport.send(build_message_frame({SUBJECT: [encode_record(record)]}))
    transport.close()
