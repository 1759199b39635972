"""pgqueuer as its own benchmark has it: five consumers, each with a connection of asyncpg and batches
of 10, on uvloop; its autovacuum settings. With batches of 1 it works job by job.
"""

from __future__ import annotations

import asyncio

import asyncpg
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.models import Job
from pgqueuer.queries import Queries
from pgqueuer.types import QueueExecutionMode

from benchmarks.peers.orders import BODY_BYTES, CREATE_ORDERS, CUSTOMER, NOTE, run, serve
from benchmarks.worker import Control

CONSUMERS = 5


class Pgqueuer:
    """See `orders.Peer`."""

    def __init__(self, dsn: str, batch: int) -> None:
        self.dsn = dsn
        self.batch = batch
        self.body = bytes(BODY_BYTES)

    async def create(self) -> None:
        self.connection = await asyncpg.connect(dsn=self.dsn)
        self.queries = Queries(AsyncpgDriver(self.connection))
        await self.queries.install()
        await self.queries.optimize_autovacuum()
        await self.connection.execute(CREATE_ORDERS)

    async def fill(self, count: int) -> None:
        await self.queries.enqueue(["handle"] * count, [self.body] * count, [0] * count)

    async def drain(self, count: int) -> None:
        consumers = [await self._consumer() for _ in range(CONSUMERS)]
        await asyncio.gather(
            *(
                each.run(batch_size=self.batch, mode=QueueExecutionMode.drain)
                for each, _ in consumers
            )
        )
        for _, connection in consumers:
            await connection.close()
        query = "SELECT count(*) FROM pgqueuer WHERE entrypoint = 'handle'"
        assert await self.connection.fetchval(query) == 0

    async def transact(self, amount: int, *, sends: bool) -> None:
        async with self.connection.transaction():
            query = "INSERT INTO orders (customer, amount, note) VALUES ($1, $2, $3)"
            await self.connection.execute(query, CUSTOMER, amount, NOTE)
            if sends:
                await self.queries.enqueue("later", self.body, 0)

    async def _consumer(self) -> tuple[PgQueuer, asyncpg.Connection]:
        connection = await asyncpg.connect(dsn=self.dsn)
        consumer = PgQueuer.from_asyncpg_connection(connection)

        @consumer.entrypoint("handle")  # type: ignore[untyped-decorator]  # not installed where types are checked
        async def handle(job: Job) -> None:
            pass

        return consumer, connection


def work(control: Control, *, dsn: str, batch: int) -> None:
    """The process of this peer."""

    async def main(control: Control) -> None:
        peer = Pgqueuer(dsn, batch)
        await peer.create()
        await serve(control, peer)

    run(control, main)
