"""The pages about producers and about moving in are one program each, and they run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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
