"""Transactions that end behind SQLAlchemy's back: by text, by the driver, by the database itself.

The driver begins anew with the next change, so at the commit everything looks as it should.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from qmq_client.errors import OutboxRowLostError
from tests.client.publishing import sweep
from tests.client.world import Order, World, a_world
from tests.services.databases import Database


def add(session: Session, label: str) -> None:
    session.execute(sa.insert(Order).values(label=label))


def text(session: Session, *statements: str) -> None:
    for statement in statements:
        session.execute(sa.text(statement))


def or_rollback(session: Session) -> None:
    """An error upon which SQLite itself rolls back everything, swallowed."""
    add(session, "twice")
    with suppress(sa.exc.IntegrityError):
        text(session, "INSERT OR ROLLBACK INTO business_order (label) VALUES ('twice')")


ENDINGS: dict[str, Callable[[Session], None]] = {
    "text": lambda session: text(session, "ROLLBACK"),
    "text with a comment": lambda session: text(session, "/* away */ rollback"),
    "text and begin": lambda session: text(session, "ROLLBACK", "BEGIN"),
    "text commit": lambda session: text(session, "COMMIT"),
    "driver": lambda session: session.connection().connection.rollback(),
    "database": or_rollback,
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_S1_S2_a_transaction_ended_behind_the_back_does_not_commit_its_messages(
    world: World, ending: str
) -> None:
    with Session(world.engine) as session:
        add(session, "before")
        world.send("before", session)
        ENDINGS[ending](session)
        add(session, "after")
        with pytest.raises(OutboxRowLostError):
            session.commit()
    assert world.producer.flush()
    # A COMMIT given as text takes the message along, like the business row; nobody was told of it,
    # so the row waits for a watchdog.
    committed = 1 if ending == "text commit" else 0
    assert (world.sent(), len(world.stored_ids())) == ([], committed)
    assert len(world.committed_orders()) == committed
    assert "after" not in world.committed_orders()


@pytest.mark.parametrize("ending", ["text", "driver"])
def test_S1_S2_a_transaction_that_began_with_an_answer_of_rows_is_known_to_have_ended(
    a_database: Database, tmp_path: Path, ending: str
) -> None:
    """The ORM asks for the new ids: INSERT … RETURNING, where the database knows that."""
    with a_world(tmp_path, database=a_database) as world, Session(world.engine) as session:
        world.send("before", session)
        session.add_all([Order(label="before"), Order(label="too")])
        session.flush()
        ENDINGS[ending](session)
        with pytest.raises(OutboxRowLostError):
            session.commit()
        assert world.outcome() == ([], [], set())


@pytest.mark.parametrize("ending", ["text", "text commit", "driver"])
def test_S1_S2_a_second_send_does_not_join_a_transaction_that_has_ended(
    a_database: Database, tmp_path: Path, ending: str
) -> None:
    """It is refused at once: before the commit meets the error, another COMMIT may come between."""
    with a_world(tmp_path, database=a_database) as world, Session(world.engine) as session:
        world.send("before", session)
        add(session, "before")
        ENDINGS[ending](session)
        with pytest.raises(OutboxRowLostError):
            world.send("after", session)
        session.rollback()
        add(session, "again")
        world.send("again", session)
        session.commit()
        world.producer.flush()
        world.make_due()
        sweep(world)
        kept = ["again", "before"] if ending == "text commit" else ["again"]
        assert world.outcome() == (kept, kept, set())


# After a rollback that was asked for, what follows is the transaction; after an error it is a rest.
@pytest.mark.parametrize(
    ("ending", "goes_on"), [("driver", False), ("database", False), ("database", True)]
)
def test_S1_S2_a_send_does_not_begin_an_ended_transaction_anew(
    world: World, ending: str, goes_on: bool
) -> None:
    with Session(world.engine) as session:
        add(session, "before")
        ENDINGS[ending](session)
        if goes_on:
            add(session, "after")
        with pytest.raises(OutboxRowLostError):
            world.send("after", session)
        session.rollback()
        add(session, "again")
        world.send("again", session)
        session.commit()
    assert world.producer.flush()
    assert (world.sent(), world.committed_orders()) == (["again"], {"again"})


def test_S2_no_more_is_sent_in_a_transaction_known_to_have_ended(world: World) -> None:
    with Session(world.engine) as session:
        world.send("a", session)
        text(session, "ROLLBACK", "SELECT 1")
        with pytest.raises(OutboxRowLostError):
            world.send("b", session)


@pytest.mark.parametrize("is_made_before", [True, False])
@pytest.mark.parametrize("back", ["ROLLBACK TO x", "-- back\nrollback transaction to savepoint x"])
def test_S3_savepoints_given_as_text_take_their_messages_with_them(
    world: World, is_made_before: bool, back: str
) -> None:
    with Session(world.engine) as session:
        if not is_made_before:
            add(session, "first")
            world.send("first", session)
        text(session, "SAVEPOINT x")
        add(session, "undone")
        world.send("undone", session)
        or_error(session)
        text(session, back)
        add(session, "last")
        world.send("last", session)
        session.commit()
    assert world.producer.flush()
    expected = {"last"} if is_made_before else {"first", "last"}
    assert world.committed_orders() == expected
    assert (set(world.sent()), world.stored_ids()) == (expected, set())


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


def test_S2_a_failed_commit_leaves_no_transaction_in_the_pool(world: World) -> None:
    """On SQLite its lock would stay, and the connection's next user would commit what it wrote."""

    def fail(_: Any) -> None:
        raise sqlite3.OperationalError("database is locked")

    for label in ("first", "second"):
        with Session(world.engine) as session:
            add(session, label)
            world.send(label, session)
            world.commits.now = fail
            with pytest.raises(sa.exc.OperationalError, match="locked"):
                session.commit()
            world.commits.now = world.commits.real
        with closing(sqlite3.connect(str(world.engine.url.database), timeout=0)) as other:
            other.execute("BEGIN IMMEDIATE")
    assert world.outcome() == ([], [], set())
