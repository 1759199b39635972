"""The page about commands: every line of it runs, and its exit codes are the code's own."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
from click.testing import CliRunner

from qmq_client import pull
from qmq_client.commands import exit_codes
from qmq_client.commands.root import root
from tests.kit.broker_process import ROOT, BrokerProcess
from tests.tidy.markdown import blocks

PAGE = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
PLACEHOLDER = "0123456789abcdef0123456789abcdef"
#: Commands that are run where the broker's files are.
BESIDE_IT = {"serve", "token"}


def commands() -> list[list[str]]:
    console = [block.text for block in blocks(PAGE) if block.language == "console"]
    lines = [line for text in console for line in text.splitlines()]
    assert all(line.startswith("$ qmq ") for line in lines)
    return [shlex.split(line.removeprefix("$ qmq ")) for line in lines]


def test_every_line_of_the_page_runs_in_its_order(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data") as broker:

        def qmq(*words: str) -> str:
            ended = CliRunner().invoke(root, [*words], env={"QMQ_BROKER_URL": broker.url})
            assert ended.exit_code == 0, (words, ended.output, ended.exception)
            return ended.stdout

        message_id = qmq("send", "order.placed", "the first, a dead letter").strip()
        with pull(broker.url, subject="order.placed", group="audit", wait_s=10) as (delivery,):
            delivery.reject("for the page")
        for words in commands():
            qmq(*[message_id if word == PLACEHOLDER else word for word in words])


def test_the_exit_codes_of_the_page_are_those_of_the_code() -> None:
    told = {int(number) for number in re.findall(r"^\| (\d) \|", PAGE, re.MULTILINE)}
    values = {
        exit_codes.DONE,
        exit_codes.ATTENTION,
        exit_codes.WRONG_CALL,
        exit_codes.UNREACHABLE,
    }
    assert told == values


def test_every_command_that_asks_a_broker_is_on_the_page() -> None:
    named = {words[0] for words in commands()}
    assert named == {"send", "subjects", "tail", "groups", "lag", "dead", "message", "broker"}
    for group in ("groups", "dead", "message", "broker"):
        command = root.commands.get(group) or root.get_command(click.Context(root), group)
        known = set(getattr(command, "commands", {})) - BESIDE_IT
        told = {word for word in known if re.search(rf"`?{group} {word}\b|`{word}`", PAGE)}
        assert told == known, group
