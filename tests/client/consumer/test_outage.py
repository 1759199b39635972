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
from qmq_client.errors import BrokerBusyError, BrokerUnreachableError
from qmq_client.ids import MESSAGE_IDS
from qmq_client.message import Message, message_to_record
from qmq_client.testing import MemoryBroker, MemoryTransport
from qmq_client.transport.http import HttpTransport
from qmq_client.wire.deliveries import Deliveries
from qmq_client.wire.frame import build_message_frame
from qmq_client.wire.record import encode_record
from qmq_client.wire.requests import PullRequest
from tests.client.consumer.kit import GROUP, SUBJECT, WAIT_S, Bench
from tests.kit.broker_process import BrokerProcess
from tests.kit.waiting import wait_for

#: A wait that is not ended fails its test.
FOR_EVER_S = 3_600.0
GONE = BrokerUnreachableError("gone")


def waiting(outage: Outage, seconds: float = FOR_EVER_S) -> threading.Thread:
    seen = outage.marks()
    outage.begin()
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
    outage.begin()
    outage.end()
    outage.wait(FOR_EVER_S, seen)


def test_answers_in_peace_wake_nobody_and_mark_nothing() -> None:
    outage = Outage()
    seen = outage.marks()
    outage.end()
    assert outage.marks() == seen


def test_no_wait_is_longer_than_an_idle_consumers_poll() -> None:
    assert RETRY_BACKOFF.max_ms == 1_000


def test_W8_a_row_of_failures_is_told_less_and_less_often_and_its_end_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    failures = Failures("pull", "orders/audit", Outage())
    for _ in range(1_000):
        failures.pause_s(GONE)
    failures.answered()
    failures.answered()
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 10 + 1  # 1, 2, 4 … 512, and the end
    assert lines[-1] == "pull_resumed consumer=orders/audit failures=1000"
    assert failures.pause_s(GONE) <= 0.1, "the next row begins from the first wait"


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


def test_C9_consumers_go_on_when_the_broker_is_back() -> None:
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
        wait_for(lambda: transport.calls["pull"] > 8)
        broker.faults.is_unreachable = False
        for _ in range(2):
            assert handled.acquire(timeout=WAIT_S)
        counted = consumers.counters().values()
        assert all(each["pull_failures"] for each in counted)


def test_C9_consumers_go_on_after_their_broker_was_killed_and_came_back(tmp_path: Path) -> None:
    handled = Queue[Any]()

    @consumer(SUBJECT, group=GROUP)
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
    wait_for(lambda: consumers.counters()[counted]["pull_failures"] > 5)
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
