"""The pages about consumers are one program, and it runs; its table and its lists are the code's own."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from qmq_client.commands.consume import consume
from qmq_client.consumer import counters, options
from qmq_client.consumer.options import ConsumerOptions
from tests.kit.broker_process import ROOT, BrokerProcess
from tests.tidy.markdown import blocks
from tests.tidy.readme_blocks import DOCUMENTED_ADDRESS

#: What a reader goes through in this order.
PAGES = ("consumer.md", "consumer-reference.md", "consumer-behaviour.md")
PAGE = "\n".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in PAGES)
RUN_S_MAX = 120
#: Of `@consumer` itself, not of `ConsumerOptions`.
OWN = {"inbox": "None", "on_stale": "None", "middleware": "()"}


def program() -> str:
    return "\n".join(block.text for block in blocks(PAGE) if block.language == "python")


def commands() -> list[str]:
    console = [block.text for block in blocks(PAGE) if block.language == "console"]
    return [line.removeprefix("$ ") for text in console for line in text.splitlines()]


def rows_of_settings() -> dict[str, list[str]]:
    """The cells behind the name, by name."""
    table = PAGE.partition("| setting |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()[2:]]
    return {row[0].strip("`"): row[1:] for row in rows}


def run(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    with BrokerProcess(folder / "broker") as broker:
        return subprocess.run(
            [
                sys.executable,
                "-W",
                "error",
                "-c",
                text.replace(DOCUMENTED_ADDRESS, f"{broker.host}:{broker.port}"),
            ],
            cwd=folder,
            env={"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=RUN_S_MAX,
            check=False,
        )


def test_the_programs_of_the_page_run(tmp_path: Path) -> None:
    ran = run(program(), tmp_path)
    assert ran.returncode == 0, ran.stderr
    lines = ran.stderr.splitlines()
    dead = [line for line in lines if line.startswith("dead_letter ")]
    assert [line.partition("error=")[2].partition(":")[0] for line in dead] == [
        "malformed",
        "a payment without an order",
        "a parcel without a weight",
    ]
    others = [line for line in lines if line not in dead and not line.startswith("  ")]
    names = [line.partition(" ")[0] for line in others]
    assert names == ["malformed_message", "handler_failed"], others
    assert "caused by ConnectionError: the mail server hung up" in others[1]


def test_every_setting_is_in_the_table_with_its_default_and_its_range() -> None:
    rows = rows_of_settings()
    defaults = {each.name: each.default for each in fields(ConsumerOptions)}
    assert rows.keys() == (defaults.keys() - {"subject", "group"}) | OWN.keys()
    for name, (default, allowed, _) in rows.items():
        if name in OWN:
            assert default == OWN[name]
            continue
        assert default.strip('"').replace(",", "") == str(defaults[name]), name
        if name in options._RANGES:
            lowest, highest = options._RANGES[name]
            assert allowed == f"{lowest:,} to {highest:,}", name


def test_everything_that_is_counted_is_on_the_page() -> None:
    listed = PAGE.partition("counts, for each handler:")[2].partition("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", listed)) == set(counters.NAMES)


@pytest.mark.parametrize("line", commands())
def test_every_command_of_the_page_is_one(line: str) -> None:
    program, command, *words = shlex.split(line)
    assert (program, command) == ("qmq", "consume")
    consume.make_context("consume", words)
