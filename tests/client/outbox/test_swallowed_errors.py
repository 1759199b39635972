"""Errors that the application swallows before it commits, on each database; facts E17 to E24.

What is left of the transaction differs: all but the bad row, nothing, or only what came afterwards.
Either everything that was sent is stored with the rest, or the commit raises and nothing is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from qmq_client.errors import OutboxMissingError, OutboxRowLostError
from tests.client.outbox.interference import Deadlock, locked_row, make_lock_rows
from tests.client.publishing import sweep
from tests.client.world import OUTBOX, Order, World, a_world, add
from tests.services.databases import Database

Outcome = tuple[list[str], list[str], set[str]]
NOTHING: Outcome = ([], [], set())
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


class ApplicationError(Exception):
    """What a listener makes of an error of the database."""


@contextmanager
def listener_of_all_errors() -> Iterator[None]:
    """On the class of all engines, so it is asked before those of one engine."""

    def translate(_: sa.engine.ExceptionContext) -> None:
        raise ApplicationError

    sa.event.listen(sa.Engine, "handle_error", translate)
    try:
        yield
    finally:
        sa.event.remove(sa.Engine, "handle_error", translate)


def send_and_commit(world: World, session: Session) -> None:
    world.send("later", session)
    session.commit()


def test_F6_E17_S2_a_failed_statement_swallowed_before_the_commit(any_world: World) -> None:
    world = any_world
    with Session(world.engine) as session:
        add(world, session, "before")
        swallow(session, "INSERT INTO business_order (id, label) VALUES (1, NULL)")
        if world.kind == "postgresql":  # its COMMIT would return normally and store nothing
            with pytest.raises(OutboxRowLostError):
                session.commit()
        else:
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


def test_F6_E19_S1_S2_the_victim_of_a_deadlock_that_goes_on_stores_and_sends_nothing(
    server_world: World,
) -> None:
    """MySQL undoes everything, begins anew with the next statement, and says nothing."""
    world = server_world
    make_lock_rows(world)
    with Session(world.engine) as session:
        add(world, session, "before")
        meet_deadlock(world, session)
        with suppress(sa.exc.DBAPIError, OutboxRowLostError):
            session.execute(sa.insert(Order).values(label="later"))
        with pytest.raises(OutboxRowLostError):
            session.commit()
    assert world.outcome() == NOTHING


def test_F6_E19_S1_a_listener_that_raises_an_error_of_its_own_hides_no_deadlock(
    server_world: World,
) -> None:
    """SQLAlchemy then asks no further listener."""
    world = server_world
    make_lock_rows(world)
    with Session(world.engine) as session, Deadlock(world) as other:
        add(world, session, "before")
        if world.kind == "postgresql":
            text(session, "SET LOCAL deadlock_timeout = '10ms'")
        text(session, other.first)
        other.close_the_circle()
        with listener_of_all_errors(), pytest.raises(ApplicationError):
            text(session, other.second)
        with suppress(sa.exc.DBAPIError, OutboxRowLostError):
            session.execute(sa.insert(Order).values(label="later"))
        with pytest.raises(OutboxRowLostError):
            session.commit()
    assert world.outcome() == NOTHING


def test_F6_E19_S1_a_send_after_a_deadlock_that_was_swallowed_is_refused(
    server_world: World,
) -> None:
    world = server_world
    make_lock_rows(world)
    with Session(world.engine) as session:
        session.execute(sa.insert(Order).values(label="before"))
        meet_deadlock(world, session)
        with pytest.raises(OutboxRowLostError):
            send_and_commit(world, session)
        session.rollback()
        add(world, session, "again")
        session.commit()
    assert world.outcome() == (["again"], ["again"], set())


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
            with suppress(OutboxRowLostError):
                add(world, session, "later")
            with pytest.raises((OutboxRowLostError, sa.exc.InvalidRequestError)):
                session.commit()
    assert world.outcome() == (NOTHING if world.kind == "mysql" else TWO_AND_LATER)


def test_F6_E21_S1_a_lock_that_was_not_got_leaves_the_transaction_whole_on_mysql(
    server_world: World,
) -> None:
    world = server_world
    make_lock_rows(world)
    with Session(world.engine) as session:
        add(world, session, "before")
        with locked_row(world) as statement:
            swallow(session, statement)
        if world.kind == "postgresql":
            with pytest.raises(OutboxRowLostError):
                session.commit()
        else:
            add(world, session, "later")
            session.commit()
    assert world.outcome() == (NOTHING if world.kind == "postgresql" else TWO_AND_LATER)


def test_F8_E22_S1_ddl_inside_a_transaction(any_world: World) -> None:
    """On MySQL it commits what came before: business row and message alike, and that is told."""
    world = any_world
    with Session(world.engine) as session:
        add(world, session, "before")
        text(session, "CREATE TABLE scratch (id INTEGER)")
        if world.kind == "mysql":
            with pytest.raises(OutboxRowLostError):
                add(world, session, "later")
            with pytest.raises(OutboxRowLostError):
                session.commit()
        else:
            add(world, session, "later")
            session.commit()
    if world.kind == "mysql":
        assert (world.committed_orders(), len(world.stored_ids())) == ({"before"}, 1)
        world.make_due()
        assert len(sweep(world).sent) == 1
        assert world.outcome() == (["before"], ["before"], set())
    else:
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
    with pytest.raises(OutboxMissingError, match=f"ALTER TABLE {OUTBOX} {remedy}"):
        world.make_producer()


@pytest.mark.parametrize("ending", ["ROLLBACK", "driver"])
def test_E5_S2_a_rollback_behind_the_back_sends_nothing(any_world: World, ending: str) -> None:
    world = any_world
    with Session(world.engine) as session:
        add(world, session, "before")
        if ending == "driver":
            session.connection().connection.rollback()
        else:
            text(session, ending)
        with suppress(OutboxRowLostError):
            add(world, session, "later")
        with pytest.raises(OutboxRowLostError):
            session.commit()
    assert world.outcome()[1:] == ([], set())


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
        if world.kind == "postgresql":
            with pytest.raises(OutboxRowLostError):
                session.commit()
        else:
            add(world, session, "later")
            session.commit()
    assert world.outcome() == (NOTHING if world.kind == "postgresql" else TWO_AND_LATER)


def test_E16_S1_S2_strict_mode_finds_a_deadlock_that_only_the_driver_saw(
    mysql_database: Database, tmp_path: Path
) -> None:
    """MySQL's answer says nothing of the end of the transaction; only a look at the row does."""
    with a_world(tmp_path, database=mysql_database, strict=True) as world:
        make_lock_rows(world)
        with Session(world.engine) as session:
            add(world, session, "before")
            cursor = session.connection().connection.cursor()
            with Deadlock(world) as other, closing(cursor):
                cursor.execute(other.first)
                other.close_the_circle()
                with pytest.raises(Exception, match="Deadlock"):
                    cursor.execute(other.second)
            with pytest.raises(OutboxRowLostError):
                session.commit()
        assert world.outcome() == NOTHING
