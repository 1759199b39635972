"""An outbox on a PostgreSQL behind a real PgBouncer in transaction pooling, as many of them are run.

A session of the server belongs to a client for one transaction, so nothing may be kept in one: no
setting, no prepared statement. There are fewer sessions than clients, so that it would be noticed.
"""

from __future__ import annotations

import asyncio
import os
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from qmq_client.transactional import transaction
from tests.client.world import Order, World, a_world
from tests.conftest import give_up
from tests.kit import warm
from tests.kit.broker_process import BrokerProcess
from tests.services.databases import Database, Databases
from tests.services.drivers import DRIVERS
from tests.services.pooler import SERVER_SESSIONS, Pooler
from tests.services.rungs import RungError
from tests.watchdog.rows import left, put_rows
from tests.watchdog.test_servers import as_database

THREADS: Final = 4 * SERVER_SESSIONS
TRANSACTIONS: Final = 12
#: What a driver's users must say behind such a pooler, for their own statements.
SETTINGS: Final[dict[str, dict[str, Any]]] = {
    "psycopg": {"prepare_threshold": None},
    "asyncpg": {"statement_cache_size": 0, "prepared_statement_cache_size": 0},
}
ENGINE: Final = {"connect_args": SETTINGS["psycopg"]}
DEADLINE_S: Final = 60.0


@pytest.fixture
def pooled(postgresql_database: Database, databases: Databases) -> Iterator[Database]:
    """The same database, reached through the pooler."""
    direct = postgresql_database.url
    try:
        pooler = Pooler(databases, direct)
    except RungError as error:
        give_up(f"no pooler for the tests. {error}", os.environ)
    postgresql_database.url = pooler.url
    yield postgresql_database
    postgresql_database.url = direct
    pooler.close()


@pytest.fixture
def world(pooled: Database, tmp_path: Path) -> Iterator[World]:
    with a_world(tmp_path, database=pooled, background=True, engine_options=ENGINE) as made:
        yield made


def place(world: World, label: str) -> None:
    """One of three: committed, undone, and with a savepoint that is undone."""
    with Session(world.engine) as session:
        session.execute(sa.insert(Order).values(label=label))
        world.send(label, session)
        kind = zlib.crc32(label.encode()) % 3
        if kind == 2:
            savepoint = session.begin_nested()
            world.send(f"{label} undone", session)
            savepoint.rollback()
        session.rollback() if kind == 1 else session.commit()


@pytest.mark.parametrize("name", ["psycopg", "psycopg2", "pg8000"])
def test_S1_S2_S3_S10_many_threads_share_few_sessions_of_the_server(
    pooled: Database, tmp_path: Path, name: str
) -> None:
    (driver,) = [each for each in DRIVERS if each.name == name and not each.is_async]
    options = {"connect_args": SETTINGS.get(name, {})}
    with a_world(
        tmp_path, database=pooled, driver=driver, background=True, engine_options=options
    ) as world:
        place_in_threads(world)


def place_in_threads(world: World) -> None:
    faults: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for count in range(TRANSACTIONS):
                place(world, f"{number}.{count}")
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert faults == []
    assert world.producer.flush(DEADLINE_S)
    orders = world.committed_orders()
    assert 0 < len(orders) < THREADS * TRANSACTIONS
    assert set(world.sent()) == orders
    assert (len(world.sent()), world.stored_ids()) == (len(orders), set())


@pytest.mark.parametrize(("driver", "options"), SETTINGS.items(), ids=SETTINGS)
def test_S11_asynchronous_sessions_and_core_behind_a_pooler(
    pooled: Database, tmp_path: Path, driver: str, options: dict[str, Any]
) -> None:
    async def main(world: World) -> None:
        for count in range(TRANSACTIONS):
            async with AsyncSession(world.engine) as session:
                await world.send(f"session {count}", session)
                await session.execute(sa.insert(Order).values(label=f"session {count}"))
                await session.commit()
            async with transaction(world.engine) as connection:
                await world.send(f"core {count}", connection)
                await connection.execute(sa.insert(Order).values(label=f"core {count}"))
        await world.engine.dispose()

    (found,) = [each for each in DRIVERS if each.is_async and each.name == driver]
    with a_world(
        tmp_path, database=pooled, driver=found, engine_options={"connect_args": options}
    ) as world:
        asyncio.run(main(world))
        orders, sent, rows = world.outcome()
        assert len(orders) == 2 * TRANSACTIONS
        assert (sent, rows) == (orders, set())


def test_S6_a_commit_whose_session_is_killed_is_looked_for_behind_a_pooler_too(
    world: World,
) -> None:
    with Session(world.engine) as session:
        session.execute(sa.insert(Order).values(label="killed"))
        world.send("killed", session)
        session.flush()
        number = session.scalar(sa.text("SELECT pg_backend_pid()"))
        world.change(f"SELECT pg_terminate_backend({number}, 5000)")
        with pytest.raises(sa.exc.DBAPIError):
            session.commit()
    place(world, "0")
    assert world.producer.flush(DEADLINE_S)
    assert set(world.sent()) == world.committed_orders()


def test_W1_W5_a_watchdog_behind_a_pooler_sends_what_is_left(
    pooled: Database, world: World, broker_process: BrokerProcess
) -> None:
    database = as_database(pooled.engine(**ENGINE))
    put_rows(database, 3_000)
    command = ["qmq_client.cli", "watchdog", "sweep", "--batch-rows", "100"]
    command += ["--database", pooled.url, "--broker", broker_process.url]
    done = warm.run(command, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "sent=3000" in done.stdout
    assert left(database) == set()
    database.close()
