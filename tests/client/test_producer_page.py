"""The pages about producers and about moving in are one program each, and they run."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import qmq_client
from qmq_client import Message, ProducerOptions, PublisherStats, options
from qmq_client.errors import QmqError
from tests.kit.broker_process import ROOT, BrokerProcess
from tests.tidy.markdown import blocks
from tests.tidy.readme_blocks import DOCUMENTED_ADDRESS

DOCS = ROOT / "docs"
RUN_S_MAX = 60


def program(name: str) -> str:
    page = (DOCS / name).read_text(encoding="utf-8")
    return "\n".join(block.text for block in blocks(page) if block.language == "python")


@pytest.mark.parametrize("page", ["producer.md", "moving.md"])
def test_the_programs_of_the_page_run(tmp_path: Path, page: str) -> None:
    with BrokerProcess(tmp_path / "broker") as broker:
        text = program(page).replace(DOCUMENTED_ADDRESS, f"{broker.host}:{broker.port}")
        ran = subprocess.run(
            [sys.executable, "-W", "error", "-c", text],
            cwd=tmp_path,
            env={"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=RUN_S_MAX,
            check=False,
        )
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""


def test_the_page_shows_what_it_speaks_of() -> None:
    text = program("producer.md")
    for name in ("dedupe_key", "order_by_key", "keep_sent_s", "cancel", "flush", "receipt"):
        assert name in text


def rows_of(head: str) -> dict[str, list[str]]:
    """The cells behind the first one of each row, by each name in that."""
    page = (DOCS / "producer.md").read_text(encoding="utf-8")
    table = page.partition(f"| {head} |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()[2:]]
    return {name: row[1:] for row in rows for name in re.findall(r"`(\w+)`", row[0])}


def test_every_field_of_a_message_is_in_the_table() -> None:
    assert rows_of("field").keys() == set(Message.__struct_fields__)


def test_every_setting_is_in_the_table_with_its_default_and_its_range() -> None:
    rows = rows_of("setting")
    assert rows.keys() == {each.name for each in fields(ProducerOptions)}
    for name, (default, allowed, _) in rows.items():
        value = getattr(ProducerOptions(), name)
        plain = f"`{type(value).__name__}()`" if name in ("backoff", "limits") else str(value)
        assert default.strip('"').replace(",", "") == plain, name
        if name in options._RANGES:
            lowest, highest = options._RANGES[name]
            assert allowed == f"{lowest:,} to {highest:,}", name


def test_everything_that_is_counted_is_on_the_page() -> None:
    page = " ".join((DOCS / "producer.md").read_text(encoding="utf-8").split())
    listed = page.partition("counts messages since the process began:")[2].partition(
        "Parked messages"
    )[0]
    assert set(re.findall(r"`(\w+)`", listed)) == {each.name for each in fields(PublisherStats)}


def test_every_error_of_the_table_is_one_that_an_application_can_name() -> None:
    for name in rows_of("Error"):
        assert issubclass(getattr(qmq_client, name), QmqError)
