"""The stand-alone door on every database: the schema, the history, names, down again."""

from __future__ import annotations

import re
from typing import Any

import pytest
import sqlalchemy as sa

from qmq_client.doctor.drift import find_drift
from qmq_client.outbox.table import REVISIONS, create_tables, make_tables
from qmq_migrations.adoption import TABLES_OF
from qmq_migrations.errors import (
    MigrationBusyError,
    NoLockError,
    NoRevisionError,
    OtherHistoryError,
    SchemaMissingError,
    TablesGoneError,
    UnknownRevisionError,
    UnrecordedTablesError,
)
from qmq_migrations.lock import lock_for
from qmq_migrations.upgrade import (
    Migrated,
    current_revision,
    downgrade,
    migrate,
    newest_revision,
    upgrade_sql,
)
from tests.conftest import MakeDatabase
from tests.migrations.schemas import live_schema
from tests.services.databases import KINDS, Database

NAMES = ("inbox", "order_lock", "outbox")


def execute(engine: sa.Engine, *statements: str) -> None:
    with engine.begin() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)


def count(engine: sa.Engine, table: str) -> Any:
    with engine.connect() as connection:
        return connection.exec_driver_sql(f"SELECT count(*) FROM {table}").scalar()


@pytest.mark.parametrize("prefix", ["qmq_", "shop_", ""])
@pytest.mark.parametrize("kind", KINDS)
def test_revisions_in_order_are_the_schema_from_scratch(
    make_database: MakeDatabase, kind: str, prefix: str
) -> None:
    migrated, created = make_database(kind).engine(), make_database(kind).engine()
    migrate(migrated, prefix=prefix)
    tables = make_tables(sa.MetaData(), prefix=prefix)
    create_tables(created, tables)
    assert live_schema(migrated) == live_schema(created)
    assert set(live_schema(migrated)) == {f"{prefix}{name}" for name in NAMES}
    for engine in (migrated, created):
        with engine.connect() as connection:
            assert find_drift(connection, tables) == []


def test_the_newest_revision_is_the_one_that_the_client_works_with() -> None:
    assert newest_revision() == REVISIONS[-1]


def test_the_history_is_our_own(a_database: Database) -> None:
    engine = a_database.engine()
    execute(
        engine,
        "CREATE TABLE alembic_version (version_num VARCHAR(32))",
        "INSERT INTO alembic_version VALUES ('theirs')",
    )
    assert current_revision(engine) is None
    assert migrate(engine) == Migrated(before=None, after=newest_revision())
    assert migrate(engine) == Migrated(before=newest_revision(), after=newest_revision())
    with engine.connect() as connection:
        theirs = connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalars()
        assert list(theirs) == ["theirs"]


def test_tables_that_were_made_without_us_are_taken_over(a_database: Database) -> None:
    engine = a_database.engine()
    create_tables(engine)
    before = live_schema(engine)
    execute(engine, "INSERT INTO qmq_order_lock VALUES (7)")
    assert migrate(engine) == Migrated(before=None, after=newest_revision(), is_adopted=True)
    assert (live_schema(engine), count(engine, "qmq_order_lock")) == (before, 1)


@pytest.mark.parametrize("has_begun", [False, True], ids=["never begun", "killed half-way"])
def test_tables_beside_another_history_are_taken_over_only_when_that_is_said(
    a_database: Database, has_begun: bool
) -> None:
    engine = a_database.engine()
    create_tables(engine)
    execute(engine, "CREATE TABLE alembic_version (version_num VARCHAR(32))")
    adopted = Migrated(before=None, after=newest_revision(), is_adopted=True)
    if has_begun:
        execute(engine, "CREATE TABLE qmq_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY)")
        assert migrate(engine) == adopted
        return
    names = set(live_schema(engine))
    with pytest.raises(
        OtherHistoryError, match=r"\(1\) .* \(2\) .* \(3\) let `qmq db migrate --adopt`"
    ):
        migrate(engine)
    assert set(live_schema(engine)) == names, "nothing was made"
    assert not sa.inspect(engine).has_table("qmq_version")
    assert migrate(engine, may_adopt=True) == adopted
    assert migrate(engine).before == newest_revision(), "ours from now on"


