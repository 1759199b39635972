"""`@transactional` inside sessions that find their engines by table, or have another one for reading."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from qmq_client.current import as_current, current_session
from qmq_client.transactional import transactional
from tests.client.world import Order, World, a_world, open_engine
from tests.services.databases import Database


def place(world: World, label: str) -> None:
    """A business row and a message with the same label, on the current session."""
    current_session().execute(sa.insert(Order).values(label=label))
    world.send(label)


@pytest.mark.parametrize("is_bound", [False, True])
def test_S1_S3_nested_in_a_session_with_binds_of_its_tables_it_is_a_savepoint(
    a_database: Database, tmp_path: Path, is_bound: bool
) -> None:
    """Which may have no other bind, or one for reading elsewhere."""
    elsewhere = open_engine(tmp_path / "elsewhere.sqlite")
    with a_world(tmp_path, database=a_database) as world:
        inner = transactional(world.producer)(lambda: place(world, "inner"))
        bind = elsewhere if is_bound else None
        with Session(bind, binds={Order: world.sync_engine}) as session, as_current(session):
            place(world, "outer")
            inner()
            assert world.committed_orders() == set(), "the outer one has not ended"
            session.rollback()
            place(world, "again")
            inner()
            session.commit()
        assert world.outcome() == (["again", "inner"], ["again", "inner"], set())
    elsewhere.dispose()


@pytest.mark.parametrize("is_awaited", [True, False])
@pytest.mark.parametrize("is_bound", [False, True])
def test_S1_S3_S11_the_same_of_asynchronous_sessions(
    a_database: Database, tmp_path: Path, is_bound: bool, is_awaited: bool
) -> None:
    async def main(world: World) -> None:
        elsewhere = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'elsewhere.sqlite'}")

        @transactional(world.producer)
        async def inner() -> None:
            await current_session().execute(sa.insert(Order).values(label="inner"))
            sent = world.send("inner")
            if is_awaited:
                await sent

        binds: Any = {Order: world.engine}
        async with AsyncSession(elsewhere if is_bound else None, binds=binds) as session:
            with as_current(session):
                await session.execute(sa.insert(Order).values(label="outer"))
                await inner()
                await session.rollback()
                await session.execute(sa.insert(Order).values(label="again"))
                await inner()
                await session.commit()
        await elsewhere.dispose()
        await world.engine.dispose()

    with a_world(tmp_path, database=a_database, is_async=True) as world:
        asyncio.run(main(world))
        assert world.outcome() == (["again", "inner"], ["inner"], set())
