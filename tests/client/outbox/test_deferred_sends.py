"""Sends of an asynchronous session before its first statement: on a connection that others began."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncSession

from qmq_client.errors import NoTransactionError
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
            assert await world.producer.flush_async()
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


def test_S3_S11_what_is_sent_behind_a_savepoint_goes_with_the_transaction_around_it(
    a_database: Database, tmp_path: Path
) -> None:
    async def main(world: World) -> None:
        async with AsyncSession(world.engine) as session:
            await session.execute(sa.insert(Order).values(label="a"))
            async with session.begin_nested():
                world.send("inside", session)
            world.send("behind", session)
            await session.commit()
        await world.engine.dispose()

    with a_world(tmp_path, database=a_database, is_async=True) as world:
        asyncio.run(main(world))
        assert world.outcome() == (["a"], ["behind", "inside"], set())


def test_S1_S11_a_savepoint_that_is_left_open_keeps_nothing_of_the_transaction_around_it(
    a_database: Database, tmp_path: Path
) -> None:
    async def main(world: World) -> None:
        async with AsyncSession(world.engine) as session, session.begin():
            world.send("around", session)
            await session.begin_nested()
        await world.engine.dispose()

    with a_world(tmp_path, database=a_database, is_async=True) as world:
        asyncio.run(main(world))
        assert world.outcome() == ([], ["around"], set())


@pytest.mark.parametrize("is_nested", [False, True])
def test_S1_S11_what_a_listener_sends_in_a_commit_that_did_nothing_else_is_stored(
    a_database: Database, tmp_path: Path, is_nested: bool
) -> None:
    """Behind our own listener, which has nothing to begin for."""

    async def main(world: World) -> None:
        async with AsyncSession(world.engine) as session:
            unsent = ["sent"]

            def send(inner: Any) -> None:
                if unsent:
                    world.send(unsent.pop(), inner)

            event.listen(session.sync_session, "before_commit", send)
            await session.begin()
            if is_nested:
                async with session.begin_nested():
                    pass
                assert not unsent
            await session.commit()
        await world.engine.dispose()

    with a_world(tmp_path, database=a_database, is_async=True) as world:
        asyncio.run(main(world))
        assert world.outcome() == ([], ["sent"], set())


def test_S8_S11_a_send_behind_the_commit_is_refused(a_database: Database, tmp_path: Path) -> None:
    async def main(world: World) -> None:
        async with AsyncSession(world.engine) as session:
            event.listen(session.sync_session, "after_commit", partial(world.send, "late"))
            await session.begin()
            with pytest.raises(NoTransactionError):
                await session.commit()
        await world.engine.dispose()

    with a_world(tmp_path, database=a_database, is_async=True) as world:
        asyncio.run(main(world))
        assert world.outcome() == ([], [], set())


def test_S2_S4_S11_of_a_rolled_back_send_nothing_is_left_at_its_session(
    a_database: Database, tmp_path: Path
) -> None:
    async def main(world: World) -> None:
        async with AsyncSession(world.engine) as session:
            dropped = world.send("dropped", session)
            world.producer.receipt(dropped, session=session)
            await session.rollback()
            world.send("kept", session)
            with pytest.raises(NoTransactionError):
                world.producer.receipt(dropped, session=session)
            await session.commit()
        await world.engine.dispose()

    with a_world(tmp_path, database=a_database, is_async=True) as world:
        asyncio.run(main(world))
        assert world.outcome() == ([], ["kept"], set())
