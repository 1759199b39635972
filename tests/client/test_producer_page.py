"""The page about producers is one program, and it runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.kit.broker_process import ROOT, BrokerProcess
from tests.tidy.markdown import blocks
from tests.tidy.readme_blocks import DOCUMENTED_ADDRESS

PAGE = ROOT / "docs" / "producer.md"
RUN_S_MAX = 60


def program() -> str:
    page = PAGE.read_text(encoding="utf-8")
    return "\n".join(block.text for block in blocks(page) if block.language == "python")


def test_the_programs_of_the_page_run(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "broker") as broker:
        text = program().replace(DOCUMENTED_ADDRESS, f"{broker.host}:{broker.port}")
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
    text = program()
    for name in ("dedupe_key", "order_by_key", "keep_sent_s", "cancel", "flush", "receipt"):
        assert name in text
