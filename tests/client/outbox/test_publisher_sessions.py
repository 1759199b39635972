"""What the connections of publisher and watchdog are, whatever those of the application are."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import pytest
import sqlalchemy as sa
from sqlalchemy import event

from qmq_client.ids import new_token
from qmq_client.outbox.committed.store import OutboxStore
from qmq_client.outbox.database.sqlite import BUSY_MS_MAX
from qmq_client.outbox.table import DEFAULT_TABLES, create_tables
from qmq_watchdog.databases import Database as Watched
from tests.client.world import OUTBOX
from tests.conftest import MakeDatabase
from tests.services.databases import Database
from tests.watchdog.rows import put_rows

#: How durable the commits of a session are, and what that is for ours; it is no setting of a session
#: on MySQL.
DURABILITY: Final = {
    "postgresql": ("SHOW synchronous_commit", "on", "off"),
    "sqlite": ("PRAGMA synchronous", 2, 1),
}

#: The due time of rows that are not to be claimed.
LONG_AFTER_MS: Final = 2**50


def shop_of(database: Database, **options: Any) -> sa.Engine:
    engine = database.engine(**options)
    if database.kind == "sqlite":
        with engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA journal_mode = WAL")
    create_tables(engine)
    return engine


def read(connection: sa.Connection, query: str) -> Any:
    return connection.exec_driver_sql(query).scalar_one()


@pytest.mark.parametrize("kind", DURABILITY)
def test_S2_what_is_deleted_may_be_less_durable_and_what_the_application_commits_is_not(
    make_database: MakeDatabase, kind: str
) -> None:
    query, full, relaxed = DURABILITY[kind]
    engine = shop_of(make_database(kind))
    store = OutboxStore(engine)
    for _ in range(2):  # also on a connection that was ours before
        assert store.write(lambda connection: read(connection, query)) == relaxed
        with engine.connect() as connection:
            assert read(connection, query) == full
    store.close()


def test_S12_a_publisher_waits_for_the_lock_of_a_file_for_a_while(tmp_path: Path) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'shop.db'}", connect_args={"timeout": 0})
    create_tables(engine)
    store = OutboxStore(engine)
    busy_ms = store.write(lambda connection: read(connection, "PRAGMA busy_timeout"))
    assert busy_ms == BUSY_MS_MAX == 2_000
    store.close()
    engine.dispose()


def test_S2_a_file_without_a_write_ahead_log_keeps_its_durability(tmp_path: Path) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'shop.db'}")
    create_tables(engine)
    with engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA journal_mode = DELETE")
    store = OutboxStore(engine)
    assert store.write(lambda connection: read(connection, "PRAGMA synchronous")) == 2
    store.close()
    engine.dispose()


@pytest.mark.parametrize("level", ["SERIALIZABLE", "REPEATABLE READ", "AUTOCOMMIT"])
def test_W5_a_claim_is_read_committed_whatever_the_applications_level_is(
    a_server_database: Database, level: str
) -> None:
    engine = shop_of(a_server_database, isolation_level=level)
    store = OutboxStore(engine)
    levels: list[str] = []

    def look(connection: sa.Connection, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith(("SELECT id", "WITH due")):
            levels.append(connection.get_isolation_level())

    event.listen(store._own.engine, "before_cursor_execute", look)
    store.claim(token=new_token(), limit=10, lease_ms=1_000)
    assert levels == ["READ COMMITTED"]
    store.close()


@pytest.mark.parametrize("large_count", [0, 3])
def test_W5_a_claim_reads_and_takes_its_rows_in_no_more_than_two_statements(
    a_server_database: Database, large_count: int
) -> None:
    engine = shop_of(a_server_database)
    store = OutboxStore(engine)
    watched = Watched(name="shop", store=store, engine=engine)
    put_rows(watched, 300)
    for _ in range(large_count):
        put_rows(watched, body=os.urandom(100_000))
    with engine.begin() as connection:
        connection.execute(sa.update(DEFAULT_TABLES.outbox).values(attempts=7))
    texts: list[str] = []
    event.listen(store._own.engine, "before_cursor_execute", lambda *given: texts.append(given[2]))
    claimed = store.claim(token=new_token(), limit=1_000, lease_ms=60_000)
    # Large records are read when it is known that they fit, and MySQL cannot return what it updates.
    third = large_count > 0 and not engine.dialect.update_returning
    assert len([text for text in texts if OUTBOX in text]) == 2 + third
    assert len(claimed) == 300 + large_count
    assert {row.attempts for row in claimed} == {7}
    assert all(store.read_record(row.message_id) == row.record for row in claimed)
    store.close()


def test_a_claim_reads_records_from_postgresql_as_they_are_and_nothing_else_is_read_so(
    postgresql_database: Database,
) -> None:
    """As text each byte comes as two digits, which both sides have to convert."""
    engine = shop_of(postgresql_database)
    store = OutboxStore(engine)
    put_rows(Watched(name="shop", store=store, engine=engine), 3)
    formats: set[int] = set()

    def look(_: sa.Connection, cursor: Any, statement: str, *_others: Any) -> None:
        if "record" in statement:
            formats.add(int(cursor.format))

    event.listen(store._own.engine, "before_cursor_execute", look)
    claimed = store.claim(token=new_token(), limit=10, lease_ms=60_000)
    assert formats == {1}
    formats.clear()
    assert [store.read_record(row.message_id) for row in claimed] == [row.record for row in claimed]
    assert formats == {0}
    store.close()


@pytest.mark.parametrize("taken", [slice(0, 300, 2), slice(0, 200), slice(50, 250)])
def test_O3_a_claim_changes_no_row_before_between_or_behind_those_it_takes(
    a_server_database: Database, taken: slice
) -> None:
    """However the numbers of its rows lie; those of the others are nobody's to take yet."""
    engine = shop_of(a_server_database)
    store = OutboxStore(engine)
    put_rows(Watched(name="shop", store=store, engine=engine), 300)
    row = DEFAULT_TABLES.outbox.c
    others = sa.select(row.id, row.token, row.due_at_ms).where(row.due_at_ms == LONG_AFTER_MS)
    with engine.begin() as connection:
        ids = connection.scalars(sa.select(row.id).order_by(row.id)).all()
        left = sorted(set(ids) - set(ids[taken]))
        query = sa.update(DEFAULT_TABLES.outbox).where(row.id.in_(left))
        connection.execute(query.values(due_at_ms=LONG_AFTER_MS))
    with engine.connect() as connection:
        before = sorted(connection.execute(others))
    claimed = store.claim(token=new_token(), limit=1_000, lease_ms=60_000)
    assert [each.number for each in claimed] == list(ids[taken])
    with engine.connect() as connection:
        assert sorted(connection.execute(others)) == before
    assert len(before) == len(left)
    store.close()
