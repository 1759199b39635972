"""`qmq config show`: each value with its origin, no secret."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from qmq_client.commands.root import root


def test_every_value_is_shown_with_what_set_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "shop.toml"
    config.write_text('[[database]]\nname = "a"\nurl = "mysql://app:hunter2@db/shop"\n')
    monkeypatch.setenv("QMQ_WATCHDOG_POLL_S", "2.5")
    call = ["config", "show", "--config", str(config)]
    found = {
        row["setting"]: (row["value"], row["origin"])
        for row in json.loads(CliRunner().invoke(root, [*call, "--json"]).output)
    }
    assert found["watchdog.poll_s"] == (2.5, "QMQ_WATCHDOG_POLL_S")
    assert found["watchdog.batch_rows"] == (1_000, "built-in")
    assert found["database.a.url"] == ("mysql://app:***@db/shop", str(config))
    text = CliRunner().invoke(root, call).output
    assert "hunter2" not in text
    assert len(text.splitlines()) == len(found)


def test_the_file_may_be_named_by_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "shop.toml"
    config.write_text('[broker]\nurl = "http://shop:1"\n')
    monkeypatch.setenv("QMQ_CONFIG", str(config))
    assert "http://shop:1" in CliRunner().invoke(root, ["config", "show"]).output
