"""Statements of which nobody knows what they do to the transaction, and work between hook and COMMIT.

A message that was sent beside a business row is stored and sent with it, or neither is: whatever a
procedure, several statements in one text, or a listener of the application did in between.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.orm import Session
from sqlalchemy.sql import elements

from qmq_client.errors import WrongDatabaseError
from tests.client.outbox.interference import Deadlock, make_lock_rows
from tests.client.world import Order, World, a_world
from tests.conftest import MakeDatabase
from tests.services.databases import Database, is_mariadb

PROCEDURE = """
CREATE PROCEDURE give_up() BEGIN
  DECLARE EXIT HANDLER FOR SQLEXCEPTION BEGIN ROLLBACK; INSERT INTO noted VALUES (1); END;
  INSERT INTO business_order (id, label) VALUES (1, NULL);
END"""
#: SQLAlchemy's own, which have no types.
CLAUSES: Any = elements
COMPOUND = "BEGIN NOT ATOMIC ROLLBACK; INSERT INTO business_order (label) VALUES ('inner'); END"


def insert(session: Session, label: str) -> None:
    session.execute(sa.insert(Order).values(label=label))


def add(world: World, session: Session, label: str) -> None:
    insert(session, label)
    world.send(label, session)


def attempt(world: World, between: Callable[[Session], object]) -> None:
    """A transaction with something in between, and the oracle."""
    with Session(world.engine) as session, suppress(sa.exc.DBAPIError):
        add(world, session, "before")
        between(session)
        insert(session, "later")
        session.commit()
    orders, sent, left = world.outcome()
    assert (sent, left) == ([label for label in orders if label == "before"], set()), orders


TEXTS = {
    "mysql": [
        "ROLLBACK AND CHAIN",
        "CALL give_up()",
        "EXECUTE IMMEDIATE 'ROLLBACK'",
        COMPOUND,
        "/* a comment */ rollback and chain",
        "/*!50000 ROLLBACK AND CHAIN */",
    ],
    "postgresql": [
        "ROLLBACK AND CHAIN",
        "ROLLBACK; BEGIN",
        "SELECT 1; ROLLBACK; BEGIN",
        "ABORT AND CHAIN",
    ],
}


@pytest.mark.parametrize(
    ("kind", "text"), [(kind, text) for kind, texts in TEXTS.items() for text in texts]
)
def test_S1_S2_a_text_that_rolls_back_and_continues(
    kind: str, text: str, server_world: World
) -> None:
    world = server_world
    if world.kind != kind:
        pytest.skip(f"a statement of {kind}")
    if "give_up" in text:
        world.change("CREATE TABLE noted (id INT)")
        world.change(PROCEDURE)
    attempt(world, lambda session: session.connection().exec_driver_sql(text))


@pytest.mark.parametrize("is_quoted", [False, True])
def test_S3_a_savepoint_of_sqlalchemy_rolled_back_to_by_text(
    is_quoted: bool, any_world: World
) -> None:
    world = any_world

    def between(session: Session) -> None:
        nested = session.begin_nested()
        session.connection()
        world.send("inside", session)
        savepoint = session.connection().get_nested_transaction()
        assert savepoint is not None
        name = savepoint._savepoint
        quote = ("`" if world.kind == "mysql" else '"') if is_quoted else ""
        session.execute(sa.text(f"ROLLBACK TO SAVEPOINT {quote}{name}{quote}"))
        nested.commit()

    attempt(world, between)
    assert world.sent() == ["before"]


def test_S3_savepoints_executed_as_clauses_take_their_messages_with_them(any_world: World) -> None:
    """What `begin_nested` executes may be executed directly; then the dialect is asked for nothing."""
    with Session(any_world.engine) as session:
        add(any_world, session, "before")
        session.connection().execute(CLAUSES.SavepointClause("here"))
        add(any_world, session, "inside")
        session.connection().execute(CLAUSES.RollbackToSavepointClause("here"))
        session.commit()
    assert any_world.outcome() == (["before"], ["before"], set())


def test_S3_of_two_savepoints_with_one_name_the_newer_is_meant(any_world: World) -> None:
    with Session(any_world.engine) as session:
        for label in ("first", "second", "third"):
            session.execute(sa.text("SAVEPOINT again"))
            add(any_world, session, label)
        session.execute(sa.text("ROLLBACK TO SAVEPOINT again"))
        add(any_world, session, "instead")
        session.commit()
    labels = ["first", "instead", "second"]
    assert any_world.outcome() == (labels, labels, set())


@pytest.mark.parametrize("wanted", ["here", '"Here"'])
def test_S3_of_two_savepoints_that_differ_in_case_that_one_is_meant_which_the_database_means(
    wanted: str, any_world: World
) -> None:
    """Three kinds of database, three answers; the messages go with the business rows."""
    quoted = '"Here"' if any_world.kind == "postgresql" else "Here"
    with Session(any_world.engine) as session:
        session.execute(sa.text(f"SAVEPOINT {quoted}"))
        add(any_world, session, "first")
        session.execute(sa.text("SAVEPOINT here"))
        add(any_world, session, "second")
        name = quoted if wanted == '"Here"' else wanted
        session.execute(sa.text(f"ROLLBACK TO SAVEPOINT {name}"))
        session.commit()
    orders, sent, left = any_world.outcome()
    assert (sent, left) == (orders, set())


def test_S1_S3_an_error_of_an_earlier_stream_takes_back_no_savepoint(
    postgresql_database: Database, tmp_path: Path
) -> None:
    """The savepoint is there, and going back to it keeps what was sent before."""
    divisors = "SELECT n.i, 1 / (50 - n.i) FROM generate_series(1, 1000) AS n (i)"
    streamed: Any = {"stream_results": True, "yield_per": 10}
    with a_world(tmp_path, database=postgresql_database) as world:
        with world.engine.connect() as connection, connection.begin():
            connection.execute(sa.insert(Order).values(label="before"))
            with connection.execute(sa.text(divisors), execution_options=streamed) as stream:
                world.send("before", connection)
                connection.exec_driver_sql("SAVEPOINT here")
                with pytest.raises(sa.exc.DBAPIError, match="zero"):
                    stream.all()
            connection.exec_driver_sql("ROLLBACK TO SAVEPOINT here")
        assert world.outcome() == (["before"], ["before"], set())


def test_S3_a_rollback_to_a_savepoint_that_is_not_there_undoes_nothing(any_world: World) -> None:
    world = any_world

    def between(session: Session) -> None:
        with suppress(sa.exc.DBAPIError):
            session.execute(sa.text("ROLLBACK TO SAVEPOINT nowhere"))

    attempt(world, between)
    assert world.sent() == ([] if world.kind == "postgresql" else ["before"])


def in_listener(name: str, work: Callable[[Session], object]) -> Callable[[Session], object]:
    """Do this inside the commit, after our own hook."""

    def between(session: Session) -> None:
        session.add(Order(label="orm"))
        event.listen(session, name, lambda inner, *_: work(inner))

    return between


def roll_back_and_go_on(session: Session) -> None:
    session.execute(sa.text("ROLLBACK"))
    insert(session, "after")


def roll_back_by_the_driver(session: Session) -> None:
    session.connection().connection.rollback()
    insert(session, "after")


def swallow_an_error(session: Session) -> None:
    with suppress(sa.exc.DBAPIError):
        session.execute(sa.text("INSERT INTO nowhere VALUES (1)"))


@pytest.mark.parametrize("name", ["after_flush", "before_commit"])
@pytest.mark.parametrize(
    "work",
    [roll_back_and_go_on, roll_back_by_the_driver, swallow_an_error],
    ids=lambda w: w.__name__,
)
def test_S1_S2_what_a_listener_does_between_our_hook_and_the_commit(
    name: str, work: Callable[[Session], object], any_world: World
) -> None:
    attempt(any_world, in_listener(name, work))


def test_S1_a_conflict_that_rolls_back_in_a_listener(world: World) -> None:
    world.change("INSERT INTO business_order (id, label) VALUES (77, 'x')")

    def work(session: Session) -> None:
        with suppress(sa.exc.DBAPIError):
            session.execute(
                sa.text("INSERT OR ROLLBACK INTO business_order (id, label) VALUES (77, 'y')")
            )
        insert(session, "after")

    attempt(world, in_listener("before_commit", work))


def test_S1_E19_a_deadlock_swallowed_in_a_listener(server_world: World) -> None:
    world = server_world
    make_lock_rows(world)

    def work(session: Session) -> None:
        with Deadlock(world) as other:
            if world.kind == "postgresql":
                session.execute(sa.text("SET LOCAL deadlock_timeout = '10ms'"))
            session.execute(sa.text(other.first))
            other.close_the_circle()
            with suppress(sa.exc.DBAPIError):
                session.execute(sa.text(other.second))
        if world.kind == "mysql":
            insert(session, "after")

    attempt(world, in_listener("before_commit", work))


def test_S1_a_row_that_changed_since_the_snapshot_undoes_all_on_mariadb(
    server_world: World,
) -> None:
    world = server_world
    if not is_mariadb(world.sync_engine):
        pytest.skip("an error of MariaDB")
    world.change("INSERT INTO business_order (id, label) VALUES (77, 'x')")
    with Session(world.engine) as session:
        session.execute(sa.text("SET SESSION innodb_snapshot_isolation = ON"))
        session.commit()

    def between(session: Session) -> None:
        session.execute(sa.text("SELECT * FROM business_order")).all()
        world.change("UPDATE business_order SET label = 'xx' WHERE id = 77")
        with suppress(sa.exc.DBAPIError):
            session.execute(sa.text("UPDATE business_order SET label = 'yy' WHERE id = 77"))

    attempt(world, between)


def test_S4_an_invalidated_connection_rolls_back_and_is_used_again(any_world: World) -> None:
    world = any_world
    with world.engine.connect() as connection:
        transaction = connection.begin()
        connection.execute(sa.insert(Order).values(label="gone"))
        world.send("gone", connection)
        connection.invalidate()
        transaction.rollback()
        with connection.begin():
            connection.execute(sa.insert(Order).values(label="kept"))
            world.send("kept", connection)
    assert world.outcome() == (["kept"], ["kept"], set())


def test_S1_a_send_in_a_listener_of_the_commit_goes_with_it(any_world: World) -> None:
    world = any_world

    def send_now(connection: sa.Connection) -> None:
        world.send("late", connection)

    with world.engine.connect() as connection:
        event.listen(world.engine, "commit", send_now)
        for label in ("a", "b"):
            with connection.begin():
                connection.execute(sa.insert(Order).values(label=label))
                if label == "b":
                    world.send("b", connection)
        event.remove(world.engine, "commit", send_now)
    assert world.outcome() == (["a", "b"], ["b", "late", "late"], set())


def test_S1_a_send_just_before_the_driver_commits_goes_with_it(any_world: World) -> None:
    world = any_world
    with world.engine.connect() as connection:

        def commit(given: object) -> None:
            world.commits.now = world.commits.real
            world.send("late", connection)
            world.commits.real(given)

        world.commits.now = commit
        with connection.begin():
            connection.execute(sa.insert(Order).values(label="a"))
            world.send("a", connection)
    assert world.outcome() == (["a"], ["a", "late"], set())


def test_S1_a_session_with_two_connections_to_one_database_is_refused_by_strict(
    a_server_database: Database, tmp_path: Path
) -> None:
    with a_world(tmp_path, database=a_server_database, strict=True) as world:
        other = world.engine.execution_options(isolation_level="SERIALIZABLE")
        with Session(world.engine, binds={Order: other}) as session:
            session.execute(sa.text("SELECT 1"))
            session.execute(sa.insert(Order).values(label="a"))
            with pytest.raises(WrongDatabaseError, match="another connection"):
                world.send("a", session)
            session.rollback()
            session.execute(sa.text("SELECT 1"))
            world.send("with one of them", session)
            session.commit()
        assert world.outcome() == ([], ["with one of them"], set())


def test_S1_a_session_whose_transaction_runs_on_a_second_engine_too_is_refused_by_strict(
    a_database: Database, make_database: MakeDatabase, tmp_path: Path
) -> None:
    other = make_database(a_database.kind).engine()
    Order.metadata.create_all(other)
    with a_world(tmp_path, database=a_database, strict=True) as world:
        with Session(world.engine, binds={Order: other}) as session:
            session.execute(sa.insert(Order).values(label="elsewhere"))
            with pytest.raises(
                WrongDatabaseError, match=r"another engine .*two commits are not one"
            ):
                world.send("a", session)
            session.rollback()
            world.send("alone", session)
            session.commit()
        assert world.outcome() == ([], ["alone"], set())