@pytest.mark.parametrize("revision", sorted(TABLES_OF))
def test_tables_that_are_gone_are_reported_with_what_makes_them_again(
    a_database: Database, revision: str
) -> None:
    engine = a_database.engine()
    migrate(engine)
    downgrade(engine, revision)
    whole = live_schema(engine)
    assert sorted(whole) == [f"qmq_{name}" for name in TABLES_OF[revision]]
    for gone in (["qmq_inbox"], sorted({*whole} - {"qmq_inbox"})):
        execute(engine, *(f"DROP TABLE {name}" for name in gone))
        with pytest.raises(TablesGoneError, match=", ".join(gone)) as refused:
            migrate(engine)
    (forget,) = re.findall(r"empty: (DELETE FROM .*), then", str(refused.value))
    execute(engine, forget)
    assert migrate(engine) == Migrated(before=None, after=newest_revision())
    with engine.connect() as connection:
        assert find_drift(connection, make_tables(sa.MetaData())) == []


@pytest.mark.parametrize(("kind", "statement"), [("mysql", "DATABASE"), ("postgresql", "SCHEMA")])
def test_a_schema_that_is_missing_is_reported_with_the_statement_that_makes_it(
    make_database: MakeDatabase, kind: str, statement: str
) -> None:
    database = make_database(kind)
    engine, schema = database.engine(), f"{database.name}_Messages"
    with pytest.raises(SchemaMissingError, match=f"CREATE {statement} .{schema}.$") as refused:
        migrate(engine, schema=schema)
    execute(engine, str(refused.value).partition("Create it first: ")[2])
    try:
        assert migrate(engine, schema=schema).after == newest_revision()
    finally:
        execute(engine, f"DROP {statement} {schema}" if kind == "mysql" else "SELECT 1")


def test_a_database_of_the_first_revision_continues_with_its_messages(a_database: Database) -> None:
    engine = a_database.engine()
    migrate(engine)
    assert downgrade(engine, "qmq0001") == Migrated(before="qmq0002", after="qmq0001")
    assert sorted(live_schema(engine)) == ["qmq_inbox", "qmq_outbox"]
    row = sa.insert(make_tables(sa.MetaData()).inbox).values(
        consumer_group="g", message_id=bytes(16), received_at_ms=1
    )
    with engine.begin() as connection:
        connection.execute(row)
    assert migrate(engine) == Migrated(before="qmq0001", after="qmq0002")
    assert count(engine, "qmq_inbox") == 1


def test_down_to_the_base_nothing_of_ours_is_left_and_up_again_all_is_there(
    a_database: Database,
) -> None:
    engine = a_database.engine()
    migrate(engine)
    whole = live_schema(engine)
    assert downgrade(engine, "base") == Migrated(before=newest_revision(), after=None)
    assert live_schema(engine) == {}
    assert downgrade(engine, "base") == Migrated(before=None, after=None)
    assert migrate(engine).before is None
    assert live_schema(engine) == whole


def test_there_is_no_way_down_from_tables_without_a_revision(a_database: Database) -> None:
    """Whoever reads that nothing is there would believe that they were dropped."""
    engine = a_database.engine()
    create_tables(engine)
    with pytest.raises(UnrecordedTablesError, match="qmq_outbox is there, but no revision"):
        downgrade(engine, "base")
    migrate(engine)
    downgrade(engine, "base")
    assert live_schema(engine) == {}


def test_down_is_never_up(a_database: Database) -> None:
    engine = a_database.engine()
    migrate(engine)
    downgrade(engine, "qmq0001")
    assert downgrade(engine, "qmq0002").after == "qmq0001"
    with pytest.raises(NoRevisionError, match="qmq7; choose one of: base, qmq0001, qmq0002"):
        downgrade(engine, "qmq7")


@pytest.mark.parametrize("kind", ["mysql", "postgresql"])
def test_tables_may_live_in_a_schema_of_their_own(make_database: MakeDatabase, kind: str) -> None:
    """On MySQL that is another database of the same server."""
    business = make_database(kind)
    engine = business.engine()
    schema = make_database(kind).name if kind == "mysql" else "messages"
    if kind == "postgresql":
        execute(engine, f"CREATE SCHEMA {schema}")
    assert migrate(engine, schema=schema).after == newest_revision()
    inspector = sa.inspect(engine)
    assert inspector.get_table_names() == []
    assert sorted(inspector.get_table_names(schema)) == sorted(
        f"qmq_{name}" for name in [*NAMES, "version"]
    )
    tables = make_tables(sa.MetaData(), schema=schema)
    with engine.connect() as connection:
        assert find_drift(connection, tables) == []
    assert current_revision(engine, schema=schema) == newest_revision()
    assert downgrade(engine, "base", schema=schema).after is None
    assert sa.inspect(engine).get_table_names(schema) == ["qmq_version"]


@pytest.mark.parametrize("prefix", ["Mixed Case ", "with-dash_", "50%_"])
def test_names_that_need_quotes_get_them(a_database: Database, prefix: str) -> None:
    engine = a_database.engine()
    migrate(engine, prefix=prefix)
    tables = make_tables(sa.MetaData(), prefix=prefix)
    with engine.connect() as connection:
        assert find_drift(connection, tables) == []
    assert migrate(engine, prefix=prefix).before == newest_revision()


