"""Tables that drifted, and rows that wait: planted on each database that can have them."""

from __future__ import annotations

import os

import pytest
import sqlalchemy as sa
from sqlalchemy.pool import NullPool

from qmq_client.doctor import examine
from qmq_client.outbox.database.dialect import dialect_of
from qmq_client.outbox.table import PARKED, SENT, create_tables
from tests.client.doctor.ward import IMPATIENT, command, finding_of, ids, mend, run
from tests.conftest import MakeDatabase
from tests.services.databases import Database

COLUMNS = "(message_id, subject, record, state, due_at_ms, attempts, last_error, created_at_ms)"

#: Check, kind of database, what is planted. What is found is mended by the statement told.
DRIFT = [
    ("table.engine", "mysql", "ALTER TABLE qmq_order_lock ENGINE=MyISAM"),
    ("table.engine", "mysql", "ALTER TABLE qmq_inbox ENGINE=MyISAM"),
    ("table.unlogged", "postgresql", "ALTER TABLE qmq_outbox SET UNLOGGED"),
    ("table.unlogged", "postgresql", "ALTER TABLE qmq_inbox SET UNLOGGED"),
    ("column.type", "mysql", "ALTER TABLE qmq_outbox MODIFY COLUMN record BLOB NOT NULL"),
    (
        "column.type",
        "postgresql",
        'ALTER TABLE qmq_outbox ALTER COLUMN subject TYPE VARCHAR(30) COLLATE "C"',
    ),
    (
        "column.collation",
        "mysql",
        "ALTER TABLE qmq_inbox MODIFY COLUMN consumer_group VARCHAR(127) "
        "COLLATE utf8mb4_general_ci NOT NULL",
    ),
    (
        "column.collation",
        "postgresql",
        'ALTER TABLE qmq_outbox ALTER COLUMN subject TYPE VARCHAR(127) COLLATE "default"',
    ),
    ("index.missing", "mysql", "DROP INDEX qmq_outbox_state_due ON qmq_outbox"),
    ("index.missing", "postgresql", "DROP INDEX qmq_outbox_state_due"),
    ("index.missing", "sqlite", "DROP INDEX qmq_inbox_received"),
    ("table.key", "mysql", "ALTER TABLE qmq_outbox DROP INDEX message_id"),
    (
        "table.key",
        "postgresql",
        "ALTER TABLE qmq_outbox DROP CONSTRAINT qmq_outbox_message_id_key",
    ),
]


def shop_of(database: Database) -> sa.Engine:
    engine = database.engine(poolclass=NullPool)
    create_tables(engine)
    if database.kind == "sqlite":
        run(engine, "PRAGMA journal_mode = WAL")
    return engine


@pytest.fixture
def shop(a_database: Database) -> sa.Engine:
    return shop_of(a_database)


def put_row(engine: sa.Engine, *, state: int, due_s: float, error: str | None) -> None:
    """A row created a minute ago."""
    values = {
        "message_id": os.urandom(16),
        "state": state,
        "error": error,
        "due_ms": round(due_s * 1000),
    }
    now_ms = dialect_of(engine).now_ms
    text = (
        f"INSERT INTO qmq_outbox {COLUMNS} VALUES (:message_id, 'orders', :message_id, :state, "
        f"{now_ms} + :due_ms, 9, :error, {now_ms} - 60000)"
    )
    with engine.begin() as connection:
        connection.execute(sa.text(text), values)


def test_X1_a_sound_database_of_each_kind_has_no_findings(shop: sa.Engine) -> None:
    assert ids(examine(shop)) == []


@pytest.mark.parametrize(("id_", "kind", "planted"), DRIFT, ids=lambda value: str(value)[:40])
def test_X1_a_drifted_table_is_found_and_gone_after_its_fix(
    make_database: MakeDatabase, id_: str, kind: str, planted: str
) -> None:
    engine = shop_of(make_database(kind))
    run(engine, planted)
    mend(engine, id_)
    assert ids(examine(engine)) == []


def test_X1_missing_tables_are_found_and_gone_after_a_migration(a_database: Database) -> None:
    engine = a_database.engine(poolclass=NullPool)
    if a_database.kind == "sqlite":
        run(engine, "PRAGMA journal_mode = WAL")
    findings = examine(engine)
    assert set(ids(findings)) == {"schema.missing"}
    assert {finding.fix for finding in findings} == {"qmq db migrate"}
    command(engine, "qmq db migrate")
    assert ids(examine(engine)) == []


def test_X1_parked_rows_are_found_by_their_reasons_and_gone_when_retried(
    a_database: Database,
) -> None:
    engine = shop_of(a_database)
    for error in ("too large", "too large", "no such subject", None):
        put_row(engine, state=1, due_s=60, error=error)
    finding = finding_of(engine, "rows.parked")
    assert finding is not None
    assert finding.read.startswith("2 of orders (too large); ")
    assert "1 of orders (no such subject)" in finding.read
    assert "1 of orders (no error recorded)" in finding.read
    command(engine, finding.fix)
    assert finding_of(engine, "rows.parked") is None


def test_X1_rows_that_nobody_takes_are_found(shop: sa.Engine) -> None:
    for _ in range(3):
        put_row(shop, state=0, due_s=-60, error=None)
    finding = finding_of(shop, "rows.overdue")
    assert finding is not None
    assert finding.read.startswith("3 rows, the first due 6")
    assert finding.fix == "qmq watchdog run"
    run(shop, "DELETE FROM qmq_outbox")
    assert ids(examine(shop)) == []


@pytest.mark.parametrize("state", [PARKED, SENT])
def test_X1_a_row_that_nobody_shall_send_is_not_overdue(shop: sa.Engine, state: int) -> None:
    """A parked one waits for a person, one that is kept for an audit."""
    put_row(shop, state=state, due_s=-60, error=None)
    assert finding_of(shop, "rows.overdue") is None
    assert finding_of(shop, "rows.unsent", thresholds=IMPATIENT) is None


def test_X1_a_row_that_is_not_accepted_for_long_is_found_with_its_reason(shop: sa.Engine) -> None:
    put_row(shop, state=0, due_s=60, error="503 from http://u:secret@broker/ too busy")
    assert finding_of(shop, "rows.unsent") is None
    finding = finding_of(shop, "rows.unsent", thresholds=IMPATIENT)
    assert finding is not None
    assert "after 9 attempts: 503" in finding.read
    assert "secret" not in finding.read
    assert finding.fix == "qmq outbox list"
