"""Rows that the database keeps when they are to be deleted: their messages are sent once all the same."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from qmq_client.errors import OutboxRowLostError
from qmq_client.message import Message
from qmq_client.outbox.committed.settling import UNDELETED
from qmq_client.outbox.row import RowFilter
from qmq_client.outbox.table import DEFAULT_TABLES, SENT
from qmq_watchdog.databases import Database as Watched
from qmq_watchdog.sweep import Sweep
from qmq_watchdog.sweep_job import maintain
from tests.client.publishing import send_each
from tests.client.world import SUBJECT, World, a_world
from tests.conftest import MakeDatabase
from tests.watchdog.rows import put_rows

OUTBOX = DEFAULT_TABLES.outbox
KEPT = "orders.kept"


@dataclass(frozen=True, slots=True)
class Veto:
    """How somebody keeps rows of the subject `KEPT` in the table, and what ends that."""

    kind: str
    name: str
    plant: tuple[str, ...]
    remove: tuple[str, ...]
    #: What the row says of it.
    reason: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


def _postgresql_trigger(name: str, does: str, reason: str, *, kind: str = "BEFORE") -> Veto:
    function = f"CREATE FUNCTION veto() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN {does}; END$$"
    timing = {
        "BEFORE": "CREATE TRIGGER veto BEFORE DELETE ON qmq_outbox",
        "DEFERRED": "CREATE CONSTRAINT TRIGGER veto AFTER DELETE ON qmq_outbox "
        "DEFERRABLE INITIALLY DEFERRED",
    }
    trigger = f"{timing[kind]} FOR EACH ROW WHEN (OLD.subject = '{KEPT}') EXECUTE FUNCTION veto()"
    return Veto(
        "postgresql", name, (function, trigger), ("DROP TRIGGER veto ON qmq_outbox",), reason
    )


VETOES = [
    Veto(
        "sqlite",
        "raises",
        (
            "CREATE TRIGGER veto BEFORE DELETE ON qmq_outbox "
            f"WHEN OLD.subject = '{KEPT}' BEGIN SELECT RAISE(ABORT, 'not this one'); END",
        ),
        ("DROP TRIGGER veto",),
        "not this one",
    ),
    Veto(
        "sqlite",
        "says nothing",
        (
            "CREATE TRIGGER veto BEFORE DELETE ON qmq_outbox "
            f"WHEN OLD.subject = '{KEPT}' BEGIN SELECT RAISE(IGNORE); END",
        ),
        ("DROP TRIGGER veto",),
        "no error; a trigger",
    ),
    Veto(
        "mysql",
        "raises",
        (
            "CREATE TRIGGER veto BEFORE DELETE ON qmq_outbox FOR EACH ROW "
            f"IF OLD.subject = '{KEPT}' THEN "
            "SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'not this one'; END IF",
        ),
        ("DROP TRIGGER veto",),
        "not this one",
    ),
    Veto(
        "mysql",
        "raises an error of its own",
        (
            "CREATE TRIGGER veto BEFORE DELETE ON qmq_outbox FOR EACH ROW "
            f"IF OLD.subject = '{KEPT}' THEN "
            "SIGNAL SQLSTATE '45017' SET MESSAGE_TEXT = 'not this one', MYSQL_ERRNO = 31017; END IF",
        ),
        ("DROP TRIGGER veto",),
        "not this one",
    ),
    Veto(
        "mysql",
        "breaks a check",
        (
            "CREATE TABLE veto (subject VARCHAR(127), CONSTRAINT not_these CHECK (subject = ''))",
            "CREATE TRIGGER veto BEFORE DELETE ON qmq_outbox FOR EACH ROW "
            f"IF OLD.subject = '{KEPT}' THEN INSERT INTO veto VALUES (OLD.subject); END IF",
        ),
        ("DROP TRIGGER veto",),
        "not_these",
    ),
    Veto(
        "mysql",
        "has no room for the value",
        (
            "CREATE TRIGGER veto BEFORE DELETE ON qmq_outbox FOR EACH ROW "
            f"IF OLD.subject = '{KEPT}' THEN SET @veto = -1 + CAST(0 AS UNSIGNED); END IF",
        ),
        ("DROP TRIGGER veto",),
        "out of range",
    ),
    Veto(
        "mysql",
        "is broken",
        (
            "CREATE TRIGGER veto BEFORE DELETE ON qmq_outbox FOR EACH ROW "
            f"IF OLD.subject = '{KEPT}' THEN INSERT INTO audit_log VALUES (1); END IF",
        ),
        ("DROP TRIGGER veto",),
        "audit_log",
    ),
    Veto(
        "mysql",
        "refers to it",
        (
            "CREATE TABLE veto (message_id BINARY(16), "
            "FOREIGN KEY (message_id) REFERENCES qmq_outbox (message_id))",
            f"INSERT INTO veto SELECT message_id FROM qmq_outbox WHERE subject = '{KEPT}'",
        ),
        ("DROP TABLE veto",),
        "foreign key",
    ),
    _postgresql_trigger("raises", "RAISE EXCEPTION 'not this one'", "not this one"),
    _postgresql_trigger("says nothing", "RETURN NULL", "no error; a trigger"),
    _postgresql_trigger("is broken", "INSERT INTO audit_log VALUES (1)", "audit_log"),
    _postgresql_trigger(
        "raises at the commit", "RAISE EXCEPTION 'not this one'", "not this one", kind="DEFERRED"
    ),
    Veto(
        "postgresql",
        "is a rule",
        (
            "CREATE RULE veto AS ON DELETE TO qmq_outbox "
            f"WHERE OLD.subject = '{KEPT}' DO INSTEAD NOTHING",
        ),
        ("DROP RULE veto ON qmq_outbox",),
        "no error; a trigger",
    ),
    Veto(
        "postgresql",
        "refers to it",
        (
            "CREATE TABLE veto (message_id BYTEA REFERENCES qmq_outbox (message_id))",
            f"INSERT INTO veto SELECT message_id FROM qmq_outbox WHERE subject = '{KEPT}'",
        ),
        ("DROP TABLE veto",),
        "foreign key",
    ),
]


@pytest.fixture(params=VETOES, ids=str)
def veto(request: pytest.FixtureRequest) -> Veto:
    chosen: Veto = request.param
    return chosen


@pytest.fixture
def vetoed(veto: Veto, tmp_path: Path, make_database: MakeDatabase) -> Iterator[World]:
    with a_world(tmp_path, database=make_database(veto.kind)) as world:
        yield world


def run(world: World, statements: tuple[str, ...]) -> None:
    with world.engine.begin() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)


def watched(world: World) -> Watched:
    return Watched(name="shop", store=world.store, engine=world.sync_engine)


def states(world: World) -> dict[str, tuple[int, str | None, bytes | None]]:
    rows = world.read("SELECT message_id, state, last_error, token FROM qmq_outbox")
    return {bytes(row[0]).hex(): (row[1], row[2], row[3]) for row in rows}


def bodies(world: World) -> list[Any]:
    return sorted(
        message.body for subject in (SUBJECT, KEPT) for message in world.broker.messages(subject)
    )


def test_O2_O5_a_message_whose_row_cannot_be_deleted_is_sent_once_and_its_neighbours_go(
    veto: Veto, vetoed: World, caplog: pytest.LogCaptureFixture
) -> None:
    world = vetoed
    messages = [Message(KEPT if i == 3 else SUBJECT, f"{i}") for i in range(7)]
    ids = world.producer.send_now_many(messages)
    run(world, veto.plant)
    with caplog.at_level(logging.ERROR):
        assert world.producer.flush()
    ((state, error, token),) = states(world).values()
    assert world.stored_ids() == {ids[3]}
    assert (state, token) == (SENT, None)
    assert error is not None
    assert error.startswith(f"{UNDELETED}: ")
    assert veto.reason in error
    assert veto.reason in caplog.text
    assert (world.producer.stats.database_errors, world.producer.stats.undeleted) == (0, 1)
    assert Sweep(watched(world), world.memory).step().claimed == 0
    assert bodies(world) == [f"{i}" for i in range(7)]
    run(world, veto.remove)
    world.make_due()
    assert world.store.purge_sent() == 1
    assert world.stored_ids() == set()


def test_O2_O5_a_sweep_sends_such_a_row_once_and_settles_the_others_of_its_batch(
    veto: Veto, vetoed: World
) -> None:
    world = vetoed
    # More than are deleted in one piece, and the bad one in the middle.
    ids = world.producer.send_now_many(
        [Message(KEPT if i == 70 else SUBJECT, f"{i}") for i in range(130)]
    )
    run(world, veto.plant)
    world.make_due()
    sweep = Sweep(watched(world), world.memory)
    counts = sweep.step()
    assert (counts.sent, counts.error, counts.lost) == (130, None, 0)
    assert {id_: row[0] for id_, row in states(world).items()} == {ids[70]: SENT}
    assert sweep.step().claimed == 0
    assert bodies(world) == sorted(f"{i}" for i in range(130))


def test_O6_a_row_that_stays_keeps_no_other_from_being_purged(veto: Veto, vetoed: World) -> None:
    world, database = vetoed, watched(vetoed)
    ids = put_rows(database, 30)
    run(world, (f"UPDATE qmq_outbox SET state = {SENT}, token = NULL",))
    with world.engine.begin() as connection:
        chosen = sa.update(OUTBOX).where(OUTBOX.c.message_id == ids[7])
        connection.execute(chosen.values(subject=KEPT))
    run(world, veto.plant)
    for _ in range(2):
        maintain(database)
    (row,) = world.store.list_rows(RowFilter())
    assert row.message_id == ids[7]
    assert row.due_at_ms - row.created_at_ms > 3_000_000, "not looked at for an hour"
    world.make_due()
    assert world.store.purge_sent() == 1
    assert world.store.undeleted == 1, "counted once, however often it is tried"


def test_O2_O5_a_trigger_that_cannot_even_be_read_makes_nothing_be_sent_twice(
    tmp_path: Path,
) -> None:
    """SQLite looks into every trigger before it deletes the first row."""
    with a_world(tmp_path) as world:
        run(
            world,
            (
                "CREATE TRIGGER veto BEFORE DELETE ON qmq_outbox "
                f"WHEN OLD.subject = '{KEPT}' BEGIN INSERT INTO audit_log VALUES (1); END",
            ),
        )
        ids = send_each(world, 9)
        assert world.producer.flush()
        assert {id_: row[0] for id_, row in states(world).items()} == dict.fromkeys(ids, SENT)
        assert all("audit_log" in str(row[1]) for row in states(world).values())
        assert Sweep(watched(world), world.memory).step().claimed == 0
        run(world, ("DROP TRIGGER veto",))
        world.make_due()
        assert maintain(watched(world)).sent_purged == 9


@pytest.mark.parametrize("is_alone", [True, False], ids=["alone", "beside others"])
@pytest.mark.parametrize(
    ("kind", "planted"),
    [
        (
            "sqlite",
            (
                "CREATE TRIGGER skip BEFORE INSERT ON qmq_outbox "
                f"WHEN NEW.subject = '{KEPT}' BEGIN SELECT RAISE(IGNORE); END",
            ),
        ),
        (
            "postgresql",
            (
                "CREATE FUNCTION skip() RETURNS trigger LANGUAGE plpgsql AS "
                "$$BEGIN RETURN NULL; END$$",
                "CREATE TRIGGER skip BEFORE INSERT ON qmq_outbox FOR EACH ROW "
                f"WHEN (NEW.subject = '{KEPT}') EXECUTE FUNCTION skip()",
            ),
        ),
        (
            "postgresql",
            (
                "CREATE RULE skip AS ON INSERT TO qmq_outbox "
                f"WHERE NEW.subject = '{KEPT}' DO INSTEAD NOTHING",
            ),
        ),
    ],
    ids=["sqlite trigger", "postgresql trigger", "postgresql rule"],
)
def test_S1_S2_a_row_that_the_database_left_out_is_reported_at_the_send(
    kind: str,
    planted: tuple[str, ...],
    is_alone: bool,
    tmp_path: Path,
    make_database: MakeDatabase,
) -> None:
    with a_world(tmp_path, database=make_database(kind)) as world:
        run(world, planted)
        lost = Message(KEPT, "left out", message_id="ab" * 16)
        with sa.orm.Session(world.engine) as session:
            if not is_alone:
                world.send("stored", session)
            with pytest.raises(OutboxRowLostError, match="ab" * 16):
                world.producer.send(lost, session=session)
        assert world.outcome() == ([], [], set())
        send_each(world, 1)
        assert world.outcome() == ([], ["0"], set())
