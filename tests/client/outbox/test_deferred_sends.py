"""Sends of an asynchronous session before its first statement: on a connection that others began."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession

from tests.client.world import Order, World, a_world
from tests.services.databases import Database

MODES = ("conditional_savepoint", "rollback_only", "create_savepoint")


async def work_inside(world: World, connection: Any, mode: Any) -> None:
    """Two commits and a rollback of a session that has joined the connection's transaction."""
    joined = AsyncSession(connection, join_transaction_mode=mode)
    async with joined as session:
        world.send(f"{mode} a", session)
        await session.commit()
        async with session.begin_nested():
            world.send(f"{mode} b", session)
        await session.commit()
        await session.execute(sa.insert(Order).values(label=f"{mode} a"))
        await session.execute(sa.insert(Order).values(label=f"{mode} b"))
        await session.commit()


@pytest.mark.parametrize("is_committed", [True, False])
def test_S2_S3_S11_what_a_joined_session_sends_first_goes_with_the_outer_transaction(
    a_database: Database, tmp_path: Path, is_committed: bool
) -> None:
    async def main(world: World) -> None:
        async with world.engine.connect() as connection:
            transaction = await connection.begin()
            for mode in MODES:
                await work_inside(world, connection, mode)
            assert await world.producer.aflush()
            assert world.sent() == []
            await (transaction.commit() if is_committed else transaction.rollback())
        await world.engine.dispose()

    with a_world(tmp_path, database=a_database, is_async=True) as world:
        asyncio.run(main(world))
        wanted = sorted(f"{mode} {label}" for mode in MODES for label in "ab")
        assert world.outcome() == (
            wanted if is_committed else [],
            wanted if is_committed else [],
            set(),
        )
