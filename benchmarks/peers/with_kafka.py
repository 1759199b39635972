"""Kafka by confluent-kafka: `acks=all`, batches filled for 5 ms, offsets committed after each poll."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import confluent_kafka as kafka
from confluent_kafka.admin import AdminClient, NewTopic

from benchmarks.peers.traffic import PROBE, READ, Begins, PlainSystem, Seen, Send, read, serve
from benchmarks.worker import Control

GROUP = "board"
#: Its documentation's advice for throughput: 5 ms for a batch to fill, and batches of up to 1 MB.
PRODUCER = {
    "acks": "all",
    "linger.ms": 5,
    "batch.size": 1_000_000,
    "queue.buffering.max.messages": 200_000,
    "queue.buffering.max.kbytes": 262_144,
}
_POLL_EVERY = 256
_WAIT_S = 60.0


class Kafka(PlainSystem):
    """See `traffic.System`."""

    def __init__(self, address: str) -> None:
        self.servers = {"bootstrap.servers": address}

    def create(self, subject: str) -> None:
        client = AdminClient(self.servers)  # when it is gone, its requests are
        client.create_topics([NewTopic(subject, 1, 1)])[subject].result()

    def produce(self, subject: str, bodies: Iterator[bytes]) -> None:
        producer = self.producer(subject)
        sent = accepted = 0

        def on_delivery(error: Any, _message: Any) -> None:
            nonlocal accepted
            accepted += error is None

        for sent, body in enumerate(bodies, start=1):
            while True:
                try:
                    producer.produce(subject, body, on_delivery=on_delivery)
                    break
                except BufferError:
                    producer.poll(0.01)
            if not sent % _POLL_EVERY:
                producer.poll(0)
        left = producer.flush(_WAIT_S)
        assert (accepted, left) == (sent, 0), f"{accepted} of {sent} accepted, {left} left"

    def consume(self, subject: str, count: int, seen: Seen, begins: Begins) -> None:
        consumer = self.consumer(subject)
        begins()
        got = 0
        while got < count:
            messages = consumer.consume(READ, 0.05)
            for message in messages:
                seen(value_of(message))
            if messages:
                got += len(messages)
                consumer.commit(message=messages[-1], asynchronous=True)
        consumer.commit(asynchronous=False)
        consumer.close()

    def receive(self, subject: str, count: int, seen: Seen, begins: Begins) -> None:
        self.sender(subject)(PROBE)
        consumer = self.consumer(subject)
        while (message := consumer.poll(0.05)) is None or value_of(message) != PROBE:
            pass
        begins()
        got = 0
        while got < count:
            message = consumer.poll(0.05)
            if message is None:
                continue
            seen(value_of(message))
            got += 1
            if not got % 100:
                consumer.commit(message=message, asynchronous=True)
        consumer.close()

    def handle(self, subject: str, count: int, seen: Seen, begins: Begins) -> None:
        """One poll for each message, and the client's own commits: what its documentation shows first."""
        consumer = self.consumer(subject, commits=True)
        begins()
        got = 0
        while got < count:
            message = consumer.poll(0.05)
            if message is not None:
                seen(value_of(message))
                got += 1
        consumer.close()

    def sender(self, subject: str) -> Send:
        producer = self.producer(subject, {"linger.ms": 0})

        def send(body: bytes) -> None:
            producer.produce(subject, body, on_delivery=refuse)
            producer.flush()

        return send

    def pacer(self, subject: str) -> tuple[Send, Callable[[], object]]:
        producer = self.producer(subject)

        def send(body: bytes) -> None:
            producer.produce(subject, body, on_delivery=refuse)
            producer.poll(0)

        return send, producer.flush

    def producer(self, subject: str, more: Mapping[str, object] | None = None) -> Any:
        """One that knows already where messages of this subject go."""
        producer = kafka.Producer({**self.servers, **PRODUCER, **(more or {})})
        producer.list_topics(subject, _WAIT_S)
        return producer

    def consumer(self, subject: str, *, commits: bool = False) -> Any:
        options = {"group.id": GROUP, "enable.auto.commit": commits, "fetch.min.bytes": 1}
        consumer = kafka.Consumer({**self.servers, **options})
        consumer.assign([kafka.TopicPartition(subject, 0, kafka.OFFSET_BEGINNING)])
        return consumer


def refuse(error: Any, _message: Any) -> None:
    assert error is None, error


def value_of(message: Any) -> bytes:
    assert message.error() is None, message.error()
    value: bytes = message.value()
    return value


def work(control: Control, *, address: str, mode: str) -> None:
    """The process of this client; the server alone decides about the mode."""
    serve(control, Kafka(address), handle=handle)


def handle(
    control: Control, system: Kafka, subject: str, size: int, count: int
) -> tuple[float, float]:
    """As `traffic.consume`, message by message."""
    return read(control, partial(system.handle, subject, count), size, count)
