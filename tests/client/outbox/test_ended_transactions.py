"""Transactions that end behind SQLAlchemy's back: by text, by the driver, by the database itself.

The row of a message is an ordinary row: what becomes of the business row beside it becomes of it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from qmq_client import transaction
from tests.client.publishing import sweep
from tests.client.world import Order, World, add


def text(session: Session, *statements: str) -> None:
    for statement in statements:
        session.execute(sa.text(statement))


def or_rollback(session: Session) -> None:
    """An error that the application swallows; SQLite itself rolls back everything then."""
    kind = session.get_bind().dialect.name
    verb = "INSERT OR ROLLBACK" if kind == "sqlite" else "INSERT"
    with suppress(sa.exc.IntegrityError):
        text(session, f"{verb} INTO business_order (id, label) VALUES (7, NULL)")


ENDINGS: dict[str, Callable[[Session], None]] = {
    "text": lambda session: text(session, "ROLLBACK"),
    "text with a comment": lambda session: text(session, "/* away */ rollback"),
    "text and begin": lambda session: text(session, "ROLLBACK", "BEGIN"),
    "text commit": lambda session: text(session, "COMMIT"),
    "driver": lambda session: session.connection().connection.rollback(),
    "driver commit": lambda session: session.connection().connection.commit(),
    "database": or_rollback,
}


def assert_told_as_stored(world: World, *among: str) -> None:
    """Business rows and messages are the same ones, at the latest after a watchdog."""
    world.producer.flush()
    world.make_due()
    sweep(world)
    orders, sent, left = world.outcome()
    assert (sent, left) == (orders, set())
    assert set(orders) <= set(among)


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("is_committed", [True, False])
def test_S1_S2_messages_of_a_transaction_ended_behind_the_back_go_with_its_rows(
    any_world: World, ending: str, is_committed: bool
) -> None:
    world = any_world
    with Session(world.engine) as session:
        add(world, session, "before")
        ENDINGS[ending](session)
        with suppress(sa.exc.DBAPIError):  # PostgreSQL takes no more after an error
            add(world, session, "after")
            session.commit() if is_committed else session.rollback()
        session.rollback()
        add(world, session, "again")
        session.commit()
    assert_told_as_stored(world, "before", "after", "again")
    assert "again" in world.sent()
    is_kept = "commit" in ending or (
        ending == "database" and is_committed and world.kind == "mysql"
    )
    assert ("before" in world.sent()) == is_kept
    if not is_committed:
        assert "after" not in world.sent()


@pytest.mark.parametrize("ending", ["text", "driver"])
def test_S1_S2_a_transaction_that_began_with_an_answer_of_rows_goes_with_them_too(
    any_world: World, ending: str
) -> None:
    """The ORM asks for the new ids: INSERT … RETURNING, where the database knows that."""
    world = any_world
    with Session(world.engine) as session:
        session.add_all([Order(label="before"), Order(label="too")])
        session.flush()
        world.send("before", session)
        ENDINGS[ending](session)
        session.commit()
    assert world.outcome() == ([], [], set())


@pytest.mark.parametrize("is_made_before", [True, False])
@pytest.mark.parametrize("back", ["ROLLBACK TO x", "-- back\nrollback transaction to savepoint x"])
def test_S3_savepoints_given_as_text_take_their_messages_with_them(
    world: World, is_made_before: bool, back: str
) -> None:
    with Session(world.engine) as session:
        if not is_made_before:
            add(world, session, "first")
        text(session, "SAVEPOINT x")
        add(world, session, "undone")
        or_error(session)
        text(session, back)
        add(world, session, "last")
        session.commit()
    expected = ["last"] if is_made_before else ["first", "last"]
    assert world.outcome() == (expected, expected, set())


def test_S3_a_savepoint_given_as_text_and_released_keeps_its_messages(world: World) -> None:
    with Session(world.engine) as session:
        world.send("a", session)
        text(session, "SAVEPOINT x")
        world.send("b", session)
        text(session, "RELEASE x")
        with session.begin_nested() as savepoint:
            world.send("c", session)
            text(session, "SAVEPOINT y")
            savepoint.rollback()
        session.commit()
    assert world.producer.flush()
    assert sorted(world.sent()) == ["a", "b"]


def or_error(session: Session) -> None:
    """The usual reason to go back to a savepoint."""
    with suppress(sa.exc.IntegrityError):
        text(session, "INSERT INTO business_order (id, label) VALUES (1, NULL)")


@contextmanager
def begun(world: World) -> Iterator[sa.Connection]:
    with world.engine.connect() as connection, connection.begin():
        yield connection


def test_S1_what_a_failed_commit_of_a_connection_leaves_open_is_committed_with_its_message(
    world: World,
) -> None:
    """SQLAlchemy does not roll back after `connection.commit()`: the next one commits both, or neither."""

    def fail(_: Any) -> None:
        raise sqlite3.OperationalError("database is locked")

    with world.engine.connect() as connection:
        add(world, connection, "left")
        world.commits.now = fail
        with pytest.raises(sa.exc.OperationalError, match="locked"):
            connection.commit()
        world.commits.now = world.commits.real
    with world.engine.connect() as connection:
        add(world, connection, "next")
        connection.commit()
    assert world.outcome() == (["left", "next"], ["left", "next"], set())


def test_S2_a_failed_commit_leaves_no_transaction_in_the_pool(world: World) -> None:
    """Where the application rolls back, as the end of the block does."""

    def fail(_: Any) -> None:
        raise sqlite3.OperationalError("database is locked")

    ways: list[Callable[[], Any]] = [
        world.engine.begin,
        lambda: transaction(world.engine),
        lambda: begun(world),
    ]
    for begin in ways:
        world.commits.now = fail
        with pytest.raises(sa.exc.OperationalError, match="locked"), begin() as connection:
            add(world, connection, "core")
        world.commits.now = world.commits.real
        with closing(sqlite3.connect(str(world.engine.url.database), timeout=0)) as other:
            other.execute("BEGIN IMMEDIATE")
    for label in ("first", "second"):
        with Session(world.engine) as session:
            add(world, session, label)
            world.commits.now = fail
            with pytest.raises(sa.exc.OperationalError, match="locked"):
                session.commit()
            world.commits.now = world.commits.real
            session.rollback()
        with closing(sqlite3.connect(str(world.engine.url.database), timeout=0)) as other:
            other.execute("BEGIN IMMEDIATE")
    assert world.outcome() == ([], [], set())
