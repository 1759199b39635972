"""A transaction on a separate connection, which is the current one inside the block."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

import sqlalchemy as sa

from qmq_client.current import as_current
from qmq_client.outbox.database.autocommit import begin_to_write

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection


@contextmanager
def sync_transaction(engine: sa.Engine) -> Iterator[sa.Connection]:
    """`transaction` for a synchronous engine."""
    with engine.connect() as connection, as_current(connection), connection.begin():
        begin_to_write(connection)
        yield connection


@asynccontextmanager
async def async_transaction(engine: sa.Engine) -> AsyncIterator[AsyncConnection]:
    """`transaction` for the engine inside an `AsyncEngine`."""
    from sqlalchemy.ext.asyncio import AsyncEngine

    async with AsyncEngine(engine).connect() as connection:
        with as_current(connection):
            async with connection.begin():
                await connection.run_sync(begin_to_write)
                yield connection
