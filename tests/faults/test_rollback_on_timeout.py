"""MariaDB with `innodb_rollback_on_timeout`: who misses a lock loses the whole transaction, not the statement.

The driver goes on as if nothing was, and begins anew with the next change: what was sent before must
neither be lost without an error nor go out without its row.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from qmq_client.transactional import transaction
from tests.client.outbox.faces import drive
from tests.client.outbox.interference import make_lock_rows
from tests.client.outbox.test_programs import run_programs
from tests.client.world import Order, World, a_world
from tests.conftest import MakeServer
from tests.services.databases import Database, Databases

PROGRAMS: Final = 15
PROGRAMS_IN_RELEASE: Final = 2_000
NOTHING: Final[tuple[list[str], list[str], set[str]]] = ([], [], set())


@pytest.fixture
def database(make_private_server: MakeServer, databases: Databases) -> Database:
    server = make_private_server(
        "mysql", options=["--innodb-rollback-on-timeout=1", "--innodb-lock-wait-timeout=1"]
    )
    return databases.make_on(server.url(), "mysql", "shop")


@contextmanager
def a_shop(database: Database, folder: Path, **options: Any) -> Iterator[World]:
    with a_world(folder, database=database, **options) as world:
        make_lock_rows(world)
        yield world


@contextmanager
def locked(world: World) -> Iterator[sa.TextClause]:
    """A change that waits for its lock until the server gives up."""
    with closing(world.truth.connect()) as other, closing(other.cursor()) as cursor:
        cursor.execute("UPDATE lock_row SET n = n + 1 WHERE id = 3")
        yield sa.text("UPDATE lock_row SET n = n + 1 WHERE id = 3")
        other.rollback()


def test_F6_S1_S2_a_lock_missed_after_a_send_undoes_the_message_with_its_row(
    database: Database, tmp_path: Path
) -> None:
    with a_shop(database, tmp_path) as world:
        for goes_on in (False, True):
            with Session(world.engine) as session:
                world.send("before", session)
                session.add(Order(label="before"))
                session.flush()
                with locked(world) as statement, pytest.raises(sa.exc.OperationalError):
                    session.execute(statement)
                if goes_on:
                    world.send("after", session)
                    session.execute(sa.insert(Order).values(label="after"))
                session.commit()
            kept = ["after"] if goes_on else []
            assert world.outcome() == (kept, kept, set())


def test_F6_S1_S3_a_lock_missed_in_a_savepoint_takes_what_was_sent_before_it(
    database: Database, tmp_path: Path
) -> None:

    def transact(world: World) -> None:
        with transaction(world.engine) as connection:
            connection.execute(sa.insert(Order).values(label="before"))
            world.send("before", connection)
            # The savepoint is gone with the rest, which is what the next error says.
            with suppress(sa.exc.OperationalError), connection.begin_nested():
                world.send("inside", connection)
                with locked(world) as statement:
                    connection.execute(statement)

    with a_shop(database, tmp_path) as world:
        transact(world)
        assert world.outcome() == NOTHING


def test_F6_S1_S11_the_same_of_an_asynchronous_session(database: Database, tmp_path: Path) -> None:
    async def transact(world: World) -> None:
        async with AsyncSession(world.engine) as session:
            await world.send("before", session)
            await session.execute(sa.insert(Order).values(label="before"))
            with locked(world) as statement, pytest.raises(sa.exc.OperationalError):
                await session.execute(statement)
            await session.commit()
        await world.engine.dispose()

    with a_shop(database, tmp_path, is_async=True) as world:
        asyncio.run(transact(world))
        assert world.outcome() == NOTHING


@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SAWarning")  # it minds some of the abuses
@pytest.mark.parametrize("face", ["session", "async session"])
def test_F6_F7_S1_S2_random_programs_on_such_a_server_send_exactly_what_committed(
    database: Database, tmp_path: Path, face: str, request: pytest.FixtureRequest
) -> None:
    seeds = list(range(PROGRAMS_IN_RELEASE if request.config.getoption("--release") else PROGRAMS))
    is_async = face.startswith("async")
    with a_shop(database, tmp_path, is_async=is_async) as world:
        running = run_programs(world, seeds, face)
        asyncio.run(running) if is_async else drive(running)
