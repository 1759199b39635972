"""Consumers as a process: signals, and the command that runs handlers of a module."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from qmq_client.commands.consume import consume
from qmq_client.errors import ConfigurationError
from tests.client.consumer.kit import WAIT_S
from tests.kit.waiting import wait_for

PROGRAM = """
import signal, sys, threading
from qmq_client import Consumers, Message, consumer
from qmq_client.testing import MemoryBroker, MemoryTransport

broker = MemoryBroker()
broker.put(Message("orders", 1))
hangs = sys.argv[-1] == "hang"

@consumer("orders", group="audit")
def handler(body: int) -> None:
    print("begun", flush=True)
    threading.Event().wait(60 if hangs else 0.3)
    print("finished", flush=True)

signal.signal(signal.SIGTERM, signal.SIG_IGN)  # after the run; a late one must change nothing
report = Consumers([handler], MemoryTransport(broker)).run(stop_deadline_s=50)
print(report.is_clean, broker.lag("orders", "audit"), flush=True)
"""


def started(kind: str) -> subprocess.Popen[str]:
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, kind], stdout=subprocess.PIPE, text=True
    )
    assert program.stdout is not None
    assert program.stdout.readline() == "begun\n"
    return program


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_F38_C8_a_signal_lets_the_handler_finish_and_ends_the_process_well(number: int) -> None:
    program = started("short")
    os.kill(program.pid, number)
    output, _ = program.communicate(timeout=WAIT_S)
    assert (output, program.returncode) == ("finished\nTrue 0\n", 0)


def test_F38_C8_a_second_signal_does_not_wait_for_the_handler() -> None:
    program = started("hang")

    def has_ended() -> bool:
        """Asked for again and again: two signals that come together are one."""
        if program.poll() is None:
            os.kill(program.pid, signal.SIGTERM)
        return program.poll() is not None

    wait_for(has_ended)
    output, _ = program.communicate(timeout=WAIT_S)
    assert output == "False 1\n"
    # A further signal of the loop may meet the process after `run` gave the signals back.
    assert program.returncode in (0, -signal.SIGTERM)


def test_the_command_runs_the_handlers_of_a_module_until_a_signal(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(PROGRAM.partition("signal.signal")[0] + COMMAND_TAIL)
    program = subprocess.Popen(
        [sys.executable, "-c", COMMAND, "shop:consumers", "--json"],
        stdout=subprocess.PIPE,
        cwd=tmp_path,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert program.stdout is not None
    assert program.stdout.readline() == "begun\n"
    os.kill(program.pid, signal.SIGTERM)
    output, _ = program.communicate(timeout=WAIT_S)
    finished, told = output.splitlines()
    assert (finished, program.returncode) == ("finished", 0)
    ended = json.loads(told)
    assert (ended["is_clean"], ended["running"], ended["unsettled"]) == (True, 0, 0)
    assert ended["handlers"]["orders/audit"]["acked"] == 1


@pytest.mark.parametrize("option", ["--broker", "--consumer-id"])
def test_what_a_consumers_has_already_is_refused(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shop_with_all.py").write_text(PROGRAM.partition("signal.signal")[0] + COMMAND_TAIL)
    monkeypatch.syspath_prepend(tmp_path)
    given = CliRunner().invoke(consume, ["shop_with_all:consumers", option, "one"])
    assert isinstance(given.exception, ConfigurationError)
    assert str(given.exception).startswith(f"{option}: ")


def test_the_command_logs_nothing_of_each_request_and_as_much_as_asked() -> None:
    command = """
import logging
from qmq_client.commands.logs import log_to_stderr
log_to_stderr("debug")
logging.getLogger("httpx").info("a request")
logging.getLogger("qmq").debug("ours")
"""
    ended = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True)
    assert "a request" not in ended.stderr
    (line,) = (line for line in ended.stderr.splitlines() if "ours" in line)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z DEBUG qmq ours", line), (
        "as the lines of the broker"
    )


COMMAND = "from qmq_client.commands.consume import consume; consume()"
COMMAND_TAIL = """
consumers = Consumers([handler], MemoryTransport(broker))
"""


@pytest.mark.parametrize(
    ("target", "named"),
    [
        ("no_such_module", "no_such_module"),
        ("json:nothing", "nothing"),
        ("json", "no handler"),
        (":x", ":x"),
        ("hh.py", "without .py: hh"),
    ],
)
def test_a_target_without_handlers_is_refused_by_name(target: str, named: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", COMMAND, target],
        check=False,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert named in ended.stderr
    assert "ConfigurationError" in ended.stderr
