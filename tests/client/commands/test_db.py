"""`qmq db`: migrate, check, sql on one database."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import sqlalchemy as sa
from click.testing import CliRunner, Result

from qmq_client.commands.root import root
from qmq_client.database import KNOWN_DATABASES
from qmq_client.outbox import dialect as outbox_dialect
from qmq_client.outbox.table import create_tables


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
    }
    checked = json.loads(db("check", "--database", url, "--json").output)
    assert checked == {"database": "shop", "ok": True, "fault": ""}


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
    assert "`qmq db migrate` makes it" in checked.output
    assert list(tmp_path.iterdir()) == []


def test_migrate_names_the_directory_that_is_not_there(tmp_path: Path) -> None:
    refused = db("migrate", "--database", f"sqlite:///{tmp_path}/nodir/x/new.db")
    assert refused.exit_code == 3
    assert f"there is no directory {tmp_path}/nodir/x; make it first" in refused.output


def test_a_file_name_in_place_of_a_url_is_answered_with_a_url() -> None:
    refused = db("check", "--database", "e.db")
    assert refused.exit_code == 2
    assert "or a URL like sqlite:///e.db" in refused.output


@pytest.mark.parametrize("url", ["postgresql://app:hunter2@db/shop", "mysql://app:hunter2@db/x"])
def test_a_database_of_later_is_refused_by_its_kind(url: str) -> None:
    refused = db("check", "--database", url)
    assert refused.exit_code == 2
    assert "The outbox knows sqlite." in refused.output
    assert "hunter2" not in refused.output


def test_the_known_databases_are_those_with_a_dialect() -> None:
    assert sorted(KNOWN_DATABASES) == sorted(outbox_dialect._MODULES)


def test_migrate_says_when_it_adopted_tables_that_were_there(url: str) -> None:
    engine = sa.create_engine(url)
    create_tables(engine)
    engine.dispose()
    assert db("migrate", "--database", url).output == (
        "shop: tables were there without a revision, adopted at qmq0002\n"
    )


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
    assert db("migrate", "--database", url).output == "shop: already at qmq0002\n"


@pytest.mark.parametrize("backend", ["mysql+pymysql", "postgresql+psycopg"])
def test_sql_can_be_printed_for_databases_of_later(backend: str) -> None:
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


def test_which_database_must_be_clear(tmp_path: Path) -> None:
    config = tmp_path / "qmq.toml"
    config.write_text("".join(f'[[database]]\nname = "{n}"\nurl = "sqlite://"\n' for n in "ab"))
    refused = db("check", "--config", str(config))
    assert refused.exit_code == 2
    assert "2 databases are configured: a, b" in refused.output


def test_a_database_of_a_newer_version_is_refused(url: str) -> None:
    db("migrate", "--database", url)
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE qmq_version SET version_num = 'qmq9999'")
    engine.dispose()
    refused = db("migrate", "--database", url)
    assert refused.exit_code == 2
    assert "qmq9999" in refused.output
    assert "Upgrade the product" in refused.output