def test_a_revision_of_the_future_is_refused(a_database: Database) -> None:
    engine = a_database.engine()
    migrate(engine)
    execute(engine, "UPDATE qmq_version SET version_num = 'qmq9999'")
    with pytest.raises(UnknownRevisionError, match="qmq9999"):
        migrate(engine)


def run_printed(engine: sa.Engine, text: str) -> None:
    """By the driver alone, as an administrator's own tool would."""
    driver = engine.raw_connection()
    try:
        cursor = driver.cursor()
        for statement in filter(str.strip, text.split(";\n")):
            cursor.execute(statement)
        driver.commit()
    finally:
        driver.close()


@pytest.mark.parametrize("kind", KINDS)
def test_printed_statements_make_the_same_tables(make_database: MakeDatabase, kind: str) -> None:
    migrated, printed = make_database(kind).engine(), make_database(kind).engine()
    migrate(migrated)
    run_printed(printed, upgrade_sql(kind))
    assert live_schema(printed) == live_schema(migrated)
    assert migrate(printed) == Migrated(before=newest_revision(), after=newest_revision())


@pytest.mark.parametrize("kind", ["mysql", "postgresql"])
def test_printed_statements_name_the_schema(make_database: MakeDatabase, kind: str) -> None:
    engine = make_database(kind).engine()
    schema = make_database(kind).name if kind == "mysql" else "messages"
    if kind == "postgresql":
        execute(engine, f"CREATE SCHEMA {schema}")
    run_printed(engine, upgrade_sql(kind, schema=schema))
    assert sa.inspect(engine).get_table_names() == []
    assert migrate(engine, schema=schema).before == newest_revision()


def test_a_lock_that_another_holds_is_busy_and_named_so(a_database: Database) -> None:
    engine = a_database.engine()
    with engine.connect() as other:
        if a_database.kind == "sqlite":
            other.exec_driver_sql("BEGIN IMMEDIATE")
            with pytest.raises(MigrationBusyError, match=r"locked for 0\.01 s"):
                migrate(engine, wait_s=0.01)
        else:
            with lock_for(other, 5.0), pytest.raises(MigrationBusyError, match=r"in 0\.01 s"):
                migrate(engine, wait_s=0.01)
        other.rollback()
    assert migrate(engine).after == newest_revision()


@pytest.mark.parametrize("kind", ["mysql", "postgresql"])
def test_a_step_does_not_wait_forever_for_an_open_transaction(
    make_database: MakeDatabase, kind: str
) -> None:
    """Everybody else's statements on the table would wait behind it."""
    database = make_database(kind)
    engine, other = database.engine(pool_size=1), database.engine()
    migrate(engine)
    downgrade(engine, "qmq0001")
    with other.begin() as business:
        business.exec_driver_sql("DELETE FROM qmq_outbox")
        with pytest.raises(MigrationBusyError, match="a long transaction"):
            migrate(engine, wait_s=1)
    assert migrate(engine).after == newest_revision()
    with engine.connect() as connection:  # the one that migrated
        as_before = {
            "mysql": "@@session.lock_wait_timeout = @@global.lock_wait_timeout",
            "postgresql": "current_setting('lock_timeout') = '0'",
        }
        assert connection.exec_driver_sql(f"SELECT {as_before[kind]}").scalar()


def test_the_lock_is_given_back_after_an_error(a_database: Database) -> None:
    engine = a_database.engine()
    with pytest.raises(RuntimeError), engine.connect() as one, lock_for(one, 5.0):
        raise RuntimeError
    with engine.connect() as other, lock_for(other, 0.01):
        pass


def test_databases_of_one_mysql_server_do_not_wait_for_each_other(
    make_database: MakeDatabase,
) -> None:
    one, other = make_database("mysql").engine(), make_database("mysql").engine()
    with one.connect() as connection, lock_for(connection, 5.0):
        migrate(other, wait_s=0.01)


def test_a_database_without_a_lock_is_refused() -> None:
    class Odd:
        class dialect:  # noqa: N801  # stands for an attribute
            name = "oracle"

    odd: Any = Odd()
    with pytest.raises(NoLockError, match="oracle"):
        lock_for(odd, 1.0)


def test_on_sqlite_a_lock_is_waited_for_as_long_as_was_said(sqlite_database: Database) -> None:
    with sqlite_database.engine().connect() as connection, lock_for(connection, 1.5):
        assert connection.exec_driver_sql("PRAGMA busy_timeout").scalar_one() == 1_500
