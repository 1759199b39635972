"""The application's engine, sessions and pool, as only its own process can show them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pymysql
import pytest
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from qmq_client import Producer
from qmq_client.doctor import application, examine
from qmq_client.outbox.table import create_tables
from qmq_client.testing import MemoryBroker, MemoryTransport
from tests.client.doctor.ward import ids, run
from tests.services.databases import Database


@pytest.fixture
def engine(a_database: Database) -> sa.Engine:
    engine = a_database.engine()
    create_tables(engine)
    if a_database.kind == "sqlite":
        run(engine, "PRAGMA journal_mode = WAL")
    return engine


@pytest.fixture
def producer(engine: sa.Engine) -> Iterator[Producer]:
    with Producer(engine, MemoryTransport(MemoryBroker())) as made:
        yield made


def begin_with_sqlalchemy(engine: sa.Engine) -> None:
    """On SQLite the driver begins late; this is the cure of SQLAlchemy's documentation."""
    if engine.dialect.name != "sqlite":
        return

    def on_connect(driver: Any, _: object) -> None:
        driver.isolation_level = None

    def on_begin(connection: sa.Connection) -> None:
        connection.exec_driver_sql("BEGIN")

    event.listen(engine, "connect", on_connect)
    event.listen(engine, "begin", on_begin)
    engine.dispose()


def test_X1_a_sound_application_has_no_findings(engine: sa.Engine, producer: Producer) -> None:
    begin_with_sqlalchemy(engine)
    for factory in (sessionmaker(engine), scoped_session(sessionmaker(engine))):
        assert ids(examine(engine, session_factory=factory, threads=5)) == []


def test_X1_a_transaction_that_sqlite_begins_late_is_found(
    engine: sa.Engine, producer: Producer
) -> None:
    expected = ["sqlite.explicit_begin"] if engine.dialect.name == "sqlite" else []
    assert ids(examine(engine, session_factory=sessionmaker(engine))) == expected


def test_X1_a_transaction_that_also_begins_on_another_engine_is_found(
    a_database: Database, engine: sa.Engine, producer: Producer
) -> None:
    begin_with_sqlalchemy(engine)
    other = a_database.engine()

    def both() -> Session:
        session = Session(engine)
        session.connection(bind_arguments={"bind": other})
        return session

    (finding,) = examine(engine, session_factory=both)
    assert finding.id == "session.engines"
    assert other.url.render_as_string(hide_password=True) in finding.read
    other.dispose()


def test_X1_aiomysql_beside_a_pymysql_that_it_does_not_know_is_found() -> None:
    engine = sa.create_engine("mysql+aiomysql://nobody@localhost/shop", module=pymysql)
    (finding,) = application.driver(engine, "1.2.0")
    assert finding.id == "driver.aiomysql"
    assert list(application.driver(engine, "1.1.9")) == []
    other = sa.create_engine("mysql+pymysql://nobody@localhost/shop")
    assert list(application.driver(other, "1.2.0")) == []


def test_X1_sessions_that_commit_by_themselves_are_found(
    engine: sa.Engine, producer: Producer
) -> None:
    autocommit = sessionmaker(engine.execution_options(isolation_level="AUTOCOMMIT"))
    assert ids(examine(engine, session_factory=autocommit)) == ["session.autocommit"]


def test_X1_sessions_of_another_engine_are_found(
    a_database: Database, engine: sa.Engine, producer: Producer
) -> None:
    other = a_database.engine()
    begin_with_sqlalchemy(other)
    (finding,) = examine(engine, session_factory=sessionmaker(other))
    assert finding.id == "session.bind"


def test_X1_a_pool_that_is_too_small_is_found(engine: sa.Engine) -> None:
    (finding,) = examine(engine, threads=6)
    assert finding.id == "pool.small"
    assert finding.fix == "create_engine(…, pool_size=6)"
    larger = sa.create_engine(engine.url, pool_size=6)
    assert examine(larger, threads=6) == ()
    larger.dispose()


def test_X1_an_asynchronous_application_is_examined_too(
    a_database: Database, engine: sa.Engine
) -> None:
    made = create_async_engine(a_database.async_url)
    factory = async_sessionmaker(made)
    assert ids(examine(made, session_factory=factory)) == []
    with Producer(made, MemoryTransport(MemoryBroker())):
        assert ids(examine(made, session_factory=factory)) == []
        autocommit = async_sessionmaker(made.execution_options(isolation_level="AUTOCOMMIT"))
        assert ids(examine(made, session_factory=autocommit)) == ["session.autocommit"]
