"""procrastinate as its pages recommend: 30 jobs at the same time, a pool of as many connections and
one more, jobs deleted when they are done.
"""

from __future__ import annotations

import psycopg
from procrastinate import App, PsycopgConnector

from benchmarks.peers.orders import BODY_BYTES, CREATE_ORDERS, CUSTOMER, NOTE, run, serve
from benchmarks.worker import Control

CONCURRENCY = 30
_JOBS_PER_CALL = 500


class Procrastinate:
    """See `orders.Peer`."""

    def __init__(self, dsn: str) -> None:
        connector = PsycopgConnector(conninfo=dsn, min_size=4, max_size=CONCURRENCY + 1)
        self.app = App(connector=connector)
        self.dsn = dsn
        self.body = "x" * BODY_BYTES

        @self.app.task(queue="orders", name="handle")  # type: ignore[untyped-decorator]  # not installed where types are checked
        async def handle(body: str) -> None:
            pass

        self.task = handle

    async def create(self) -> None:
        await self.app.open_async()
        await self.app.schema_manager.apply_schema_async()
        self.connection = await psycopg.AsyncConnection.connect(self.dsn)
        await self.connection.execute(CREATE_ORDERS)
        await self.connection.commit()

    async def fill(self, count: int) -> None:
        for first in range(0, count, _JOBS_PER_CALL):
            jobs = [{"body": self.body}] * min(_JOBS_PER_CALL, count - first)
            await self.task.batch_defer_async(*jobs)

    async def drain(self, count: int) -> None:
        await self.app.run_worker_async(
            queues=["orders"],
            concurrency=CONCURRENCY,
            wait=False,
            delete_jobs="always",
            install_signal_handlers=False,
        )
        jobs = await self.app.job_manager.list_jobs_async(queue="orders")
        assert not list(jobs)

    async def transact(self, amount: int, *, sends: bool) -> None:
        query = "INSERT INTO orders (customer, amount, note) VALUES (%s, %s, %s)"
        await self.connection.execute(query, [CUSTOMER, amount, NOTE])
        if sends:
            deferrer = self.task.configure(queue="later", connection=self.connection)
            await deferrer.defer_async(body=self.body)
        await self.connection.commit()


def work(control: Control, *, dsn: str) -> None:
    """The process of this peer."""

    async def main(control: Control) -> None:
        peer = Procrastinate(dsn)
        await peer.create()
        await serve(control, peer)

    run(control, main)
