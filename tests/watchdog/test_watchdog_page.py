"""docs/watchdog.md tells the truth: its commands, its configuration, its crontab line and its unit."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from apscheduler.triggers.cron import CronTrigger

from qmq_client.commands.outbox import outbox
from qmq_client.settings.config import DATABASES_MAX, load_config
from qmq_client.settings.sections import RegistrySection, WatchdogSection
from qmq_watchdog.cli import watchdog
from qmq_watchdog.daemon import Daemon
from qmq_watchdog.endpoint import Endpoint, Health
from tests.conftest import require_program

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "watchdog.md").read_text(encoding="utf-8")
GROUPS: dict[str, click.Group] = {"watchdog": watchdog, "outbox": outbox}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    return [line.removeprefix("$ ") for block in blocks("console") for line in block.splitlines()]


def parse(words: list[str]) -> None:
    """Let click parse a call of `qmq`, to the last option, and not run it."""
    command: click.Command = GROUPS[words[0]]
    words = words[1:]
    while isinstance(command, click.Group):
        command = command.commands[words[0]]
        words = words[1:]
    command.make_context("qmq", list(words))


def config_file_variable() -> object:
    """What stands for `--config`."""
    sweep = GROUPS["watchdog"].commands["sweep"]
    return next(option.envvar for option in sweep.params if "--config" in option.opts)


@pytest.mark.parametrize("line", commands())
def test_every_command_of_the_page_is_one(line: str) -> None:
    program, *words = shlex.split(line)
    assert program == "qmq"
    parse(words)


def test_a_planted_option_that_is_none_is_found() -> None:
    with pytest.raises(click.UsageError):
        parse(["watchdog", "sweep", "--colour"])


def test_the_crontab_line_is_one() -> None:
    (block,) = blocks("cron")
    setting, line = block.splitlines()
    assert shlex.split(setting) == [f"{config_file_variable()}=/etc/qmq/qmq.toml"]
    schedule, command = line.split(maxsplit=5)[:5], line.split(maxsplit=5)[5]
    CronTrigger.from_crontab(" ".join(schedule))
    assert "%" not in command, "cron makes a new line of it"
    program, *words = shlex.split(command.partition(">")[0])
    assert Path(program).name == "qmq"
    parse(words)
    section = WatchdogSection()
    assert section.sweep_s_max + section.stop_s < 60, "passes of a minute's crontab do not pile up"


def test_the_systemd_unit_is_one(tmp_path: Path) -> None:
    analyze = require_program("systemd-analyze", "systemd")
    (unit,) = blocks("ini")
    stop_s = int(re.findall(r"TimeoutStopSec=(\d+)", unit)[0])
    assert stop_s > WatchdogSection().stop_s
    ours = str(Path(sys.executable).with_name("qmq"))
    path = tmp_path / "qmq-watchdog.service"
    path.write_text(unit.replace("/opt/shop/bin/qmq", ours))
    done = subprocess.run([analyze, "verify", str(path)], capture_output=True, text=True)
    faults = [line for line in done.stderr.splitlines() if "qmq-watchdog" in line]
    assert faults == []
    path.write_text(unit.replace("Restart=always", "Restart=sometimes"))
    done = subprocess.run([analyze, "verify", str(path)], capture_output=True, text=True)
    assert "sometimes" in done.stderr, "a planted fault is found"


def test_the_configuration_of_the_page_loads_and_its_defaults_are_ours(tmp_path: Path) -> None:
    (text,) = blocks("toml")
    path = tmp_path / "qmq.toml"
    path.write_text(text)
    config = load_config(environment={}, file=path).config
    assert [section.name for section in config.databases] == ["orders", "stock"]
    assert f"up to {DATABASES_MAX:,} of them" in PAGE
    section = WatchdogSection()
    for name, shown in re.findall(r"`(\w+)` \((\d+)(?: s)?\)", PAGE):
        assert getattr(section, name) == float(shown), name
    assert f"({RegistrySection().refresh_s:g} s)" in PAGE


def test_every_metric_is_in_the_page_and_every_one_of_the_page_exists() -> None:
    daemon = Daemon()
    from prometheus_client import CollectorRegistry

    from qmq_watchdog.collector import WatchdogCollector
    from qmq_watchdog.databases import ConnectionBudget

    registry = CollectorRegistry()
    registry.register(WatchdogCollector(daemon, ConnectionBudget(1)))
    ours = {
        f"{metric.name}_total" if metric.type == "counter" else metric.name
        for metric in registry.collect()
    }
    table = PAGE.partition("| metric |")[2].partition("\n\n")[0]
    names = {
        f"qmq_watchdog_{name}"
        for row in table.splitlines()
        for name in re.findall(r"`(\w+)`", row.split("|")[1] if row.count("|") > 2 else "")
    }
    assert names == ours


def test_the_port_of_the_page_serves_when_it_is_asked_to() -> None:
    daemon = Daemon()
    endpoint = Endpoint("127.0.0.1:0", daemon, Health(daemon))
    endpoint.start()
    endpoint.close()
