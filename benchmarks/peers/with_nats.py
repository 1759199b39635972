"""NATS JetStream by nats-py on uvloop: publishes awaited together, pulls of 1,000, one ack for all of a pull."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import islice
from typing import Any

import nats
from nats.errors import TimeoutError as NatsTimeoutError
from nats.js.api import AckPolicy, ConsumerConfig, StorageType

from benchmarks.peers.traffic import IN_FLIGHT, READ, Begins, LoopSystem, Seen, serve
from benchmarks.worker import Control

GROUP = "board"


class JetStream(LoopSystem):
    """See `traffic.System`."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self.run(self._open(address))

    async def _open(self, address: str) -> None:
        self.connection = await nats.connect(f"nats://{address}")
        self.streams = self.connection.jetstream()

    def create(self, subject: str) -> None:
        self.run(
            self.streams.add_stream(name=subject, subjects=[subject], storage=StorageType.FILE)
        )

    def produce(self, subject: str, bodies: Iterator[bytes]) -> None:
        self.run(self._produce(subject, bodies))

    async def _produce(self, subject: str, bodies: Iterator[bytes]) -> None:
        while batch := list(islice(bodies, IN_FLIGHT)):
            await asyncio.gather(*(self.streams.publish(subject, body) for body in batch))

    def consume(self, subject: str, count: int, seen: Seen, begins: Begins) -> None:
        self.run(self._consume(subject, count, seen, begins))

    async def _consume(self, subject: str, count: int, seen: Seen, begins: Begins) -> None:
        settings = ConsumerConfig(ack_policy=AckPolicy.ALL, max_ack_pending=-1)
        pulling = await self.streams.pull_subscribe(
            subject, durable=GROUP, stream=subject, config=settings
        )
        begins()
        got = 0
        while got < count:
            try:
                messages = await pulling.fetch(READ, timeout=0.2)
            except NatsTimeoutError:
                continue
            for message in messages:
                seen(message.data)
            got += len(messages)
            await messages[-1].ack()
        await self.connection.flush()

    def receive(self, subject: str, count: int, seen: Seen, begins: Begins) -> None:
        self.run(self._receive(subject, count, seen, begins))

    async def _receive(self, subject: str, count: int, seen: Seen, begins: Begins) -> None:
        got = 0
        done = asyncio.Event()

        async def on_message(message: Any) -> None:
            nonlocal got
            seen(message.data)
            await message.ack()
            got += 1
            if got >= count:
                done.set()

        subscription = await self.streams.subscribe(
            subject, durable="one", cb=on_message, manual_ack=True
        )
        begins()
        await done.wait()
        await subscription.unsubscribe()

    async def send(self, subject: str, body: bytes) -> None:
        await self.streams.publish(subject, body)


def work(control: Control, *, address: str, mode: str) -> None:
    """The process of this client; the server alone decides about the mode."""
    serve(control, JetStream(address))
