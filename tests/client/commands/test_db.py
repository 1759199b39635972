"""`qmq db`: migrate, check, sql on one database."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from click.testing import CliRunner, Result

from qmq_client import Message, Producer, ProducerOptions
from qmq_client.commands.root import root
from qmq_client.database.url import KNOWN_DATABASES
from qmq_client.outbox.database import dialect as outbox_dialect
from qmq_client.outbox.table import create_tables, make_tables
from qmq_migrations.exclusion import include_name
from qmq_migrations.upgrade import migrate
from tests.conftest import MakeDatabase
from tests.services.databases import Database

NOWHERE = "http://127.0.0.1:1"


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'shop.db'}"


def db(*arguments: str) -> Result:
    return CliRunner().invoke(root, ["db", *arguments])


def test_migrate_makes_what_check_asks_for(url: str) -> None:
    assert db("migrate", "--database", url).output == "shop: empty -> qmq0002\n"
    assert db("migrate", "--database", url).output == "shop: already at qmq0002\n"
    checked = db("check", "--database", url)
    assert (checked.exit_code, checked.output) == (0, "shop: as it should be\n")


def test_json_for_programs(url: str) -> None:
    migrated = json.loads(db("migrate", "--database", url, "--json").output)
    assert migrated == {
        "database": "shop",
        "from": None,
        "to": "qmq0002",
        "is_adopted": False,
        "notes": [],
    }
    checked = json.loads(db("check", "--database", url, "--json").output)
    assert checked == {"database": "shop", "ok": True, "faults": []}


def test_check_names_what_is_missing_and_exits_with_1(url: str) -> None:
    db("migrate", "--database", url)
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE qmq_outbox DROP COLUMN last_error")
        connection.exec_driver_sql("DROP TABLE qmq_inbox")
    engine.dispose()
    checked = db("check", "--database", url)
    assert checked.exit_code == 1
    assert "column qmq_outbox.last_error is missing" in checked.output
    assert "table qmq_inbox is missing" in checked.output


def test_check_of_a_file_that_is_not_there_is_unreachable_and_makes_none(
    url: str, tmp_path: Path
) -> None:
    checked = db("check", "--database", url)
    assert checked.exit_code == 3
    assert "there is no file" in checked.output
    assert "`qmq db migrate` creates it" in checked.output
    assert list(tmp_path.iterdir()) == []


def test_migrate_names_the_directory_that_is_not_there(tmp_path: Path) -> None:
    refused = db("migrate", "--database", f"sqlite:///{tmp_path}/nodir/x/new.db")
    assert refused.exit_code == 3
    assert f"there is no directory {tmp_path}/nodir/x; create it first" in refused.output


def test_a_file_name_in_place_of_a_url_is_answered_with_a_url() -> None:
    refused = db("check", "--database", "e.db")
    assert refused.exit_code == 2
    assert "For a file: sqlite:///e.db." in refused.output


def test_a_database_of_another_kind_is_refused_by_its_kind() -> None:
    refused = db("check", "--database", "oracle://app:hunter2@db/shop")
    assert refused.exit_code == 2
    assert (
        "Use one that the outbox works with: mariadb, mysql, postgresql, sqlite." in refused.output
    )
    assert "hunter2" not in refused.output


@pytest.mark.parametrize("kind", ["mysql", "postgresql"])
def test_a_server_where_nobody_answers_is_unreachable(kind: str) -> None:
    refused = db("check", "--database", f"{kind}://app:hunter2@127.0.0.1:1/shop")
    assert refused.exit_code == 3
    assert "hunter2" not in refused.output


@pytest.mark.parametrize("kind", ["mysql", "postgresql"])
def test_a_database_that_is_not_there_is_not_taken_for_missing_tables(
    make_database: MakeDatabase, kind: str
) -> None:
    url = sa.make_url(make_database(kind).url).set(database="qmq_test_of_nobody")
    refused = db("check", "--database", url.render_as_string(hide_password=False))
    assert refused.exit_code == 3
    assert "qmq_test_of_nobody" in refused.output
    assert "migrate" not in refused.output


def test_check_tells_each_fault_with_what_mends_it(a_database: Database) -> None:
    assert db("migrate", "--database", a_database.url).exit_code == 0
    with a_database.engine().begin() as connection:
        connection.exec_driver_sql("ALTER TABLE qmq_outbox DROP COLUMN last_error")
    checked = db("check", "--database", a_database.url)
    assert checked.exit_code == 1
    assert "qmq_outbox.last_error is missing\n  fix: ALTER TABLE qmq_o" in checked.output
    told = json.loads(db("check", "--database", a_database.url, "--json").output)
    assert (told["ok"], len(told["faults"])) == (False, 1)
    assert told["faults"][0]["remedy"].startswith("ALTER TABLE qmq_outbox ADD COLUMN last_error")


def test_downgrade_asks_for_a_yes_and_goes_back(a_database: Database) -> None:
    name = Path(a_database.name).stem
    db("migrate", "--database", a_database.url)
    refused = db("downgrade", "base", "--database", a_database.url)
    assert refused.exit_code == 2
    assert "give --yes" in refused.output
    back = db("downgrade", "qmq0001", "--database", a_database.url, "--yes")
    assert back.output == f"{name}: qmq0002 -> qmq0001\n"
    checked = db("check", "--database", a_database.url)
    assert checked.exit_code == 1
    assert "fix: qmq db migrate" in checked.output
    gone = db("downgrade", "base", "--database", a_database.url, "--yes", "--json")
    assert json.loads(gone.output) == {"database": name, "from": "qmq0001", "to": None}


def test_downgrade_to_a_revision_that_is_none(url: str) -> None:
    db("migrate", "--database", url)
    refused = db("downgrade", "qmq7", "--database", url, "--yes")
    assert refused.exit_code == 2
    assert "There is no revision qmq7; choose one of: base, qmq0001, qmq0002" in refused.output


def test_the_known_databases_are_those_with_a_dialect() -> None:
    assert sorted(KNOWN_DATABASES) == sorted(outbox_dialect._MODULES)


def test_migrate_says_when_it_adopted_tables_that_were_there(url: str) -> None:
    engine = sa.create_engine(url)
    create_tables(engine)
    engine.dispose()
    assert db("migrate", "--database", url).output == ("shop: existing tables adopted at qmq0002\n")


def test_migrate_leaves_tables_of_an_alembic_of_the_application_alone_until_told(url: str) -> None:
    engine = sa.create_engine(url)
    create_tables(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE alembic_version (version_num VARCHAR(32))")
    refused = db("migrate", "--database", url)
    assert refused.exit_code == 2
    assert "keep to that, whether the tables are (1)" in refused.output
    assert not sa.inspect(engine).has_table("qmq_version")
    engine.dispose()
    assert db("migrate", "--database", url, "--adopt").exit_code == 0


def test_migrate_beside_an_alembic_of_the_application_says_what_to_exclude(
    a_database: Database, tmp_path: Path
) -> None:
    engine = a_database.engine()
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE alembic_version (version_num VARCHAR(32))")
        if a_database.kind == "sqlite":
            connection.exec_driver_sql("PRAGMA journal_mode = WAL")
    told = db("migrate", "--database", a_database.url)
    assert told.exit_code == 0
    assert "your next autogenerate would drop qmq_outbox" in told.output
    assert "from qmq_migrations.exclusion import include_name" in told.output
    (note,) = json.loads(db("migrate", "--database", a_database.url, "--json").output)["notes"]
    assert note["fix"].endswith("include_name=include_name)`")
    config = tmp_path / "qmq.toml"
    section = f'name = "a"\nurl = "{a_database.url}"\ntable_prefix = "shop_"'
    config.write_text(f"[[database]]\n{section}\n")
    told = db("migrate", "--config", str(config))
    assert "include_name=functools.partial(include_name, prefix='shop_'))`" in told.output


def test_autogenerate_with_our_include_name_drops_nothing(a_database: Database) -> None:
    for prefix in ("qmq_", "shop_"):
        migrate(a_database.engine(), prefix=prefix)

    def found(**options: Any) -> set[str]:
        with a_database.engine().connect() as connection:
            context = MigrationContext.configure(connection, opts=options)
            return {each[1].name for each in compare_metadata(context, sa.MetaData())}

    ours = {"qmq_inbox", "qmq_order_lock", "qmq_outbox", "qmq_version"}
    assert ours <= found()
    assert not ours & found(include_name=include_name)
    assert not found(
        include_name=lambda *given: all(
            include_name(*given, prefix=prefix) for prefix in ("qmq_", "shop_")
        )
    )


def test_migrate_says_what_the_doctor_would_of_the_journal(url: str) -> None:
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE orders (id INTEGER)")
    told = db("migrate", "--database", url).output
    assert "shop: journal_mode is delete: " in told
    assert "  fix: PRAGMA journal_mode = WAL\n" in told
    with engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA journal_mode = WAL")
    engine.dispose()
    assert db("migrate", "--database", url).output == "shop: already at qmq0002\n"


def test_migrate_does_not_say_that_all_is_done_when_the_tables_are_gone(url: str) -> None:
    db("migrate", "--database", url)
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE qmq_outbox")
    engine.dispose()
    refused = db("migrate", "--database", url)
    assert refused.exit_code == 2
    assert "Revision qmq0002 is recorded, but qmq_outbox not there" in refused.output


def test_migrate_names_the_statement_for_a_schema_that_is_missing(
    postgresql_database: Database, tmp_path: Path
) -> None:
    config = tmp_path / "qmq.toml"
    config.write_text(
        f'[[database]]\nname = "a"\nurl = "{postgresql_database.url}"\nschema = "messages"\n'
    )
    refused = db("migrate", "--config", str(config))
    assert refused.exit_code == 2
    assert 'CREATE SCHEMA "messages"' in refused.output


def test_sql_prints_what_migrate_would_run_and_connects_to_nothing(
    url: str, tmp_path: Path
) -> None:
    printed = db("sql", "--database", url)
    assert printed.exit_code == 0
    assert list(tmp_path.iterdir()) == []
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        for statement in printed.output.split(";"):
            connection.exec_driver_sql(statement)
    engine.dispose()
    assert db("check", "--database", url).exit_code == 0
    assert db("migrate", "--database", url).output == (
        "shop: already at qmq0002\n"
        "shop: journal_mode is delete: Readers and the publisher block each other's commits; "
        "a COMMIT may fail as busy.\n"
        "  fix: PRAGMA journal_mode = WAL\n"
    )


@pytest.mark.parametrize("kind", ["oracle", "nosuch"])
def test_sql_is_printed_for_no_other_kind_of_database(kind: str) -> None:
    done = db("sql", "--database", f"{kind}://shop@db/shop")
    assert (done.exit_code, done.stdout) == (2, "")
    assert f"a {kind} database. Use one that the outbox works with: " in done.stderr


@pytest.mark.parametrize(
    "backend", ["mysql+pymysql", "postgresql+psycopg", "postgres", "mysql+aiomysql"]
)
def test_sql_can_be_printed_where_no_server_is(backend: str) -> None:
    printed = db("sql", "--database", f"{backend}://app:hunter2@nowhere/shop")
    assert printed.exit_code == 0
    assert "CREATE TABLE qmq_outbox" in printed.output
    assert "hunter2" not in printed.output


def test_a_prefix_of_the_configuration_names_the_tables(url: str, tmp_path: Path) -> None:
    config = tmp_path / "qmq.toml"
    config.write_text(f'[[database]]\nname = "a"\nurl = "{url}"\ntable_prefix = "shop_"\n')
    assert db("migrate", "--config", str(config)).exit_code == 0
    engine = sa.create_engine(url)
    names = sa.inspect(engine).get_table_names()
    engine.dispose()
    assert names == ["shop_inbox", "shop_order_lock", "shop_outbox", "shop_version"]
    assert db("check", "--config", str(config)).exit_code == 0


@pytest.mark.parametrize("prefix", ["50%_'s ", "x" * 32])
def test_every_command_takes_the_prefixes_that_make_tables_takes(
    a_database: Database, tmp_path: Path, prefix: str
) -> None:
    config = tmp_path / "qmq.toml"
    section = f'name = "a"\nurl = "{a_database.url}"\ntable_prefix = "{prefix}"'
    config.write_text(f"[[database]]\n{section}\n")
    here = ("--config", str(config))
    assert db("migrate", *here).exit_code == 0
    tables = make_tables(sa.MetaData(), prefix=prefix)
    engine = a_database.engine()
    options = ProducerOptions(background=False)
    with Producer(engine, NOWHERE, tables=tables, options=options) as producer:
        message_id = producer.send_now(Message("orders", "stored"))
    assert db("check", *here).output == "a: as it should be\n"
    listed = CliRunner().invoke(root, ["outbox", "list", *here, "--json"])
    assert [row["message_id"] for row in json.loads(listed.output)["rows"]] == [message_id]
    with engine.begin() as connection:
        connection.execute(sa.update(tables.outbox).values(due_at_ms=0))
    swept = CliRunner().invoke(root, ["watchdog", "sweep", *here, "--broker", NOWHERE, "--json"])
    assert json.loads(swept.stdout)["claimed"] == 1
    assert CliRunner().invoke(root, ["doctor", *here]).exit_code == 0
    assert db("downgrade", "base", *here, "--yes").exit_code == 0


def test_which_database_must_be_clear(tmp_path: Path) -> None:
    config = tmp_path / "qmq.toml"
    config.write_text("".join(f'[[database]]\nname = "{n}"\nurl = "sqlite://"\n' for n in "ab"))
    refused = db("check", "--config", str(config))
    assert refused.exit_code == 2
    assert "2 are configured: a, b" in refused.output


def test_a_database_of_a_newer_version_is_refused(url: str) -> None:
    db("migrate", "--database", url)
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE qmq_version SET version_num = 'qmq9999'")
    engine.dispose()
    refused = db("migrate", "--database", url)
    assert refused.exit_code == 2
    assert "qmq9999" in refused.output
    assert "Upgrade QMQ" in refused.output


def test_a_file_made_by_migrate_has_a_write_ahead_log_and_another_keeps_its_journal(
    tmp_path: Path,
) -> None:
    for name, journal in (("new", "wal"), ("old", "delete")):
        path = tmp_path / f"{name}.db"
        if name == "old":
            with closing(sqlite3.connect(path)) as connection:
                connection.execute("CREATE TABLE business (id)")
        assert db("migrate", "--database", f"sqlite:///{path}").exit_code == 0
        with closing(sqlite3.connect(path)) as connection:
            assert connection.execute("PRAGMA journal_mode").fetchone() == (journal,)
