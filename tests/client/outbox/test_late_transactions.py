"""F17: a transaction older than the takeover commits; F18: ids that commit late, or never."""

from __future__ import annotations

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from tests.client.publishing import sweep
from tests.client.world import OUTBOX, World, add

#: A statement of which nobody knows what it does to the transaction, so rows are written before it.
UNKNOWN = {
    "sqlite": "ANALYZE",
    "mysql": "SET @early = 1",
    "postgresql": "SET application_name = 'early'",
}


def write_rows(world: World, session: Session) -> None:
    """Let the rows be written long before the commit."""
    session.execute(sa.text(UNKNOWN[world.kind]))


def test_F17_O5_a_transaction_older_than_the_takeover_is_stored_once(any_world: World) -> None:
    """Its row is due already when it commits: whoever claims it first sends it, the other does not."""
    world = any_world
    for label in ("publisher first", "watchdog first"):
        with Session(world.engine) as session:
            add(world, session, label)
            write_rows(world, session)
            world.clock.advance(60_000)
            session.commit()
        world.make_due()
        if label == "watchdog first":
            assert len(sweep(world).sent) == 1
        assert world.producer.flush()
        assert sweep(world).sent == ()
    assert world.outcome() == (
        ["publisher first", "watchdog first"],
        ["publisher first", "watchdog first"],
        set(),
    )
    assert world.producer.stats.sent == 1


def test_F18_W9_a_lower_id_that_commits_late_is_found(server_world: World) -> None:
    world = server_world
    with Session(world.engine) as late, Session(world.engine) as gone:
        add(world, late, "late")
        write_rows(world, late)
        add(world, gone, "gone")
        write_rows(world, gone)
        with Session(world.engine) as early, early.begin():
            add(world, early, "early")
        gone.rollback()
        ((newest,),) = world.read(f"SELECT max(id) FROM {OUTBOX}")
        world.change(f"UPDATE {OUTBOX} SET due_at_ms = 0 WHERE id = ?", newest)
        assert len(sweep(world).sent) == 1
        late.commit()
    world.make_due()
    assert len(sweep(world).sent) == 1
    assert world.outcome() == (["early", "late"], ["early", "late"], set())


def test_F18_O3_an_id_that_is_used_again_deletes_no_other_message(world: World) -> None:
    """SQLite numbers rows anew when the last ones are gone; settlements name the message."""
    with Session(world.engine) as session, session.begin():
        add(world, session, "a")
    rows = world.store.claim(token=b"w" * 16, limit=10, lease_ms=5_000)
    if not rows:
        world.make_due()
        rows = world.store.claim(token=b"w" * 16, limit=10, lease_ms=5_000)
    world.change(f"DELETE FROM {OUTBOX}")
    with Session(world.engine) as session, session.begin():
        add(world, session, "b")
    assert world.store.delete_sent([rows[0].message_id], token=b"w" * 16) == 0
    assert len(world.stored_ids()) == 1
    assert world.producer.flush()
    assert "b" in world.sent()


@pytest.mark.parametrize("is_swept", [False, True])
def test_F7_S4_a_rolled_back_row_leaves_a_gap_and_nothing_else(
    any_world: World, is_swept: bool
) -> None:
    world = any_world
    for label, is_wanted in (("a", True), ("b", False), ("c", True)):
        with Session(world.engine) as session:
            add(world, session, label)
            write_rows(world, session)
            session.commit() if is_wanted else session.rollback()
    if is_swept:
        world.make_due()
        sweep(world)
    assert world.outcome() == (["a", "c"], ["a", "c"], set())


def test_S4_what_was_sent_before_a_savepoint_and_written_inside_is_written_again(
    any_world: World,
) -> None:
    world = any_world
    with Session(world.engine) as session:
        add(world, session, "before")
        savepoint = session.begin_nested()
        write_rows(world, session)
        savepoint.rollback()
        session.commit()
    assert world.outcome() == (["before"], ["before"], set())


def test_S4_a_savepoint_older_than_the_first_message_takes_it_along(any_world: World) -> None:
    world = any_world
    with Session(world.engine) as session:
        savepoint = session.begin_nested()
        add(world, session, "inside")
        savepoint.rollback()
        add(world, session, "after")
        session.commit()
    assert world.outcome() == (["after"], ["after"], set())
