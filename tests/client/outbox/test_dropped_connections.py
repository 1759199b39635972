"""A connection that is dropped inside its transaction lets the publisher write again.

SQLite has one write lock. An application that keeps an open cursor of a closed connection keeps it,
with a producer as without.
"""

from __future__ import annotations

import asyncio
import gc
import sqlite3
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from qmq_client.message import Message
from tests.client.world import SUBJECT, Order, World, a_world
from tests.conftest import MakeDatabase


@pytest.fixture(autouse=True)
def no_collection_by_chance() -> Iterator[None]:
    """What is freed only sometimes counts as kept."""
    gc.disable()
    yield
    gc.enable()


async def add(connection: AsyncConnection, label: str | None) -> None:
    await connection.execute(sa.insert(Order).values(label=label))


async def fail(connection: AsyncConnection) -> None:
    """A statement that fails, and an application that goes on."""
    with suppress(sa.exc.IntegrityError):
        await add(connection, None)


async def invalidate(world: World) -> None:
    async with world.engine.connect() as connection:
        await add(connection, "dropped")
        await world.producer.send(Message(SUBJECT, "dropped"), session=connection)
        await fail(connection)
        await connection.invalidate()


async def cancel(world: World) -> None:
    """In the middle of a statement: SQLAlchemy then drops the connection by itself."""
    is_about_to = asyncio.Event()

    async def work() -> None:
        async with world.engine.connect() as connection:
            await add(connection, "dropped")
            await world.producer.send(Message(SUBJECT, "dropped"), session=connection)
            await fail(connection)
            is_about_to.set()
            await add(connection, "cancelled")

    task = asyncio.create_task(work())
    await is_about_to.wait()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert task.cancelled()


def assert_unlocked(path: str | None) -> None:
    with closing(sqlite3.connect(str(path), timeout=0, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")


@pytest.mark.parametrize(
    "drop",
    [invalidate, cancel],
    ids=["invalidated", "cancelled"],
)
def test_S11_a_connection_dropped_after_an_error_does_not_stop_the_publisher(
    drop: Callable[[World], Coroutine[Any, Any, None]], make_database: MakeDatabase, tmp_path: Path
) -> None:
    async def run(world: World) -> None:
        async with world.engine.begin() as connection:
            await add(connection, "kept")
            await world.producer.send(Message(SUBJECT, "kept"), session=connection)
        await drop(world)
        assert_unlocked(world.sync_engine.url.database)
        assert world.producer.flush().is_done
        assert world.sent() == ["kept"]
        assert world.committed_orders() == {"kept"}
        await world.engine.dispose()

    with a_world(tmp_path, database=make_database("sqlite"), is_async=True) as world:
        asyncio.run(run(world))
