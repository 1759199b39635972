"""Engines and databases set up in other ways keep the same promises."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session
from sqlalchemy.pool import StaticPool

from qmq_client.current import current_session
from qmq_client.message import Message
from qmq_client.options import ProducerOptions
from qmq_client.outbox.table import create_tables
from qmq_client.producer import Producer
from qmq_client.testing import MemoryBroker, MemoryTransport
from qmq_client.transactional import transaction, transactional
from tests.client.world import OUTBOX, SUBJECT, Base, Order, World, open_engine


@pytest.mark.parametrize("kind", ["own BEGIN", "options"])
def test_engines_set_up_in_other_ways_keep_the_promise(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "shop.sqlite"
    engine = open_engine(path)
    if kind == "own BEGIN":  # the recipe of SQLAlchemy's documentation

        @sa.event.listens_for(engine, "connect")
        def _no_begin_of_the_driver(driver: Any, _: Any) -> None:
            driver.isolation_level = None

        @sa.event.listens_for(engine, "begin")
        def _begin(connection: sa.Connection) -> None:
            connection.exec_driver_sql("BEGIN")

    create_tables(engine)
    Base.metadata.create_all(engine)
    given = engine.execution_options(logging_token="x") if kind == "options" else engine
    broker = MemoryBroker()
    with Producer(
        given, MemoryTransport(broker), options=ProducerOptions(background=False)
    ) as producer:
        for each in (engine, given):
            with Session(each) as session:
                if kind == "own BEGIN":  # else SQLite's driver begins with the first change only
                    with session.begin_nested():
                        producer.send(Message(SUBJECT, "no"), session=session)
                    session.rollback()
                session.execute(sa.text("UPDATE business_order SET label = label"))
                with session.begin_nested() as nested:
                    producer.send(Message(SUBJECT, "no"), session=session)
                    nested.rollback()
                producer.send(Message(SUBJECT, "yes"), session=session)
                session.commit()
        assert producer.flush()
    assert [message.body for message in broker.messages(SUBJECT)] == ["yes", "yes"]
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute(f"SELECT count(*) FROM {OUTBOX}").fetchone() == (0,)
    engine.dispose()


@pytest.mark.parametrize("text", ["BEGIN IMMEDIATE", "  begin"])
def test_S1_S3_an_application_may_begin_by_its_first_statement(world: World, text: str) -> None:
    with Session(world.engine) as session:
        session.execute(sa.text(text))
        session.execute(sa.insert(Order).values(label="a"))
        world.send("a", session)
        with session.begin_nested() as nested:
            world.send("no", session)
            nested.rollback()
        session.commit()
        session.execute(sa.text(text))
        session.execute(sa.insert(Order).values(label="b"))
        world.send("b", session)
        session.rollback()
    assert world.outcome() == (["a"], ["a"], set())


@pytest.mark.parametrize("scope", ["session", "core"])
def test_S1_S4_a_full_disk_stops_the_send_and_nothing_is_left_of_it(
    world: World, scope: str
) -> None:
    with world.engine.connect() as connection:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages + 2}")
        connection.rollback()
        joined: Any = Session(connection) if scope == "session" else connection
        joined.execute(sa.insert(Order).values(label="full"))
        with pytest.raises(sa.exc.OperationalError, match="full") as caught:
            world.producer.send(Message(SUBJECT, bytes(200_000)), session=joined)
        joined.rollback()
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages + 1_000}")
        connection.rollback()
        joined.execute(sa.insert(Order).values(label="room"))
        world.send("room", joined)
        joined.commit()
    assert any(OUTBOX in note for note in caught.value.__notes__)
    assert world.outcome() == (["room"], ["room"], set())


def test_a_send_that_another_writer_has_overtaken_shows_no_body(world: World) -> None:
    """As any write of a transaction of SQLite that has read; the application's engine is left as it is."""
    world.producer.send_now(Message(SUBJECT, "first"))
    with world.engine.connect() as connection:
        connection.exec_driver_sql("BEGIN")
        connection.scalar(sa.select(sa.func.count()).select_from(Order))
        with world.engine.begin() as other:
            other.execute(sa.insert(Order).values(label="between"))
        with pytest.raises(sa.exc.OperationalError, match="locked") as caught:
            world.producer.send_many(
                [Message(SUBJECT, f"secret {number}") for number in range(3)], session=connection
            )
        connection.rollback()
    assert "secret" not in str(caught.value)
    assert str(caught.value).count("julianday") == 2, "one row of the statement"
    assert world.outcome() == (["between"], ["first"], set())


def test_S1_two_sessions_at_once_in_memory_share_one_transaction_and_lose_no_message() -> None:
    engine = sa.create_engine(
        "sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False}
    )
    create_tables(engine)
    Base.metadata.create_all(engine)
    broker = MemoryBroker()
    options = ProducerOptions(background=False)
    with Producer(engine, MemoryTransport(broker), options=options) as producer:
        with Session(engine) as first, Session(engine) as second:
            for label, session in (("a", first), ("b", second)):
                session.execute(sa.insert(Order).values(label=label))
                producer.send(Message(SUBJECT, label), session=session)
            second.commit()  # of both: the database knows one transaction
            first.commit()
        assert producer.flush()
    with Session(engine) as session:
        assert set(session.scalars(sa.select(Order.label))) == {"a", "b"}
    assert sorted(message.body for message in broker.messages(SUBJECT)) == ["a", "b"]
    engine.dispose()


def test_a_database_in_memory_works_while_the_publisher_thread_runs() -> None:
    engine = sa.create_engine(
        "sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False}
    )
    create_tables(engine)
    Base.metadata.create_all(engine)
    broker = MemoryBroker()
    with Producer(engine, MemoryTransport(broker)) as producer:
        for i in range(100):
            with Session(engine) as session:
                session.add(Order(label=f"{i}"))
                producer.send(Message(SUBJECT, f"{i}"), session=session)
                session.flush()
                session.rollback() if i % 3 == 0 else session.commit()
        assert producer.flush()
    expected = {f"{i}" for i in range(100) if i % 3}
    assert {message.body for message in broker.messages(SUBJECT)} == expected
    with Session(engine) as session:
        assert set(session.scalars(sa.select(Order.label))) == expected
        assert session.scalar(sa.text(f"SELECT count(*) FROM {OUTBOX}")) == 0
    engine.dispose()


def test_transactions_of_ours_begin_to_write_and_those_of_the_application_as_it_likes(
    tmp_path: Path,
) -> None:
    engine = open_engine(tmp_path / "shop.sqlite")
    create_tables(engine)
    Base.metadata.create_all(engine)
    engine.dispose()
    begins: list[str] = []

    @sa.event.listens_for(engine, "connect")
    def _trace(driver: Any, _: Any) -> None:
        driver.set_trace_callback(
            lambda text: begins.append(text) if text.startswith("BEGIN") else None
        )

    transport = MemoryTransport(MemoryBroker())
    with Producer(engine, transport, options=ProducerOptions(background=False)) as producer:
        with Session(engine) as session:
            session.execute(sa.select(Order))
        assert begins == []
        transactional(producer)(lambda: current_session().execute(sa.select(Order)))()
        producer.send_now(Message(SUBJECT, "a"))
        with transaction(engine) as connection:
            connection.execute(sa.select(Order))
        assert begins == ["BEGIN IMMEDIATE"] * 3
    engine.dispose()
