"""The application's engine, sessions and pool, as only its own process can show them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import scoped_session, sessionmaker

from qmq_client import Producer
from qmq_client.doctor import examine
from qmq_client.outbox.database.dialect import dialect_of
from qmq_client.outbox.table import create_tables
from qmq_client.outbox.transaction import calls
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


def test_X1_a_sound_application_has_no_findings(engine: sa.Engine, producer: Producer) -> None:
    for factory in (sessionmaker(engine), scoped_session(sessionmaker(engine))):
        assert ids(examine(engine, session_factory=factory, threads=15)) == []


def test_X1_an_engine_without_a_producer_is_found_and_sound_with_one(engine: sa.Engine) -> None:
    expected = ["session.hook"]
    if engine.dialect.name == "sqlite":
        expected.append("sqlite.explicit_begin")
    assert ids(examine(engine, session_factory=sessionmaker(engine))) == expected
    with Producer(engine, MemoryTransport(MemoryBroker())):
        assert ids(examine(engine, session_factory=sessionmaker(engine))) == []


def test_X1_two_copies_of_the_product_are_found(engine: sa.Engine, producer: Producer) -> None:
    dialect: Any = engine.dialect

    class Vendored(calls.Calls):
        """As another copy has it."""

        def do_commit(self, given: Any) -> None:
            super().do_commit(given)

    Vendored.do_commit.__module__ = f"vendored.{calls.__name__}"
    first = dialect.do_commit
    dialect.do_commit = Vendored(dialect, dialect_of(engine)).do_commit
    (finding,) = examine(engine, session_factory=sessionmaker(engine))
    assert (finding.id, finding.read) == ("session.hook", "2 copies of the product follow it")
    dialect.do_commit = first
    assert examine(engine, session_factory=sessionmaker(engine)) == ()


def test_X1_sessions_that_commit_by_themselves_are_found(
    engine: sa.Engine, producer: Producer
) -> None:
    autocommit = sessionmaker(engine.execution_options(isolation_level="AUTOCOMMIT"))
    assert ids(examine(engine, session_factory=autocommit)) == ["session.autocommit"]


def test_X1_sessions_of_another_engine_are_found(
    a_database: Database, engine: sa.Engine, producer: Producer
) -> None:
    other = a_database.engine()
    with Producer(other, MemoryTransport(MemoryBroker())):
        (finding,) = examine(engine, session_factory=sessionmaker(other))
    assert finding.id == "session.bind"


def test_X1_a_pool_that_is_too_small_is_found(engine: sa.Engine) -> None:
    (finding,) = examine(engine, threads=16)
    assert finding.id == "pool.small"
    assert finding.fix == "create_engine(…, pool_size=16)"
    larger = sa.create_engine(engine.url, pool_size=16)
    assert examine(larger, threads=16) == ()
    larger.dispose()


def test_X1_an_asynchronous_application_is_examined_too(
    a_database: Database, engine: sa.Engine
) -> None:
    made = create_async_engine(a_database.async_url)
    factory = async_sessionmaker(made)
    assert ids(examine(made, session_factory=factory)) == ["session.hook"]
    with Producer(made, MemoryTransport(MemoryBroker())):
        assert ids(examine(made, session_factory=factory)) == []
        autocommit = async_sessionmaker(made.execution_options(isolation_level="AUTOCOMMIT"))
        assert ids(examine(made, session_factory=autocommit)) == ["session.autocommit"]
