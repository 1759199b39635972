"""faststream-outbox as its pages on performance recommend for high throughput: terminal deletes in
batches of 100, fetches of 100, its autovacuum settings, the asyncpg driver.
"""

from __future__ import annotations

import asyncio

import sqlalchemy as sa
from faststream_outbox import OutboxBroker, make_outbox_table, outbox_autovacuum_ddl
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker, create_async_engine

from benchmarks.peers.orders import BODY_BYTES, CREATE_ORDERS, CUSTOMER, NOTE, run, serve
from benchmarks.worker import Control

BATCH = 100
#: As its own benchmark has it: what is measured must not be a sleep between two fetches.
FETCH_INTERVAL_S = 0.001
_ORDERS = sa.table("orders", sa.column("customer"), sa.column("amount"), sa.column("note"))


class FaststreamOutbox:
    """See `orders.Peer`."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        self.table = make_outbox_table(sa.MetaData(), table_name="outbox")
        self.sessions = async_sessionmaker(engine, expire_on_commit=False)
        self.broker = OutboxBroker(engine, outbox_table=self.table, logger=None)
        self.body = bytes(BODY_BYTES)

    async def create(self) -> None:
        async with self.engine.begin() as connection:
            await connection.run_sync(self.table.metadata.create_all)
            await connection.execute(sa.text(outbox_autovacuum_ddl("outbox")))
            await connection.execute(sa.text(CREATE_ORDERS))

    async def fill(self, count: int) -> None:
        rows = [{"queue": "orders", "payload": self.body, "headers": {}} for _ in range(count)]
        async with self.engine.begin() as connection:
            await connection.execute(sa.insert(self.table), rows)

    async def drain(self, count: int) -> None:
        broker = OutboxBroker(self.engine, outbox_table=self.table, logger=None)
        drained = asyncio.Event()
        handled = 0

        @broker.subscriber(  # type: ignore[untyped-decorator]  # not installed where types are checked
            "orders",
            fetch_batch_size=BATCH,
            terminal_flush_batch_size=BATCH,
            min_fetch_interval=FETCH_INTERVAL_S,
            max_fetch_interval=FETCH_INTERVAL_S,
        )
        async def handle(body: bytes) -> None:
            nonlocal handled
            handled += 1
            if handled >= count:
                drained.set()

        await broker.start()
        await drained.wait()
        await broker.stop()  # what was handled and not yet deleted is deleted now
        async with self.engine.connect() as connection:
            query = sa.select(sa.func.count()).select_from(self.table)
            assert (await connection.execute(query)).scalar_one() == 0

    async def transact(self, amount: int, *, sends: bool) -> None:
        async with self.sessions() as session, session.begin():
            row = {"customer": CUSTOMER, "amount": amount, "note": NOTE}
            await session.execute(sa.insert(_ORDERS).values(**row))
            if sends:
                await self.broker.publish(self.body, queue="later", session=session)


def work(control: Control, *, dsn: str) -> None:
    """The process of this peer."""

    async def main(control: Control) -> None:
        engine = create_async_engine(dsn.replace("postgresql://", "postgresql+asyncpg://"))
        peer = FaststreamOutbox(engine)
        await peer.create()
        await serve(control, peer)

    run(control, main)
