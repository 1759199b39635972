"""docs/services.md tells the truth: systemd takes its units, and their times and exit codes are ours."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from qmq_broker.face.commands.broker import broker
from qmq_broker.face.exit_codes import ExitCode
from qmq_client.commands.consume import consume
from tests.conftest import require_program
from tests.tidy.markdown import blocks

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "services.md").read_text(encoding="utf-8")
PROGRAM = "/opt/shop/bin/qmq"
BROKER, CONSUMERS = (block.text for block in blocks(PAGE) if block.language == "ini")


def setting(unit: str, name: str) -> str:
    (value,) = re.findall(rf"^{name}=(.*)$", unit, re.MULTILINE)
    return str(value)


def called(unit: str, command: click.Command) -> dict[str, object]:
    """The options of the unit's call, as the command reads them."""
    program, *words = shlex.split(setting(unit, "ExecStart"))
    assert program == PROGRAM
    group, *words = words
    if isinstance(command, click.Group):
        command, words = command.commands[words[0]], words[1:]
    assert (group, command.name) in (("broker", "serve"), ("consume", "consume"))
    return command.make_context(group, words).params


@pytest.mark.parametrize("unit", [BROKER, CONSUMERS], ids=["broker", "consumers"])
def test_systemd_takes_the_unit_and_would_say_what_is_wrong_in_it(
    tmp_path: Path, unit: str
) -> None:
    analyze = require_program("systemd-analyze", "systemd")
    path = tmp_path / "qmq-of-the-page.service"
    program = tmp_path / "qmq"  # systemd wants a path without blanks; pytest's are
    program.symlink_to(Path(sys.executable).with_name("qmq"))
    here = unit.replace(PROGRAM, str(program))
    for text, is_sound in ((here, True), (here.replace("Restart=", "Restart=x"), False)):
        path.write_text(text)
        done = subprocess.run([analyze, "verify", str(path)], capture_output=True, text=True)
        assert (path.stem not in done.stderr) == is_sound, done.stderr


def test_the_broker_is_given_longer_than_its_stop_takes_and_is_left_alone_where_that_is_right() -> (
    None
):
    drain_ms = called(BROKER, broker)["drain_ms"]
    assert isinstance(drain_ms, int)
    assert int(setting(BROKER, "TimeoutStopSec")) * 1000 > drain_ms
    assert f"`--drain-ms` ({drain_ms // 1000} s)" in PAGE
    left_alone = {int(code) for code in setting(BROKER, "RestartPreventExitStatus").split()}
    assert set(ExitCode) - left_alone == {ExitCode.OK, ExitCode.UNCLEAN, ExitCode.POISONED}


def test_consumers_are_given_longer_than_their_stop_takes() -> None:
    deadline_s = called(CONSUMERS, consume)["stop_deadline_s"]
    assert isinstance(deadline_s, float | int)
    assert int(setting(CONSUMERS, "TimeoutStopSec")) > deadline_s
    assert f"{deadline_s:g} s (`--stop-deadline`)" in PAGE
