"""The application's engine is left as it is: what it does without messages it does with a producer, too.

The loads read, think and write, as requests do. Whatever fails without a producer fails by the
application's own doing; the loads here are made so that nothing does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.orm import Session

from qmq_client import Message, Producer, ProducerOptions
from qmq_client.testing import MemoryBroker, MemoryTransport
from tests.client.publishing import GatedTransport
from tests.client.truth import Truth
from tests.client.world import SUBJECT, Order, set_up
from tests.kit.waiting import DEADLINE_S, becomes, wait_for
from tests.services.databases import Database

TRANSACTIONS: Final = 60
#: Between the read and the write, and between two transactions: part of the load.
THINK_S: Final = 0.002
PAUSE_S: Final = 0.005
JOURNAL_MODES: Final = ("WAL", "DELETE")
#: At SERIALIZABLE threads disturb each other without us.
ISOLATION: Final = ("READ COMMITTED", "REPEATABLE READ")
#: SQLite's ways to begin that no other writer disturbs: the driver's, before the first write, and
#: SQLAlchemy's recipe for writers.
BEGINNINGS: Final = ("of the driver", "BEGIN IMMEDIATE")
#: Shorter than the publisher waits for the application.
QUIET_S: Final = 0.3
_PRAGMAS: Final = ("busy_timeout", "journal_mode", "synchronous", "foreign_keys")
#: Of MySQL: counters and clocks.
_CHANGING: Final = (
    "error",
    "gtid",
    "identity",
    "last_",
    "pseudo_thread",
    "rand_seed",
    "timestamp",
    "warning",
)

Send = Callable[[Session, str], object]


def begin_by(engine: sa.Engine, statement: str) -> None:
    """SQLAlchemy's recipe for SQLite: the driver begins nothing, the engine's event does."""

    @event.listens_for(engine, "connect")
    def _leave_it_alone(driver: Any, _: Any) -> None:
        driver.isolation_level = None

    @event.listens_for(engine, "begin")
    def _begin(connection: sa.Connection) -> None:
        connection.exec_driver_sql(statement)


def work(engine: sa.Engine, name: str, send: Send, failures: list[Exception]) -> None:
    """Transactions of one thread, on rows of its own."""
    for i in range(TRANSACTIONS):
        label = f"{name}.{i}"
        try:
            with Session(engine) as session, session.begin():
                session.scalars(sa.select(Order).where(Order.label == label)).all()
                time.sleep(THINK_S)
                send(session, label)
                session.execute(sa.insert(Order).values(label=label))
        except sa.exc.DBAPIError as error:
            failures.append(error)
        time.sleep(PAUSE_S)


def load(engine: sa.Engine, threads: int, send: Send, prefix: str) -> list[Exception]:
    """What failed."""
    failures: list[Exception] = []
    given = [(engine, f"{prefix}.{i}", send, failures) for i in range(threads)]
    started = [threading.Thread(target=work, args=each) for each in given]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join(DEADLINE_S)
    return failures


@contextmanager
def a_producer(engine: sa.Engine) -> Iterator[tuple[Producer, MemoryBroker]]:
    broker = MemoryBroker()
    with Producer(engine, MemoryTransport(broker)) as producer:
        yield producer, broker


def compare(engine: sa.Engine, url: str, threads: int) -> None:
    """The same load without and with a producer."""
    assert load(engine, threads, lambda *_: None, "without") == []
    with a_producer(engine) as (producer, broker):

        def send(session: Session, label: str) -> None:
            producer.send(Message(SUBJECT, label), session=session)

        failures = load(engine, threads, send, "with")
        assert failures == []
        assert producer.flush(DEADLINE_S)
        sent = sorted(message.body for message in broker.messages(SUBJECT))
    rows = [row[0] for row in Truth(url).read("SELECT label FROM business_order")]
    assert len(rows) == 2 * threads * TRANSACTIONS
    assert sent == sorted(row for row in rows if row.startswith("with."))


def sqlite_engine(database: Database, journal_mode: str, beginning: str) -> sa.Engine:
    set_up(database.url)
    engine = database.engine()
    with engine.connect() as connection:
        connection.exec_driver_sql(f"PRAGMA journal_mode = {journal_mode}")
    engine.dispose()
    if beginning != "of the driver":
        begin_by(engine, beginning)
    return engine


@pytest.mark.parametrize("beginning", BEGINNINGS)
@pytest.mark.parametrize("journal_mode", JOURNAL_MODES)
def test_S5_on_sqlite_an_application_fails_no_more_with_a_producer_than_without(
    sqlite_database: Database, journal_mode: str, beginning: str
) -> None:
    engine = sqlite_engine(sqlite_database, journal_mode, beginning)
    compare(engine, sqlite_database.url, 4)


@pytest.mark.parametrize("journal_mode", JOURNAL_MODES)
def test_S5_on_sqlite_whoever_reads_after_a_plain_begin_is_not_disturbed(
    sqlite_database: Database, journal_mode: str
) -> None:
    """One thread: two of them disturb each other without us."""
    engine = sqlite_engine(sqlite_database, journal_mode, "BEGIN")
    compare(engine, sqlite_database.url, 1)


@pytest.mark.parametrize("journal_mode", JOURNAL_MODES)
def test_on_sqlite_nothing_is_deleted_while_the_application_has_read_and_not_yet_written(
    sqlite_database: Database, journal_mode: str
) -> None:
    engine = sqlite_engine(sqlite_database, journal_mode, "BEGIN")
    transport = GatedTransport(MemoryBroker())
    options = ProducerOptions(delete_delay_ms=0)
    with Producer(engine, transport, options=options) as producer:
        with Session(engine) as session, session.begin():
            producer.send(Message(SUBJECT, "a"), session=session)
        with Session(engine) as session, session.begin():
            session.scalars(sa.select(Order)).all()
            transport.go_on.set()
            wait_for(lambda: producer.stats.sent == 1)
            assert not becomes(lambda: producer.stats.deleted, within_s=QUIET_S)
            session.execute(sa.insert(Order).values(label="written"))
        wait_for(lambda: producer.stats.deleted == 1)
    assert Truth(sqlite_database.url).read("SELECT label FROM business_order") == [("written",)]


@pytest.mark.parametrize("isolation", ISOLATION)
def test_S5_on_servers_an_application_fails_no_more_with_a_producer_than_without(
    a_server_database: Database, isolation: str
) -> None:
    set_up(a_server_database.url)
    compare(a_server_database.engine(isolation_level=isolation), a_server_database.url, 4)


def settings_of(connection: sa.Connection) -> dict[str, str]:
    """All that the connection was told or set to, but for counters and clocks."""
    if connection.dialect.name == "sqlite":
        driver: Any = connection.connection.driver_connection
        found = {name: connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in _PRAGMAS}
        return {**found, "isolation_level": driver.isolation_level}
    if connection.dialect.name == "postgresql":
        query = "SELECT name, setting FROM pg_settings WHERE source <> 'internal'"
    else:
        query = "SHOW SESSION VARIABLES"
    rows = connection.exec_driver_sql(query).all()
    return {name: value for name, value in rows if not name.lower().startswith(_CHANGING)}


def transactions_of(engine: sa.Engine) -> tuple[list[str], dict[str, str]]:
    """Statements that a new connection is given for transactions without a message, and its settings."""
    statements: list[str] = []
    engine.dispose()

    def note(*given: Any) -> None:
        statements.append(given[2])

    def trace(driver: Any, _: Any) -> None:
        if engine.dialect.name == "sqlite":  # tells of BEGIN, too
            driver.set_trace_callback(statements.append)

    for name, listener in (("before_cursor_execute", note), ("connect", trace)):
        event.listen(engine, name, listener)
    with Session(engine) as session:
        session.scalars(sa.select(Order)).all()
        session.commit()
        session.execute(sa.delete(Order))
        session.rollback()
        with session.begin_nested():
            session.execute(sa.delete(Order))
        session.commit()
    for name, listener in (("before_cursor_execute", note), ("connect", trace)):
        event.remove(engine, name, listener)
    with engine.connect() as connection:
        return statements, settings_of(connection)


def test_S5_S13_a_producer_changes_no_statement_and_no_setting_of_an_application(
    a_database: Database,
) -> None:
    set_up(a_database.url)
    engine = a_database.engine()
    transactions_of(engine)  # the first connection of a dialect asks for more than later ones
    without = transactions_of(engine)
    with a_producer(engine) as (producer, _):
        assert transactions_of(engine) == without
        with Session(engine) as session, session.begin():
            producer.send(Message(SUBJECT, "a"), session=session)
        assert producer.flush(DEADLINE_S)
        assert transactions_of(engine) == without
