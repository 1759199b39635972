"""The root command: quick, lazy, one line for a foreseen error."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points, version

import click
import pytest
from click.testing import CliRunner

from qmq_client.commands import exit_codes
from qmq_client.commands.exit_codes import exit_code_of
from qmq_client.commands.listing import COMMANDS_GROUP, SUMMARIES, found_commands, help_text
from qmq_client.commands.root import root
from qmq_client.errors import (
    BrokerRefusedError,
    BrokerUnreachableError,
    ConfigurationError,
    DatabaseUnavailableError,
    InvalidNameError,
    OutboxMissingError,
    ProtocolError,
    QmqError,
)
from qmq_client.wire.requests import ErrorAnswer

#: Commands of this distribution; others may be installed beside it.
OURS = {
    point.name
    for point in entry_points(group=COMMANDS_GROUP)
    if point.dist is not None and point.dist.name == "qmq"
}


def qmq(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "qmq_client.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_help_lists_every_command_and_imports_none_of_them() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "qmq_client.cli", "--help"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0
    for name in found_commands():
        assert re.search(rf"^  {name} +\S", result.stdout, re.MULTILINE), name
    imported = set(re.findall(r"\| +([\w.]+)$", result.stderr, re.MULTILINE))
    assert "qmq_client.commands.listing" in imported
    heavy = {"click", "sqlalchemy", "alembic", "msgspec", "httpx", "qmq_broker", "qmq_watchdog"}
    assert not imported & heavy


@pytest.mark.parametrize(
    "arguments", [["send", "s", b"\xff"], ["message", "find", "--key", b"\xfe"]]
)
def test_an_argument_that_is_no_text_is_a_wrong_call(arguments: list[str | bytes]) -> None:
    command = [sys.executable, "-m", "qmq_client.cli", *arguments]
    result = subprocess.run(command, capture_output=True)
    assert result.returncode == exit_codes.WRONG_CALL
    assert b"is not UTF-8" in result.stderr
    assert b"Traceback" not in result.stderr


@pytest.mark.parametrize("arguments", [["config", "show"], ["--help"], ["--version"]])
def test_an_output_that_takes_nothing_is_reported_in_one_line(arguments: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "qmq_client.cli", *arguments]
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE)
    assert result.returncode == exit_codes.UNREACHABLE
    assert result.stderr == b"Error: [Errno 28] No space left on device\n"


def test_a_reader_that_went_away_is_no_error_to_tell() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as nobody:
        command = [sys.executable, "-m", "qmq_client.cli", "--help"]
        result = subprocess.run(command, stdout=nobody, stderr=subprocess.PIPE)
    assert (result.returncode, result.stderr) == (1, b"")


def test_a_body_from_a_closed_standard_input_is_a_wrong_call() -> None:
    command = f"{shlex.quote(sys.executable)} -m qmq_client.cli send s <&-"
    result = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert result.returncode == exit_codes.WRONG_CALL
    assert result.stderr.endswith("Error: standard input is closed: give BODY.\n")


@pytest.mark.parametrize("host", ["h" * 64, f"{'h' * 63}." * 5])
def test_a_host_that_no_name_may_have_is_a_wrong_call(host: str) -> None:
    result = qmq("subjects", "--broker", f"http://{host}:9470")
    assert result.returncode in (exit_codes.WRONG_CALL, exit_codes.UNREACHABLE)
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: ")


def test_version_is_that_of_the_distribution() -> None:
    result = qmq("--version")
    assert (result.returncode, result.stdout) == (0, f"qmq {version('qmq')} (codec: Python)\n")


def test_no_command_at_all_is_a_wrong_call_that_is_answered_with_help() -> None:
    result = qmq()
    assert result.returncode == 2
    assert "Commands:" in result.stdout


def test_a_misspelt_command_is_answered_with_a_suggestion() -> None:
    result = qmq("watchdgo", "run")
    assert result.returncode == 2
    assert "No command 'watchdgo'. Did you mean 'watchdog'?" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_foreseen_error_is_one_line_on_standard_error() -> None:
    result = qmq("db", "check", "--database", "nonsense://x")
    assert result.returncode == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: database.x.url: nonsense://x")


@pytest.mark.parametrize("name", sorted(OURS))
def test_every_command_of_ours_has_a_summary_and_can_be_loaded(name: str) -> None:
    assert name in SUMMARIES
    command = root.get_command(click.Context(root), name)
    assert command is not None
    assert command.help
    result = CliRunner().invoke(root, [name, "--help"])
    assert result.exit_code == 0, result.output


def every_command() -> Iterator[tuple[str, click.Command]]:
    """Each command and group of ours, with its name as it is typed."""
    below = [(name, root.get_command(click.Context(root), name)) for name in sorted(OURS)]
    while below:
        name, command = below.pop()
        assert command is not None
        yield name, command
        if isinstance(command, click.Group):
            below += [(f"{name} {one}", found) for one, found in command.commands.items()]


def test_every_option_of_every_command_says_what_it_is_for() -> None:
    silent = [
        f"{name} {option.opts[0]}"
        for name, command in every_command()
        for option in command.params
        if isinstance(option, click.Option) and not option.help
    ]
    assert not silent


def test_no_listing_of_commands_breaks_a_sentence_off() -> None:
    groups = [name for name, command in every_command() if isinstance(command, click.Group)]
    assert "broker token" in groups
    for name in groups:
        shown = CliRunner().invoke(root, [*name.split(), "--help"]).output
        assert "..." not in shown.partition("Commands:")[2], name


def test_help_inside_the_group_is_the_same_text() -> None:
    assert CliRunner().invoke(root, ["--help"]).output.strip() == help_text(found_commands())


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (ConfigurationError(setting="a", value="b", remedy="c"), exit_codes.WRONG_CALL),
        (InvalidNameError(field="a", limit="b", value="c", remedy="d"), exit_codes.WRONG_CALL),
        (OutboxMissingError("no table"), exit_codes.WRONG_CALL),
        (DatabaseUnavailableError("away"), exit_codes.UNREACHABLE),
        (BrokerUnreachableError("away"), exit_codes.UNREACHABLE),
        (BrokerRefusedError(422, ErrorAnswer(code="a", message="b")), exit_codes.WRONG_CALL),
        (BrokerRefusedError(409, ErrorAnswer(code="a", message="b")), exit_codes.ATTENTION),
        (ProtocolError("odd"), exit_codes.ATTENTION),
    ],
)
def test_every_kind_of_error_has_its_exit_code(error: QmqError, exit_code: int) -> None:
    assert exit_code_of(error) == exit_code
