"""What becomes of a message follows from what becomes of its transaction, and from nothing else."""

from __future__ import annotations

import gc
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from qmq_client.message import Message
from qmq_client.options import ProducerOptions
from qmq_client.outbox.table import create_tables
from qmq_client.producer import Producer
from qmq_client.testing import MemoryBroker, MemoryTransport
from qmq_client.transactional import transaction
from tests.client.publishing import sweep
from tests.client.world import SUBJECT, Base, Order, World, a_world, add, open_engine
from tests.services.databases import Database

BROKEN_PROMISE = {"label": "broken", "promise": 10**9}


def test_S1_the_row_is_visible_when_and_only_when_its_transaction_committed(world: World) -> None:
    with Session(world.engine) as session:
        session.add(Order(label="a"))
        message_id = world.send("a", session)
        session.flush()
        assert world.stored_ids() == set()
        session.commit()
    assert world.stored_ids() == {message_id}
    assert world.committed_orders() == {"a"}


def test_S1_a_savepoint_as_first_statement_keeps_message_and_row_together(any_world: World) -> None:
    """SQLite's driver lets RELEASE commit there; the application's engine is left as it is."""
    world = any_world
    with Session(world.engine) as session:
        with session.begin_nested():
            add(world, session, "a")
        session.rollback()
    world.producer.flush()
    world.make_due()
    sweep(world)
    expected = ["a"] if world.kind == "sqlite" else []
    assert world.outcome() == (expected, expected, set())


def test_S2_a_rolled_back_message_never_reaches_the_network(world: World) -> None:
    with Session(world.engine) as session:
        world.send("a", session)
        session.rollback()

    def fail() -> None:
        with Session(world.engine) as session, session.begin():
            world.send("b", session)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert world.producer.flush()
    assert (world.sent(), world.memory.calls["send"]) == ([], 0)


def test_S2_a_commit_that_the_database_refuses_sends_nothing(world: World) -> None:
    with Session(world.engine) as session:
        session.execute(sa.insert(Order).values(BROKEN_PROMISE))
        world.send("a", session)
        with pytest.raises(sa.exc.IntegrityError):
            session.commit()
        session.rollback()
    assert world.producer.flush()
    assert (world.sent(), world.stored_ids()) == ([], set())


def test_S2_a_session_joined_to_a_transaction_that_is_rolled_back_sends_nothing(
    world: World,
) -> None:
    with world.engine.connect() as connection:
        outer = connection.begin()
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            world.send("a", session)
            session.commit()
        assert world.producer.flush()
        assert world.sent() == []
        outer.rollback()
    assert world.producer.flush()
    assert world.sent() == []


def test_S3_a_message_follows_its_savepoint_and_then_the_outer_transaction(world: World) -> None:
    with Session(world.engine) as session, session.begin():
        world.send("outer", session)
        with session.begin_nested() as first:
            world.send("undone", session)
            with session.begin_nested():
                world.send("undone with its parent", session)
            first.rollback()
        with session.begin_nested():
            world.send("released", session)
            with session.begin_nested() as inner:
                world.send("undone inside", session)
                inner.rollback()
        assert world.producer.flush()
        assert world.sent() == []
    assert world.producer.flush()
    assert world.sent() == ["outer", "released"]


def test_S3_a_savepoint_made_before_the_first_send_counts_too(world: World) -> None:
    with Session(world.engine) as session, session.begin():
        session.add(Order(label="a"))
        with session.begin_nested() as nested:
            session.add(Order(label="b"))
            world.send("b", session)
            nested.rollback()
        world.send("a", session)
    assert world.producer.flush()
    assert world.sent() == ["a"] == sorted(world.committed_orders())


def test_S3_savepoints_of_the_connection_count_like_those_of_the_session(world: World) -> None:
    with transaction(world.engine) as connection:
        world.send("a")
        undone = connection.begin_nested()
        world.send("b")
        undone.rollback()
        with connection.begin_nested():
            world.send("c")
    assert world.producer.flush()
    assert world.sent() == ["a", "c"]


def test_S3_a_session_joined_to_a_connection_sends_when_the_connection_commits(
    world: World,
) -> None:
    with world.engine.connect() as connection:
        with connection.begin():
            with Session(connection) as session:
                world.send("a", session)
                session.commit()
            assert world.producer.flush()
            assert world.sent() == []
        assert world.producer.flush()
        assert world.sent() == ["a"]


@pytest.mark.parametrize("way", ["close", "remove", "exception", "garbage"])
def test_S4_a_transaction_that_just_ends_leaves_nothing_behind(world: World, way: str) -> None:
    registry = scoped_session(sessionmaker(world.engine))
    world.send("left", registry)
    if way == "remove":
        registry.remove()
    elif way == "exception":
        with pytest.raises(KeyError), registry():
            raise KeyError
    elif way == "close":
        registry().close()
    else:
        registry.registry.clear()
        gc.collect()
    with Session(world.engine) as session, session.begin():
        world.send("next", session)
    assert world.producer.flush()
    assert world.sent() == ["next"]


