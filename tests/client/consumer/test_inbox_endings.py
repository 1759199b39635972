"""A handler, or an error that it swallows, ends or voids the inbox's transaction: nothing is acked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.pool import StaticPool

from qmq_client.consumer import consumer
from qmq_client.inbox import Inbox
from qmq_client.inbox.async_inbox import AsyncInbox
from qmq_client.outbox.table import create_tables
from qmq_client.testing import drain
from tests.client.consumer.kit import GROUP, SUBJECT, Bench
from tests.client.consumer.shop import count_of, make_engine, rows_in_inbox
from tests.services.databases import Database

Ending = Callable[[Session], object]


def text(statement: str) -> Ending:
    return lambda session: session.execute(sa.text(statement))


def swallowed(statement: str) -> Ending:
    def ending(session: Session) -> None:
        with suppress(sa.exc.DBAPIError):
            session.execute(sa.text(statement))

    return ending


def begun_anew(session: Session) -> None:
    driver: Any = session.connection().connection
    driver.executescript("BEGIN")


def deadlock(session: Session) -> None:
    """Lose against another connection that has done more work, and go on as if nothing was."""
    engine = session.get_bind().engine
    session.execute(sa.text("SELECT * FROM tally FOR UPDATE"))
    with engine.connect() as other, other.begin():
        other.exec_driver_sql("CREATE TEMPORARY TABLE heavy (n INT) ENGINE=InnoDB")
        other.exec_driver_sql("INSERT INTO heavy VALUES (1), (2), (3), (4), (5), (6), (7), (8)")
        other.exec_driver_sql("SELECT * FROM lock_two FOR UPDATE")
        heavy: Any = other.connection.driver_connection
        # Sent, not read: the answer comes when the deadlock is resolved.
        heavy._execute_command(3, "SELECT * FROM tally FOR UPDATE")
        with suppress(sa.exc.DBAPIError):
            session.execute(sa.text("SELECT * FROM lock_two FOR UPDATE"))
        heavy._read_query_result()


def void(_: Session) -> None:
    """End nothing."""


def savepoint_left_open(session: Session) -> None:
    """Begin two that nobody ends."""
    session.begin_nested()
    session.begin_nested()


EVERYWHERE: dict[str, Ending] = {
    "text": text("ROLLBACK"),
    "text commit": text("COMMIT"),
    "driver": lambda session: session.connection().connection.rollback(),
    "driver commit": lambda session: session.connection().connection.commit(),
}
ENDINGS: dict[str, dict[str, Ending]] = {
    "sqlite": EVERYWHERE
    | {
        "begun anew": begun_anew,
        "database": swallowed("INSERT OR ROLLBACK INTO tally VALUES (NULL)"),
    },
    "mysql": EVERYWHERE
    | {
        "begun anew": text("BEGIN"),
        "definition": text("CREATE TABLE other (n INT)"),
        "deadlock": deadlock,
    },
    "postgresql": EVERYWHERE
    | {
        "error": swallowed("INSERT INTO tally VALUES (NULL)"),
        "commit and chain": text("COMMIT AND CHAIN"),
        "rollback and chain": text("ROLLBACK AND CHAIN"),
    },
}
CASES = [(kind, name) for kind, endings in ENDINGS.items() for name in endings]


def ended(bench: Bench, engine: sa.Engine, ending: Ending, *, goes_on: bool) -> dict[str, int]:
    """One delivery to a handler that does this; what was counted."""

    @consumer(SUBJECT, group=GROUP, inbox=sessionmaker(engine), max_attempts=2)
    def handler(body: Any, session: Session) -> None:
        ending(session)
        if goes_on:
            with suppress(sa.exc.InternalError):  # PostgreSQL says that it does no more
                session.execute(sa.text("UPDATE tally SET n = n + 1"))

    bench.put(1)
    consumers = bench.consumers(handler)
    drain(consumers)
    return bench.counters(consumers)


@pytest.mark.parametrize("goes_on", [True, False], ids=["goes on", "is done"])
@pytest.mark.parametrize(("kind", "name"), CASES, ids=lambda value: value)
def test_C5_no_effect_commits_without_its_inbox_row(
    bench: Bench,
    make_database: Callable[[str], Database],
    kind: str,
    name: str,
    goes_on: bool,
) -> None:
    engine = make_engine(make_database(kind).url)
    if kind == "mysql":
        with engine.begin() as connection:
            connection.exec_driver_sql("CREATE TABLE lock_two (n INT PRIMARY KEY)")
            connection.exec_driver_sql("INSERT INTO lock_two VALUES (1)")
    counted = ended(bench, engine, ENDINGS[kind][name], goes_on=goes_on)
    assert counted["nacked"] == 1
    assert counted.get("acked", 0) == 0
    assert count_of(engine) == 0
    engine.dispose()


@pytest.mark.parametrize("ending", [void, savepoint_left_open])
def test_C5_a_handler_that_ends_nothing_has_its_effect(
    bench: Bench, engine: sa.Engine, ending: Ending
) -> None:
    """The control of the test above: its handler is acked when nothing was ended."""
    counted = ended(bench, engine, ending, goes_on=True)
    assert (counted["acked"], count_of(engine), len(rows_in_inbox(engine))) == (1, 1, 1)


def test_C5_an_error_inside_a_savepoint_may_be_swallowed(bench: Bench, engine: sa.Engine) -> None:
    def ending(session: Session) -> None:
        with suppress(sa.exc.IntegrityError), session.begin_nested():
            session.execute(sa.text("INSERT INTO tally VALUES (NULL)"))

    counted = ended(bench, engine, ending, goes_on=True)
    assert (counted["acked"], count_of(engine)) == (1, 1)


def test_C5_what_a_failed_commit_left_open_is_undone_and_locks_nobody_out(
    tmp_path: Path,
) -> None:
    """SQLite leaves the transaction open when a reader lets no COMMIT through, and so does the pool."""
    url = f"sqlite:///{tmp_path}/shop.db"
    engine = sa.create_engine(url, connect_args={"timeout": 0})
    create_tables(engine)
    engine.dispose()  # or the mode below could not be changed
    others = sa.create_engine(url, connect_args={"timeout": 0}, isolation_level="AUTOCOMMIT")
    with others.connect() as other:
        # With a write-ahead log no reader is in a writer's way.
        other.exec_driver_sql("PRAGMA journal_mode = DELETE")
        other.exec_driver_sql("CREATE TABLE effect (label)")
        other.exec_driver_sql("BEGIN")
        other.exec_driver_sql("SELECT count(*) FROM effect").all()
        inbox = Inbox(engine, group=GROUP)
        with (
            pytest.raises(sa.exc.OperationalError, match="locked"),
            inbox.open([b"1" * 16]) as work,
        ):
            work.session.execute(sa.text("INSERT INTO effect VALUES ('undone')"))
        other.exec_driver_sql("COMMIT")
        other.exec_driver_sql("BEGIN IMMEDIATE")  # nobody holds the lock
        other.exec_driver_sql("COMMIT")
        with inbox.open([b"2" * 16]) as work:
            work.session.execute(sa.text("INSERT INTO effect VALUES ('done')"))
        assert other.exec_driver_sql("SELECT label FROM effect").all() == [("done",)]
    engine.dispose()
    others.dispose()


@pytest.mark.parametrize("place", ["file", "memory", "asynchronous"])
def test_C5_a_commit_that_a_deferred_key_refuses_takes_nothing_of_later_effects(
    tmp_path: Path, place: str
) -> None:
    """SQLite keeps that transaction open, and what comes next on the connection would be part of it."""
    urls = {"file": f"sqlite:///{tmp_path}/shop.db", "memory": "sqlite://"}
    options: dict[str, Any] = {"pool_size": 1, "max_overflow": 0}
    if place == "memory":
        options = {"poolclass": StaticPool, "connect_args": {"check_same_thread": False}}
    url = urls.get(place, urls["file"])
    engine = sa.create_engine(url, **options)
    create_tables(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE tally (n INTEGER PRIMARY KEY)")
        connection.exec_driver_sql(
            "CREATE TABLE part (n INTEGER REFERENCES tally DEFERRABLE INITIALLY DEFERRED)"
        )
    if place == "asynchronous":
        asyncio.run(_effects_async(sa.make_url(url).set(drivername="sqlite+aiosqlite"), options))
    else:
        _effects(Inbox(engine, group=GROUP))
    assert rows_in_inbox(engine) == {(GROUP, b"2" * 16)}
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT n FROM part").all() == []
    engine.dispose()


_DANGLING = sa.text("INSERT INTO part VALUES (1)")
_CHECKED = sa.text("PRAGMA foreign_keys = ON")


def _effects(inbox: Inbox) -> None:
    with inbox._session_factory() as session:
        session.execute(_CHECKED)
    with pytest.raises(sa.exc.IntegrityError), inbox.open([b"1" * 16]) as work:
        work.session.execute(_DANGLING)
    with inbox.open([b"2" * 16]):
        pass


async def _effects_async(url: sa.URL, options: dict[str, Any]) -> None:
    engine = create_async_engine(url, **options)
    inbox = AsyncInbox(engine, group=GROUP)
    async with engine.connect() as connection:
        await connection.execute(_CHECKED)
    with pytest.raises(sa.exc.IntegrityError):
        async with inbox.open([b"1" * 16]) as work:
            await work.session.execute(_DANGLING)
    async with inbox.open([b"2" * 16]):
        pass
    await inbox.close()
