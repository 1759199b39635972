"""Errors that the application swallows before it commits, on each database; facts E17 to E24.

What is left of the transaction differs: all but the bad row, nothing, or only what came afterwards.
The messages go with the business rows beside them, whichever are left.
"""

from __future__ import annotations

from contextlib import closing, suppress
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from qmq_client.errors import OutboxMissingError
from tests.client.outbox.interference import Deadlock, locked_row, make_lock_rows
from tests.client.publishing import sweep
from tests.client.world import OUTBOX, Order, World, a_world, add
from tests.services.databases import Database

Outcome = tuple[list[str], list[str], set[str]]
NOTHING: Outcome = ([], [], set())
LATER: Outcome = (["later"], ["later"], set())
TWO_AND_LATER: Outcome = (["before", "later"], ["before", "later"], set())


def text(session: Session, statement: str) -> None:
    session.execute(sa.text(statement))


def swallow(session: Session, statement: str) -> None:
    with pytest.raises(sa.exc.DBAPIError):
        text(session, statement)


def meet_deadlock(world: World, session: Session) -> None:
    """Be the victim of one, and swallow it."""
    with Deadlock(world) as other:
        if world.kind == "postgresql":
            text(session, "SET LOCAL deadlock_timeout = '10ms'")
        text(session, other.first)
        other.close_the_circle()
        swallow(session, other.second)


def test_F6_E17_S2_a_failed_statement_swallowed_before_the_commit(any_world: World) -> None:
    world = any_world
    with Session(world.engine) as session:
        add(world, session, "before")
        swallow(session, "INSERT INTO business_order (id, label) VALUES (1, NULL)")
        if world.kind != "postgresql":  # its COMMIT returns normally and stores nothing
            add(world, session, "later")
        session.commit()
    assert world.outcome() == (NOTHING if world.kind == "postgresql" else TWO_AND_LATER)


def test_E18_S2_a_failed_flush_swallowed_before_the_commit_stores_nothing(any_world: World) -> None:
    world = any_world
    world.change("INSERT INTO business_order (label) VALUES ('there')")
    with Session(world.engine) as session:
        add(world, session, "before")
        session.add(Order(label="there"))
        with pytest.raises(sa.exc.IntegrityError):
            session.flush()
        with pytest.raises(sa.exc.PendingRollbackError):
            session.commit()
    assert world.outcome() == (["there"], [], set())


def test_F6_E19_S1_S2_the_victim_of_a_deadlock_that_continues_stores_what_came_afterwards(
    server_world: World,
) -> None:
    """MySQL undoes everything, begins anew with the next statement, and says nothing."""
    world = server_world
    make_lock_rows(world)
    with Session(world.engine) as session:
        add(world, session, "before")
        meet_deadlock(world, session)
        with suppress(sa.exc.DBAPIError):
            add(world, session, "later")
        session.commit()
    assert world.outcome() == (LATER if world.kind == "mysql" else NOTHING)


def test_F6_E20_S3_a_deadlock_inside_a_savepoint(server_world: World) -> None:
    """PostgreSQL loses the savepoint, MySQL the whole transaction with all its savepoints."""
    world = server_world
    make_lock_rows(world)
    with Session(world.engine) as session:
        add(world, session, "before")
        with suppress(sa.exc.DBAPIError), session.begin_nested():
            add(world, session, "inside")
            meet_deadlock(world, session)
            raise sa.exc.DBAPIError(None, None, Exception())
        if world.kind == "postgresql":
            add(world, session, "later")
            session.commit()
        else:
            add(world, session, "later")
            session.commit()
    assert world.outcome() == (LATER if world.kind == "mysql" else TWO_AND_LATER)


def test_F6_E21_S1_a_lock_that_was_not_got_leaves_the_transaction_whole_on_mysql(
    server_world: World,
) -> None:
    world = server_world
    make_lock_rows(world)
    with Session(world.engine) as session:
        add(world, session, "before")
        with locked_row(world) as statement:
            swallow(session, statement)
        if world.kind != "postgresql":
            add(world, session, "later")
        session.commit()
    assert world.outcome() == (NOTHING if world.kind == "postgresql" else TWO_AND_LATER)


def test_F8_E22_S1_ddl_inside_a_transaction(any_world: World) -> None:
    """On MySQL it commits what came before: business row and message alike."""
    world = any_world
    with Session(world.engine) as session:
        add(world, session, "before")
        text(session, "CREATE TABLE scratch (id INTEGER)")
        if world.kind == "mysql":
            assert (world.committed_orders(), len(world.stored_ids())) == ({"before"}, 1)
        add(world, session, "later")
        session.commit()
    assert world.outcome() == TWO_AND_LATER


@pytest.mark.parametrize("statement", ["COMMIT", "/* done */ commit"])
def test_E5_S1_a_commit_given_as_text_takes_the_messages_along(
    any_world: World, statement: str
) -> None:
    world = any_world
    with Session(world.engine) as session:
        add(world, session, "before")
        text(session, statement)
    assert (world.committed_orders(), len(world.stored_ids())) == ({"before"}, 1)
    world.make_due()
    sweep(world)
    assert world.outcome() == (["before"], ["before"], set())


def test_F8_E23_S1_an_outbox_that_keeps_what_is_rolled_back_or_loses_what_committed_is_refused(
    server_world: World,
) -> None:
    world = server_world
    if world.kind == "mysql":
        planted, remedy = f"DROP INDEX {OUTBOX}_order, ENGINE=MyISAM", "ENGINE=InnoDB"
    else:
        planted, remedy = "SET UNLOGGED", "SET LOGGED"
    world.change(f"ALTER TABLE {OUTBOX} {planted}")
    with (
        Session(world.engine) as session,
        pytest.raises(OutboxMissingError, match=rf"ALTER TABLE \S*{OUTBOX} {remedy}"),
    ):
        world.send("a", session)


def test_E16_S2_an_error_of_the_drivers_own_cursor_swallowed_before_the_commit(
    any_world: World,
) -> None:
    world = any_world
    with Session(world.engine) as session:
        add(world, session, "before")
        cursor = session.connection().connection.cursor()
        with pytest.raises(Exception, match=r"(?i)null"):
            cursor.execute("INSERT INTO business_order (id, label) VALUES (1, NULL)")
        cursor.close()
        if world.kind != "postgresql":
            add(world, session, "later")
        session.commit()
    assert world.outcome() == (NOTHING if world.kind == "postgresql" else TWO_AND_LATER)


def test_E16_S1_S2_a_deadlock_that_only_the_driver_saw_takes_the_message_along(
    mysql_database: Database, tmp_path: Path
) -> None:
    """MySQL's answer says nothing of the end of the transaction."""
    with a_world(tmp_path, database=mysql_database) as world:
        make_lock_rows(world)
        with Session(world.engine) as session:
            add(world, session, "before")
            cursor = session.connection().connection.cursor()
            with Deadlock(world) as other, closing(cursor):
                cursor.execute(other.first)
                other.close_the_circle()
                with pytest.raises(Exception, match="Deadlock"):
                    cursor.execute(other.second)
            session.commit()
        assert world.outcome() == NOTHING
