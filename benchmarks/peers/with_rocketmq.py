"""RocketMQ by its Python client, through the broker's proxy: sends awaited together, a push consumer.

The Java client makes what messages are kept in: this one cannot. The log that it writes is in HOME.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from itertools import islice
from typing import Any

from rocketmq import (
    ClientConfiguration,
    ConsumeResult,
    Credentials,
    FilterExpression,
    Message,
    MessageListener,
    Producer,
    PushConsumer,
)

from benchmarks.peers.traffic import IN_FLIGHT, PROBE, Begins, PlainSystem, Seen, Send, serve
from benchmarks.worker import Control

GROUP = "board"
#: Of each subject, as the Java client makes it.
QUEUES = 4


class Listener(MessageListener):  # type: ignore[misc]  # not installed where types are checked
    """Counts what its threads see, but for probes: when all have come, those that follow will."""

    def __init__(self, count: int, seen: Seen) -> None:
        self.is_there = threading.Event()
        self.done = threading.Event()
        self._left = count
        self._probes = QUEUES
        self._seen = seen
        self._lock = threading.Lock()

    def consume(self, message: Any) -> Any:
        with self._lock:
            if message.body == PROBE:
                self._probes -= 1
            else:
                self._probes = 0
                self._seen(message.body)
                self._left -= 1
            if self._probes <= 0:
                self.is_there.set()
            if not self._left:
                self.done.set()
        return ConsumeResult.SUCCESS


class Rocketmq(PlainSystem):
    """See `traffic.System`; the Java client creates the topics."""

    def __init__(self, address: str) -> None:
        self.configuration = ClientConfiguration(address, Credentials())

    def produce(self, subject: str, bodies: Iterator[bytes]) -> None:
        producer = self.producer(subject)
        while batch := list(islice(bodies, IN_FLIGHT)):
            wait_for([producer.send_async(message_of(subject, body)) for body in batch])
        producer.shutdown()

    def consume(self, subject: str, count: int, seen: Seen, begins: Begins) -> None:
        """A consumer is given its queues about a second after its start: it sees a probe in each of them first."""
        producer = self.producer(subject)
        for _ in range(QUEUES):  # one after the other
            producer.send(message_of(subject, PROBE))
        producer.shutdown()
        listener = Listener(count, seen)
        consumer = PushConsumer(
            self.configuration, subject + GROUP, listener, {subject: FilterExpression()}
        )
        consumer.startup()
        listener.is_there.wait()
        begins()
        listener.done.wait()
        consumer.shutdown()

    def receive(self, subject: str, count: int, seen: Seen, begins: Begins) -> None:
        self.consume(subject, count, seen, begins)

    def sender(self, subject: str) -> Send:
        producer = self.producer(subject)
        return lambda body: producer.send(message_of(subject, body))

    def pacer(self, subject: str) -> tuple[Send, Callable[[], object]]:
        producer = self.producer(subject)
        sent: list[Future[Any]] = []
        return (
            lambda body: sent.append(producer.send_async(message_of(subject, body))),
            lambda: wait_for(sent),
        )

    def producer(self, subject: str) -> Any:
        producer = Producer(self.configuration, (subject,))
        producer.startup()
        return producer


def message_of(subject: str, body: bytes) -> Any:
    message = Message()
    message.topic = subject
    message.body = body
    return message


def wait_for(sent: list[Future[Any]]) -> None:
    """Raises what went wrong with the first that failed."""
    for one in sent:
        one.result()


def work(control: Control, *, address: str, mode: str) -> None:
    """The process of this client; the server alone decides about the mode."""
    serve(control, Rocketmq(address))
