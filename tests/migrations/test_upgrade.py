"""The stand-alone door: the schema, the history, two at once, killed half-way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from sqlalchemy import event

from qmq_client.outbox.table import create_tables, make_tables
from qmq_migrations.errors import MigrationBusyError, NoLockError, UnknownRevisionError
from qmq_migrations.lock import lock_for
from qmq_migrations.upgrade import (
    VERSIONS,
    Migrated,
    current_revision,
    migrate,
    newest_revision,
    upgrade_sql,
)

DEADLINE_S = 60.0
DIE_AFTER = "CREATE TABLE qmq_inbox"


def a_database(path: Path) -> sa.Engine:
    return sa.create_engine(f"sqlite:///{path}")


def schema_of(engine: sa.Engine) -> dict[str, str | None]:
    """Every table and index, as SQLite keeps its text; the version table aside."""
    query = "SELECT name, sql FROM sqlite_master WHERE name NOT LIKE '%version%'"
    with engine.connect() as connection:
        return {row.name: row.sql for row in connection.exec_driver_sql(query)}


def described(engine: sa.Engine) -> dict[str, Any]:
    """Columns, keys and indexes as the inspector sees them."""
    inspector = sa.inspect(engine)
    found: dict[str, Any] = {}
    for table in inspector.get_table_names():
        if table.endswith("version"):
            continue
        columns = [(c["name"], str(c["type"]), c["nullable"]) for c in inspector.get_columns(table)]
        found[table] = {
            "columns": columns,
            "key": inspector.get_pk_constraint(table)["constrained_columns"],
            "unique": [c["column_names"] for c in inspector.get_unique_constraints(table)],
            "indexes": {i["name"]: i["column_names"] for i in inspector.get_indexes(table)},
        }
    return found


@pytest.mark.parametrize("prefix", ["qmq_", "shop_", ""])
def test_revisions_in_order_are_the_schema_from_scratch(tmp_path: Path, prefix: str) -> None:
    migrated, created = a_database(tmp_path / "a.db"), a_database(tmp_path / "b.db")
    migrate(migrated, prefix=prefix)
    create_tables(created, make_tables(sa.MetaData(), prefix=prefix))
    assert described(migrated) == described(created)
    assert schema_of(migrated) == schema_of(created)
    assert set(described(migrated)) == {
        f"{prefix}{name}" for name in ("outbox", "inbox", "order_lock")
    }
    migrated.dispose()
    created.dispose()


@pytest.mark.parametrize("dialect_name", ["mysql", "postgresql", "sqlite"])
def test_revisions_make_the_same_columns_for_every_database(dialect_name: str) -> None:
    tables = make_tables(sa.MetaData())
    dialect = sa.engine.url.URL.create(dialect_name).get_dialect()()
    printed = " ".join(upgrade_sql(dialect_name).split())
    for table in tables.all:
        created = " ".join(str(sa.schema.CreateTable(table).compile(dialect=dialect)).split())
        assert created in printed
        for index in table.indexes:
            assert str(sa.schema.CreateIndex(index).compile(dialect=dialect)) in printed


def test_the_history_is_our_own(tmp_path: Path) -> None:
    engine = a_database(tmp_path / "a.db")
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE alembic_version (version_num TEXT)")
        connection.exec_driver_sql("INSERT INTO alembic_version VALUES ('theirs')")
    assert current_revision(engine) is None
    assert migrate(engine) == Migrated(before=None, after=newest_revision())
    assert migrate(engine) == Migrated(before=newest_revision(), after=newest_revision())
    with engine.connect() as connection:
        theirs = connection.exec_driver_sql("SELECT version_num FROM alembic_version").all()
    assert [row.version_num for row in theirs] == ["theirs"]
    engine.dispose()


def test_tables_that_were_made_without_us_are_taken_over(tmp_path: Path) -> None:
    engine = a_database(tmp_path / "a.db")
    create_tables(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql("INSERT INTO qmq_inbox VALUES ('g', x'00', 1)")
    assert migrate(engine).after == newest_revision()
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM qmq_inbox").scalar() == 1
    engine.dispose()


@pytest.mark.parametrize(
    "done",
    [
        ["CREATE TABLE qmq_outbox"],
        ["CREATE TABLE qmq_outbox", "CREATE INDEX qmq_outbox_state_due"],
        ["CREATE TABLE qmq_outbox", "CREATE INDEX qmq_outbox_state_due", "CREATE TABLE qmq_inbox"],
    ],
)
def test_a_run_goes_on_where_one_without_transactional_ddl_was_killed(
    tmp_path: Path, done: list[str]
) -> None:
    whole = a_database(tmp_path / "whole.db")
    migrate(whole)
    engine = a_database(tmp_path / "half.db")
    with engine.begin() as connection:
        for sql in schema_of(whole).values():
            if sql is not None and any(sql.startswith(f"{each} ") for each in done):
                connection.exec_driver_sql(sql)
    assert schema_of(engine) != schema_of(whole)
    migrate(engine)
    assert schema_of(engine) == schema_of(whole)
    engine.dispose()
    whole.dispose()


def migrate_and_die(path: str) -> None:
    """Kill this process in the middle of a migration."""
    engine = a_database(Path(path))

    def die(_c: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.strip().startswith(DIE_AFTER):
            os.kill(os.getpid(), signal.SIGKILL)

    event.listen(engine, "after_cursor_execute", die)
    migrate(engine)


def start(role: str, path: Path) -> subprocess.Popen[str]:
    root = Path(__file__).resolve().parents[2]
    line = [sys.executable, "-m", "tests.migrations.test_upgrade", role, str(path)]
    return subprocess.Popen(line, cwd=root, stdout=subprocess.PIPE, text=True)


def test_a_killed_run_leaves_nothing_and_the_next_one_does_all(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    killed = start("die", path)
    killed.communicate(timeout=DEADLINE_S)
    assert killed.returncode == -signal.SIGKILL
    engine = a_database(path)
    assert schema_of(engine) == {}
    assert migrate(engine).before is None
    assert {"qmq_outbox", "qmq_inbox"} <= set(schema_of(engine))
    engine.dispose()


def test_several_starts_at_once_migrate_once(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    engine = a_database(path)
    gate = engine.connect()
    gate.exec_driver_sql("BEGIN IMMEDIATE")  # all of them get as far as the lock
    processes = [start("migrate", path) for _ in range(4)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "migrating\n"
    gate.rollback()
    gate.close()
    for process in processes:
        process.communicate(timeout=DEADLINE_S)
    assert [process.returncode for process in processes] == [0] * 4
    with engine.connect() as connection:
        versions = connection.exec_driver_sql("SELECT version_num FROM qmq_version").all()
    assert [row.version_num for row in versions] == [newest_revision()]
    engine.dispose()


def test_a_database_that_stays_locked_is_busy_and_named_so(tmp_path: Path) -> None:
    engine = a_database(tmp_path / "a.db")
    with engine.connect() as other:
        other.exec_driver_sql("BEGIN IMMEDIATE")
        with pytest.raises(MigrationBusyError, match=r"locked for 0\.01 s"):
            migrate(engine, wait_s=0.01)
    migrate(engine)
    engine.dispose()


def test_a_revision_of_the_future_is_refused(tmp_path: Path) -> None:
    engine = a_database(tmp_path / "a.db")
    migrate(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE qmq_version SET version_num = 'qmq9999'")
    with pytest.raises(UnknownRevisionError, match="qmq9999"):
        migrate(engine)
    engine.dispose()


def test_a_database_without_a_lock_is_refused() -> None:
    class Odd:
        class dialect:  # noqa: N801  # stands for an attribute
            name = "oracle"

    odd: Any = Odd()
    with pytest.raises(NoLockError, match="oracle"):
        lock_for(odd, 1.0)


ENVIRONMENT = """
from alembic import context
context.configure(connection=context.config.attributes["connection"])
with context.begin_transaction():
    context.run_migrations()
"""


def test_our_branch_runs_inside_an_application_s_own_environment(tmp_path: Path) -> None:
    scripts = tmp_path / "scripts"
    (scripts / "versions").mkdir(parents=True)
    (scripts / "env.py").write_text(ENVIRONMENT)
    config = Config()
    config.set_main_option("script_location", str(scripts))
    config.set_main_option("path_separator", "os")
    config.set_main_option("version_locations", f"{scripts / 'versions'}{os.pathsep}{VERSIONS}")
    ours, theirs = a_database(tmp_path / "ours.db"), a_database(tmp_path / "theirs.db")
    migrate(ours)
    with theirs.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "qmq@head")
    assert schema_of(theirs) == schema_of(ours)
    with theirs.begin() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "qmq@base")
    assert schema_of(theirs) == {}
    ours.dispose()
    theirs.dispose()


if __name__ == "__main__":
    if sys.argv[1] == "die":
        migrate_and_die(sys.argv[2])
    else:
        print("migrating", flush=True)
        migrate(a_database(Path(sys.argv[2])))
