"""Every fault that can be planted in a table is reported with the statement that mends it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import sqlalchemy as sa

from qmq_client.doctor.drift import Drift, find_drift
from qmq_client.outbox.table import DEFAULT_TABLES, create_tables
from qmq_migrations.upgrade import downgrade, migrate
from tests.conftest import MakeDatabase
from tests.services.databases import Database


@dataclass(frozen=True, kw_only=True)
class Plant:
    """One fault: how to make it, and what must be said."""

    kind: str
    do: str
    fault: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.do}"


ALTER = "ALTER TABLE qmq_outbox"
PLANTED = [
    Plant(kind=kind, do=do, fault=fault)
    for kind, do, fault in [
        ("mysql", f"{ALTER} DROP COLUMN last_error", "outbox.last_error is missing"),
        ("mysql", "DROP TABLE qmq_inbox", "table qmq_inbox is missing"),
        (
            "mysql",
            f"{ALTER} MODIFY record MEDIUMBLOB NOT NULL",
            "is MEDIUMBLOB, and LONGBLOB is needed",
        ),
        (
            "mysql",
            f"{ALTER} MODIFY record TEXT NOT NULL",
            "record is TEXT, and LONGBLOB is needed",
        ),
        (
            "mysql",
            f"{ALTER} MODIFY message_id BINARY(20) NOT NULL",
            "is BINARY(20), and BINARY(16) is",
        ),
        (
            "mysql",
            f"{ALTER} MODIFY due_at_ms INT NOT NULL",
            "due_at_ms is INTEGER(11), and BIGINT is",
        ),
        ("mysql", f"{ALTER} MODIFY token BINARY(16) NOT NULL", "token may not be NULL"),
        ("mysql", f"{ALTER} MODIFY attempts INT NULL", "attempts may be NULL"),
        ("mysql", f"{ALTER} MODIFY id BIGINT NOT NULL", "id is not numbered automatically"),
        (
            "mysql",
            f"{ALTER} MODIFY subject VARCHAR(127) COLLATE utf8mb4_general_ci NOT NULL",
            "collation utf8mb4_general_ci, which is not exact",
        ),
        (
            "mysql",
            f"{ALTER} MODIFY ordering_key VARCHAR(255) COLLATE latin1_bin NULL",
            "collation latin1_bin",
        ),
        (
            "mysql",
            f"{ALTER} MODIFY ordering_key VARCHAR(64) COLLATE utf8mb4_bin NULL",
            "is VARCHAR(64) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin, and VARCHAR(255)",
        ),
        ("mysql", "ALTER TABLE qmq_inbox ENGINE=MyISAM", "is of engine MyISAM"),
        ("mysql", f"{ALTER} DROP INDEX qmq_outbox_state_due", "no index on (state, due_at_ms)"),
        ("mysql", f"{ALTER} DROP INDEX message_id", "the same message_id twice"),
        (
            "mysql",
            "ALTER TABLE qmq_inbox DROP PRIMARY KEY",
            "has the primary key (), not (consumer",
        ),
        (
            "mysql",
            f"{ALTER} ADD COLUMN extra INT NOT NULL",
            "extra does not belong to QMQ and has no default",
        ),
        ("mysql", "UPDATE qmq_version SET version_num = 'qmq9999'", "at revision qmq9999, not at"),
        ("mysql", "DROP TABLE qmq_order_lock", "table qmq_order_lock is missing"),
        ("postgresql", f"{ALTER} DROP COLUMN last_error", "outbox.last_error is missing"),
        ("mysql", "DROP TABLE qmq_outbox", "table qmq_outbox is missing"),
        ("postgresql", "DROP TABLE qmq_inbox", "table qmq_inbox is missing"),
        ("postgresql", f"{ALTER} SET UNLOGGED", "qmq_outbox is UNLOGGED"),
        ("postgresql", f"{ALTER} ALTER due_at_ms TYPE int", "is INTEGER, and BIGINT is needed"),
        ("postgresql", f"{ALTER} ALTER token SET NOT NULL", "token may not be NULL"),
        ("postgresql", f"{ALTER} ALTER attempts DROP NOT NULL", "attempts may be NULL"),
        ("postgresql", f"{ALTER} ALTER id DROP DEFAULT", "id is not numbered automatically"),
        (
            "postgresql",
            f"{ALTER} ALTER record TYPE text",
            "record is TEXT, and BYTEA is needed",
        ),
        (
            "postgresql",
            f'{ALTER} ALTER subject TYPE varchar(127) COLLATE "default"',
            "default, whose order an upgrade",
        ),
        (
            "postgresql",
            f'{ALTER} ALTER subject TYPE char(127) COLLATE "C"',
            'is CHAR(127) COLLATE "C", and',
        ),
        ("postgresql", "DROP INDEX qmq_outbox_state_due", "no index on (state, due_at_ms)"),
        ("postgresql", "DROP INDEX qmq_outbox_order", "no index on (ordering_key, id)"),
        (
            "postgresql",
            f"{ALTER} DROP CONSTRAINT qmq_outbox_message_id_key",
            "same message_id twice",
        ),
        (
            "postgresql",
            "ALTER TABLE qmq_inbox DROP CONSTRAINT qmq_inbox_pkey",
            "has the primary key (), not (consumer",
        ),
        (
            "postgresql",
            f"{ALTER} ADD COLUMN extra int NOT NULL",
            "does not belong to QMQ and has no default",
        ),
        (
            "postgresql",
            "UPDATE pg_index SET indisvalid = false "
            "WHERE indexrelid = 'qmq_outbox_state_due'::regclass",
            "qmq_outbox_state_due was never finished",
        ),
        ("sqlite", f"{ALTER} DROP COLUMN last_error", "outbox.last_error is missing"),
        ("sqlite", "DROP TABLE qmq_inbox", "table qmq_inbox is missing"),
        ("sqlite", "DROP INDEX qmq_outbox_state_due", "no index on (state, due_at_ms)"),
        ("sqlite", "DROP INDEX qmq_outbox_order", "no index on (ordering_key, id)"),
    ]
]


def drift_of(engine: sa.Engine) -> list[Drift]:
    with engine.connect() as connection:
        return find_drift(connection, DEFAULT_TABLES)


def faults(database: Database) -> list[str]:
    return [str(drift) for drift in drift_of(database.engine())]


def execute(where: Database | sa.Engine, *statements: str) -> None:
    engine = where if isinstance(where, sa.Engine) else where.engine()
    with engine.begin() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)


@pytest.mark.parametrize("plant", PLANTED, ids=str)
def test_a_planted_fault_is_found_and_its_remedy_mends_it(
    make_database: MakeDatabase, plant: Plant
) -> None:
    engine = make_database(plant.kind).engine()
    migrate(engine)
    assert drift_of(engine) == []
    execute(engine, plant.do)
    found = drift_of(engine)
    assert len(found) == 1, found
    assert plant.fault in found[0].fault
    if found[0].remedy.startswith(("ALTER", "CREATE", "REINDEX")):
        execute(engine, *found[0].remedy.split("; "))
        # What was dropped with a table is named next.
        while left := drift_of(engine):
            execute(engine, left[0].remedy)


def test_columns_without_a_type_are_named(sqlite_database: Database) -> None:
    migrate(sqlite_database.engine())
    names = [column.name for column in DEFAULT_TABLES.inbox.columns]
    execute(sqlite_database, "DROP TABLE qmq_inbox", f"CREATE TABLE qmq_inbox ({', '.join(names)})")
    assert any("is NULL, and" in fault for fault in faults(sqlite_database))


def test_more_room_and_more_columns_and_indexes_are_no_fault(a_server_database: Database) -> None:
    migrate(a_server_database.engine())
    change = {
        "mysql": f"{ALTER} MODIFY state INT NOT NULL, MODIFY last_error LONGTEXT, "
        "MODIFY subject VARCHAR(200) COLLATE utf8mb4_bin NOT NULL",
        "postgresql": f'{ALTER} ALTER state TYPE int, ALTER subject TYPE text COLLATE "C"',
    }
    execute(
        a_server_database,
        change[a_server_database.kind],
        f"{ALTER} ADD COLUMN note VARCHAR(20)",
        "CREATE INDEX their_own ON qmq_outbox (created_at_ms)",
    )
    assert faults(a_server_database) == []


def test_a_column_that_sqlite_cannot_change_is_named(sqlite_database: Database) -> None:
    create_tables(sqlite_database.engine())
    execute(
        sqlite_database,
        "DROP TABLE qmq_order_lock",
        "CREATE TABLE qmq_order_lock (slot TEXT PRIMARY KEY)",
    )
    texts = faults(sqlite_database)
    assert any("slot is TEXT, and INTEGER is needed" in text for text in texts)
    assert any("SQLite cannot change a column" in text for text in texts)


@pytest.mark.parametrize("collation", ["NOCASE", "RTRIM"])
def test_a_group_that_sqlite_merges_with_another_is_named(
    sqlite_database: Database, collation: str
) -> None:
    """Messages of the group `A` would be skipped because the group `a` had them."""
    create_tables(sqlite_database.engine())
    execute(
        sqlite_database,
        "DROP TABLE qmq_inbox",
        f"CREATE TABLE qmq_inbox (consumer_group VARCHAR(127) COLLATE {collation} NOT NULL, "
        "message_id BLOB NOT NULL, received_at_ms BIGINT NOT NULL, "
        "PRIMARY KEY (consumer_group, message_id))",
        "CREATE INDEX qmq_inbox_received ON qmq_inbox (received_at_ms)",
    )
    (text,) = faults(sqlite_database)
    assert f"consumer_group has the collation {collation}, which is not exact" in text


def test_where_a_migration_is_due_it_is_the_remedy(a_database: Database) -> None:
    engine = a_database.engine()
    assert {text.rsplit(": ", 1)[1] for text in faults(a_database)} == {"qmq db migrate"}
    migrate(engine)
    downgrade(engine, "qmq0001")
    found = drift_of(engine)
    assert {drift.remedy.partition(",")[0] for drift in found} == {"qmq db migrate"}
    assert len(found) == 3, found


def test_where_another_history_has_the_tables_its_upgrade_is_the_remedy(
    a_database: Database,
) -> None:
    migrate(a_database.engine())
    downgrade(a_database.engine(), "qmq0001")
    execute(
        a_database,
        "DROP TABLE qmq_version",
        "CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL)",
    )
    found = faults(a_database)
    assert len(found) == 2, found
    assert all(": alembic upgrade heads, " in text for text in found)
    execute(a_database, "DROP TABLE qmq_outbox", "DROP TABLE qmq_inbox")
    found = faults(a_database)
    assert len(found) == 3, found
    assert all(": qmq db migrate, or that of your own " in text for text in found), (
        "none has them yet, and either may be meant to"
    )


def test_a_wrong_primary_key_is_named(a_server_database: Database) -> None:
    migrate(a_server_database.engine())
    execute(
        a_server_database,
        "DROP TABLE qmq_order_lock",
        "CREATE TABLE qmq_order_lock (slot INT NOT NULL, room INT DEFAULT 0 PRIMARY KEY)",
    )
    assert faults(a_server_database) == [
        "table qmq_order_lock has the primary key (room), not (slot): ALTER TABLE qmq_order_lock ADD "
        "PRIMARY KEY (slot), after the current one was dropped"
    ]


def test_an_index_on_other_rows_is_not_ours(postgresql_database: Database) -> None:
    migrate(postgresql_database.engine())
    execute(
        postgresql_database,
        "DROP INDEX qmq_outbox_state_due",
        "CREATE INDEX qmq_outbox_state_due ON qmq_outbox (state, due_at_ms) WHERE state = 1",
    )
    found = drift_of(postgresql_database.engine())
    assert [drift.remedy.partition(";")[0] for drift in found] == [
        "DROP INDEX qmq_outbox_state_due"
    ]
    execute(postgresql_database, found[0].remedy)
    assert faults(postgresql_database) == []
