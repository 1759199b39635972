"""Connections that announce that their transactions will write.

On SQLite such a transaction takes the write lock, or waits for it, with its first statement; one that
has read before could only fail at a later one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Final

import sqlalchemy as sa

from qmq_client.outbox.database.dialect import BEGIN_OPTION, BEGIN_TO_WRITE

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

#: The execution options that announce it.
TO_WRITE: Final = {BEGIN_OPTION: BEGIN_TO_WRITE}


@contextmanager
def connected_to_write(engine: sa.Engine) -> Iterator[sa.Connection]:
    """A connection of this engine, closed at the end of the block."""
    with engine.connect() as connection:
        yield connection.execution_options(**TO_WRITE)


@asynccontextmanager
async def connected_to_write_async(engine: AsyncEngine) -> AsyncIterator[AsyncConnection]:
    """The same for an asynchronous engine."""
    async with engine.connect() as connection:
        yield await connection.execution_options(**TO_WRITE)