def test_S4_the_next_user_of_a_pooled_connection_inherits_nothing(tmp_path: Path) -> None:
    with a_world(tmp_path) as world:
        with world.engine.connect() as connection:
            connection.begin()
            connection.execute(sa.insert(Order).values(BROKEN_PROMISE))
            world.send("broken", connection)
            with pytest.raises(sa.exc.IntegrityError):
                connection.commit()
            connection.rollback()
        with Session(world.engine) as session, session.begin():
            session.add(Order(label="next"))
            world.send("next", session)
        assert world.producer.flush()
        assert world.committed_orders() == {"next"}
        assert world.sent() == ["next"]


def test_S4_two_transactions_of_one_session_are_two(world: World) -> None:
    with Session(world.engine) as session:
        world.send("a", session)
        session.rollback()
        world.send("b", session)
        session.commit()
        world.send("c", session)
    assert world.producer.flush()
    assert world.sent() == ["b"]


def test_a_connection_committed_behind_the_sessions_back_is_sent_at_once(world: World) -> None:
    with Session(world.engine) as session:
        world.send("a", session)
        session.connection().commit()
    assert len(world.stored_ids()) == 1
    assert world.producer.flush()
    assert (world.sent(), world.producer.stats.reclaimed) == (["a"], 0)


def test_a_bare_connection_is_sent_at_once_because_its_commit_was_seen(world: World) -> None:
    with world.engine.connect() as connection:
        connection.begin()
        world.send("a", connection)
        connection.commit()
        connection.begin()
        world.send("b", connection)
        connection.rollback()
    assert world.producer.flush()
    assert (world.sent(), world.producer.stats.reclaimed) == (["a"], 0)


def test_S1_a_connection_let_go_is_committed_with_its_message_or_not_at_all(
    a_database: Database, tmp_path: Path
) -> None:
    """Also by a pool that is set to commit what it is given back."""
    for way in ("commit", "rollback"):
        options = {"pool_reset_on_return": way}
        with a_world(tmp_path, database=a_database, engine_options=options) as world:
            connection = world.engine.connect()
            connection.execute(sa.insert(Order).values(label="a"))
            world.send("a", connection)
            del connection
            gc.collect()
            expected = ["a"] if way == "commit" else []
            assert world.outcome() == (expected, expected, set())
            world.change("DELETE FROM business_order")


def test_a_commit_whose_answer_is_lost_is_looked_for_and_sent(world: World) -> None:
    def commit_and_fail(driver: Any) -> None:
        driver.commit()
        raise sqlite3.OperationalError("the answer was lost")

    with Session(world.engine) as session:
        world.send("a", session)
        world.commits.now = commit_and_fail
        with pytest.raises(sa.exc.OperationalError, match="answer was lost"):
            session.commit()
        world.commits.now = world.commits.real
    assert world.producer.flush()
    assert world.sent() == ["a"]


def test_S2_an_error_swallowed_by_the_application_still_sends_what_committed(world: World) -> None:
    with Session(world.engine) as session:
        world.send("a", session)
        session.add(Order(label="a"))
        with pytest.raises(sa.exc.IntegrityError):
            session.execute(sa.text("INSERT INTO business_order (id) VALUES (1)"))
        session.commit()  # on SQLite the rest of the transaction is whole
    assert world.committed_orders() == {"a"}
    assert world.producer.flush()
    assert world.sent() == ["a"]


def test_S2_rows_undone_by_sql_given_as_text_are_not_sent(world: World) -> None:
    with Session(world.engine) as session:
        session.execute(sa.text("SAVEPOINT mine"))
        world.producer.send_many([Message(SUBJECT, f"{i}") for i in range(150)], session=session)
        session.execute(sa.text("ROLLBACK TO mine"))
        world.send("kept", session)
        session.commit()
    assert len(world.stored_ids()) == 1
    assert world.producer.flush()
    assert world.sent() == ["kept"]


def test_sends_made_while_the_session_flushes_inside_the_commit_are_stored(world: World) -> None:
    with Session(world.engine) as session:

        @event.listens_for(session, "after_flush")
        def _announce(flushed: Session, _: Any) -> None:
            for order in flushed.new:
                world.send(order.label, flushed)

        session.add(Order(label="a"))
        session.commit()
    assert world.producer.flush()
    assert world.sent() == ["a"]


def test_a_transaction_older_than_the_producer_is_joined(tmp_path: Path) -> None:
    engine = open_engine(tmp_path / "shop.sqlite")
    create_tables(engine)
    Base.metadata.create_all(engine)
    broker = MemoryBroker()
    with Session(engine) as session:
        session.execute(sa.select(Order)).all()
        options = ProducerOptions(background=False)
        with Producer(engine, MemoryTransport(broker), options=options) as producer:
            session.add(Order(label="a"))
            producer.send(Message(SUBJECT, "a"), session=session)
            session.commit()
            assert producer.flush()
    assert [message.body for message in broker.messages(SUBJECT)] == ["a"]
    engine.dispose()


def test_several_producers_share_a_transaction_and_each_sends_its_own(world: World) -> None:
    broker = MemoryBroker()
    options = ProducerOptions(background=False)
    with Producer(world.engine, MemoryTransport(broker), options=options) as other:
        with Session(world.engine) as session, session.begin():
            world.send("a", session)
            other.send(Message(SUBJECT, "b"), session=session)
            world.send("c", session)
        assert world.producer.flush()
        assert other.flush()
    assert world.sent() == ["a", "c"]
    assert [message.body for message in broker.messages(SUBJECT)] == ["b"]
