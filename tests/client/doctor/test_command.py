"""`qmq doctor`: what it prints and its exit codes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import sqlalchemy as sa
from click.testing import CliRunner, Result
from sqlalchemy.pool import NullPool

from qmq_client.commands.root import root
from qmq_client.doctor.catalogue import CHECKS, checked_by_command
from qmq_client.outbox.table import create_tables
from qmq_client.settings.sections import BrokerSection
from tests.client.doctor.ward import run, sound_sqlite
from tests.kit.broker_process import BrokerProcess
from tests.services.databases import Database

NOBODY = "http://127.0.0.1:1"
SOUND_SQLITE = "shop: sound (14 checks: tables 6, settings 3, clock 1, unsent messages 4)\n"  # as the page shows


@pytest.fixture
def shop(tmp_path: Path) -> sa.Engine:
    return sound_sqlite(tmp_path / "shop.db")


def doctor(*arguments: str) -> Result:
    return CliRunner().invoke(root, ["doctor", *arguments])


def url_of(engine: sa.Engine) -> str:
    return engine.url.render_as_string(hide_password=False)


def configured(folder: Path, *databases: tuple[str, str], more: Sequence[str] = ()) -> str:
    path = folder / "qmq.toml"
    lines = [*more]
    for name, url in databases:
        lines += ["[[database]]", f'name = "{name}"', f'url = "{url}"']
    path.write_text("\n".join(lines))
    return str(path)


def test_a_sound_database_of_each_kind_is_said_to_be_sound(a_database: Database) -> None:
    engine = a_database.engine(poolclass=NullPool)
    create_tables(engine)
    if a_database.kind == "sqlite":
        run(engine, "PRAGMA journal_mode = WAL")
    done = doctor("--database", a_database.url)
    assert done.exit_code == 0, done.output
    assert re.search(r": sound \(\d+ checks: tables \d, settings \d, .*\)\n\Z", done.output)


def test_a_finding_is_shown_with_its_fix_and_exit_code_1(shop: sa.Engine) -> None:
    run(shop, "PRAGMA journal_mode = DELETE")
    done = doctor("--database", url_of(shop))
    assert done.exit_code == 1
    assert done.output.splitlines()[0] == (
        "shop: risk S5 sqlite.journal_mode: journal_mode is delete"
    )
    assert "fix: PRAGMA journal_mode = WAL" in done.output


def test_json_for_programs(shop: sa.Engine) -> None:
    assert json.loads(doctor("--database", url_of(shop), "--json").output) == {
        "name": "shop",
        "ok": True,
        "findings": [],
    }
    run(shop, "DROP TABLE qmq_inbox")
    told = json.loads(doctor("--database", url_of(shop), "--json").output)
    assert (told["ok"], told["findings"][0]["severity"]) == (False, "breaks")
    assert set(told["findings"][0]) == {"id", "severity", "promise", "read", "meaning", "fix"}


def test_all_configured_databases_are_looked_at_though_one_is_away(
    shop: sa.Engine, tmp_path: Path
) -> None:
    away = f"sqlite:///{tmp_path}/nowhere.db"
    config = configured(tmp_path, ("away", away), ("shop", url_of(shop)))
    done = doctor("--config", config)
    assert done.exit_code == 3
    assert "shop: sound" in done.output
    assert "there is no file" in done.output
    assert not (tmp_path / "nowhere.db").exists()


def test_a_configured_broker_is_looked_at_and_the_built_in_address_is_not(
    shop: sa.Engine, tmp_path: Path
) -> None:
    config = configured(tmp_path, ("shop", url_of(shop)))
    assert doctor("--config", config).output == SOUND_SQLITE
    more = ["[broker]", f'url = "{NOBODY}"']
    config = configured(tmp_path, ("shop", url_of(shop)), more=more)
    done = doctor("--config", config)
    assert done.exit_code == 1
    assert "broker: risk O1 broker.unreachable" in done.output


def test_a_broker_that_is_configured_at_the_built_in_address_is_looked_at(
    shop: sa.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built_in = BrokerSection().url
    more = ["[broker]", f'url = "{built_in}"']
    config = configured(tmp_path, ("shop", url_of(shop)), more=more)
    assert "broker: " in doctor("--config", config).output
    monkeypatch.setenv("QMQ_BROKER_URL", built_in)
    assert "broker: " in doctor("--database", url_of(shop)).output


def test_the_broker_alone_and_nothing_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "broker.unreachable" in doctor("--broker", NOBODY).output
    assert doctor().exit_code == 2


def test_a_sound_broker_is_said_to_be_sound_and_what_was_asked(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "broker") as broker:
        done = doctor("--broker", broker.url)
    assert done.exit_code == 0, done.output
    assert done.output.startswith(
        "broker: sound (12 checks; of delayed messages and archives only "
    )


def test_every_check_is_counted_for_the_command_or_left_to_examine() -> None:
    counted = {where: checked_by_command(where) for where in ("mysql", "postgresql", "sqlite")}
    for where, counts in counted.items():
        listed = {check.id for check in CHECKS if where in check.where}
        left_out = {each for each in listed if each.startswith(("driver.", "pool."))}
        left_out |= listed & {"session.autocommit", "session.bind", "session.engines"}
        left_out |= {
            each for each in listed if each.startswith("sqlite.") and "journal" not in each
        }
        assert sum(counts.values()) == len(listed) - len(left_out), where


def test_settings_of_a_connection_are_left_to_the_application(shop: sa.Engine) -> None:
    """The command's own connection has the driver's, whatever the application sets."""
    assert doctor("--database", f"{url_of(shop)}?timeout=0").output == SOUND_SQLITE
