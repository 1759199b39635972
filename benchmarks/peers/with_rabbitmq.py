"""RabbitMQ by aio-pika on uvloop: persistent messages, publisher confirms, acks of a hundred at a time.

Durable is a quorum queue, default a classic one, which is what a client gets that asks for nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import islice
from typing import Any

import aio_pika

from benchmarks.peers.traffic import IN_FLIGHT, READ, Begins, LoopSystem, Seen, serve
from benchmarks.worker import Control

ACK_EVERY = 100
KINDS = {"durable": "quorum", "default": "classic"}


class Rabbitmq(LoopSystem):
    """See `traffic.System`."""

    def __init__(self, address: str, mode: str) -> None:
        super().__init__()
        self.kind = KINDS[mode]
        self.run(self._open(address))

    async def _open(self, address: str) -> None:
        self.connection = await aio_pika.connect(f"amqp://guest:guest@{address}/")
        self.channel = await self.connection.channel(publisher_confirms=True)

    def create(self, subject: str) -> None:
        arguments: dict[str, Any] = {"x-queue-type": self.kind}
        self.run(self.channel.declare_queue(subject, durable=True, arguments=arguments))

    async def send(self, subject: str, body: bytes) -> None:
        message = aio_pika.Message(body, delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
        await self.channel.default_exchange.publish(message, subject)

    def produce(self, subject: str, bodies: Iterator[bytes]) -> None:
        self.run(self._produce(subject, bodies))

    async def _produce(self, subject: str, bodies: Iterator[bytes]) -> None:
        while batch := list(islice(bodies, IN_FLIGHT)):
            await asyncio.gather(*(self.send(subject, body) for body in batch))

    def consume(self, subject: str, count: int, seen: Seen, begins: Begins) -> None:
        self.run(self._consume(subject, count, seen, begins, ACK_EVERY))

    def receive(self, subject: str, count: int, seen: Seen, begins: Begins) -> None:
        self.run(self._consume(subject, count, seen, begins, 1))

    async def _consume(
        self, subject: str, count: int, seen: Seen, begins: Begins, ack_every: int
    ) -> None:
        channel = await self.connection.channel()
        await channel.set_qos(prefetch_count=READ)
        queue = await channel.get_queue(subject)
        got = 0
        done = asyncio.Event()

        async def on_message(message: Any) -> None:
            nonlocal got
            seen(message.body)
            got += 1
            if not got % ack_every or got >= count:
                await message.channel.basic_ack(message.delivery_tag, multiple=True)
            if got >= count:
                done.set()

        begins()
        await queue.consume(on_message)
        await done.wait()
        await channel.close()


def work(control: Control, *, address: str, mode: str) -> None:
    """The process of this client."""
    serve(control, Rabbitmq(address, mode))
