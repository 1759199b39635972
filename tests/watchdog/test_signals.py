"""The daemon as a process: SIGHUP, a second signal to stop, `--once`."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
from click.testing import CliRunner

from qmq_client.commands.root import root
from qmq_watchdog.databases import Database
from tests.kit import warm
from tests.kit.broker_process import BrokerProcess
from tests.kit.waiting import DEADLINE_S
from tests.watchdog.rows import left, make_database, put_rows

COMMAND = ["qmq_client.cli", "watchdog", "run"]


def wait_for(log: IO[str], text: str) -> str:
    """The first line with this text; the process's end is the deadline of this test's runner."""
    for line in log:
        if text in line:
            return line
    raise AssertionError(f"the daemon ended without {text!r}")


def configure(path: Path, broker_url: str, databases: list[Database]) -> None:
    tables = [
        f'[[database]]\nname = "{each.name}"\nurl = "{each.engine.url}"' for each in databases
    ]
    path.write_text("\n".join([f'[broker]\nurl = "{broker_url}"', *tables]))


@pytest.fixture
def two(tmp_path: Path) -> Iterator[list[Database]]:
    made = [make_database(tmp_path / f"{name}.db") for name in ("orders", "stock")]
    yield made
    for database in made:
        database.close()


def test_SIGHUP_takes_the_databases_of_the_configuration_as_it_is_now(
    two: list[Database], tmp_path: Path, broker_process: BrokerProcess
) -> None:
    path = tmp_path / "qmq.toml"
    configure(path, broker_process.url, two[:1])
    put_rows(two[1], 2)
    daemon = warm.start([*COMMAND, "--config", str(path)], stderr=subprocess.PIPE)
    assert daemon.stderr is not None
    try:
        wait_for(daemon.stderr, "watchdog.started databases=orders")
        path.write_text("[[database]]\nname = 1")
        daemon.send_signal(signal.SIGHUP)
        assert "name 1" in wait_for(daemon.stderr, "config.refused")
        configure(path, broker_process.url, two[1:])
        daemon.send_signal(signal.SIGHUP)
        wait_for(daemon.stderr, "database.removed database=orders")
        wait_for(daemon.stderr, "database.added database=stock")
        wait_for(daemon.stderr, "sweep.done database=stock claimed=2 sent=2")
    finally:
        daemon.send_signal(signal.SIGTERM)
        daemon.communicate(timeout=DEADLINE_S)
    assert daemon.returncode == 0
    assert left(two[1]) == set()


def test_F38_a_second_signal_ends_a_daemon_that_waits_for_a_sweep(
    two: list[Database], tmp_path: Path
) -> None:
    put_rows(two[0], 1)
    with socket.create_server(("127.0.0.1", 0)) as silent_broker:
        path = tmp_path / "qmq.toml"
        configure(path, f"http://127.0.0.1:{silent_broker.getsockname()[1]}", two[:1])
        command = [*COMMAND, "--config", str(path), "--log-level", "debug"]
        daemon = warm.start(command, stderr=subprocess.PIPE)
        assert daemon.stderr is not None
        connection, _ = silent_broker.accept()
        daemon.send_signal(signal.SIGTERM)
        # It says nothing while it waits; the second signal is sent until it has seen the first.
        reader = threading.Thread(target=daemon.stderr.read)
        reader.start()
        while daemon.poll() is None:
            daemon.send_signal(signal.SIGINT)  # whichever of the two it is
            reader.join(0.1)
        reader.join(DEADLINE_S)
        connection.close()
        daemon.stderr.close()
    assert daemon.returncode in (-signal.SIGINT, 1)
    assert len(left(two[0])) == 1, "the row is only claimed, and falls due again"


def test_run_once_is_the_same_as_sweep(database: Database, broker_process: BrokerProcess) -> None:
    put_rows(database, 3)
    call = ["watchdog", "run", "--once", "--json", "--log-level", "error"]
    call += ["--database", str(database.engine.url), "--broker", broker_process.url]
    result = CliRunner().invoke(root, call)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["sent"] == 3
