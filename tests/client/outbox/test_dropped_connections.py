"""A connection that is dropped inside its transaction lets the publisher write again.

SQLite has one write lock, and a driver's connection that is closed with an open cursor keeps it, until
nothing refers to the cursor any more.
"""

from __future__ import annotations

import asyncio
import gc
import sqlite3
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Final

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from tests.client.world import Order, World, a_world
from tests.conftest import MakeDatabase

WAIT_S_MAX: Final = 30


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
        world.send("dropped", connection)
        await fail(connection)
        await connection.invalidate()


async def cancel(world: World) -> None:
    """In the middle of a statement: SQLAlchemy then drops the connection by itself."""
    is_about_to = asyncio.Event()

    async def work() -> None:
        async with world.engine.connect() as connection:
            await add(connection, "dropped")
            world.send("dropped", connection)
            await fail(connection)
            is_about_to.set()
            await add(connection, "cancelled")

    task = asyncio.create_task(work())
    await is_about_to.wait()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert task.cancelled()


async def cancel_in_a_statement_with_an_answer(world: World) -> None:
    """The driver's thread executes an INSERT … RETURNING to its first row, and nobody takes that."""
    is_running, may_go_on = threading.Event(), threading.Event()

    def hold() -> str:
        is_running.set()
        assert may_go_on.wait(WAIT_S_MAX)
        return "cancelled"

    async def work() -> None:
        async with world.engine.connect() as connection:
            await add(connection, "dropped")
            world.send("dropped", connection)
            driver: Any = (await connection.get_raw_connection()).driver_connection
            await driver.create_function("hold", 0, hold)
            await connection.execute(
                sa.insert(Order).values(label=sa.func.hold()).returning(Order.id)
            )

    task = asyncio.create_task(work())
    assert await asyncio.to_thread(is_running.wait, WAIT_S_MAX)
    task.cancel()
    may_go_on.set()
    await asyncio.wait([task])
    assert task.cancelled()


def assert_unlocked(path: str | None) -> None:
    with closing(sqlite3.connect(str(path), timeout=0, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")


@pytest.mark.parametrize(
    "drop",
    [invalidate, cancel, cancel_in_a_statement_with_an_answer],
    ids=["invalidated", "cancelled", "cancelled with an answer under way"],
)
def test_S11_a_connection_dropped_after_an_error_does_not_stop_the_publisher(
    drop: Callable[[World], Coroutine[Any, Any, None]], make_database: MakeDatabase, tmp_path: Path
) -> None:
    async def run(world: World) -> None:
        async with world.engine.begin() as connection:
            await add(connection, "kept")
            world.send("kept", connection)
        await drop(world)
        assert_unlocked(world.sync_engine.url.database)
        assert world.producer.flush().is_done
        assert world.sent() == ["kept"]
        assert world.committed_orders() == {"kept"}
        await world.engine.dispose()

    with a_world(tmp_path, database=make_database("sqlite"), is_async=True) as world:
        asyncio.run(run(world))


def test_S4_a_connection_invalidated_with_rows_to_come_does_not_stop_the_publisher(
    tmp_path: Path,
) -> None:
    with a_world(tmp_path) as world:
        with world.engine.begin() as connection:
            connection.execute(sa.insert(Order).values(label="kept"))
            world.send("kept", connection)
        with world.engine.connect() as connection:
            text = sa.text("INSERT INTO business_order (label) VALUES ('a'), ('b') RETURNING id")
            rows = connection.execute(text)
            world.send("dropped", connection)
            connection.invalidate()
            assert_unlocked(world.sync_engine.url.database)
        assert world.outcome() == (["kept"], ["kept"], set())
        del rows
