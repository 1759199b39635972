"""docs/testing.md is one file of tests, and they pass."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.kit.broker_process import ROOT
from tests.tidy.markdown import blocks

PAGE: Final = ROOT / "docs" / "testing.md"
RUN_S_MAX: Final = 100


def program() -> str:
    page = PAGE.read_text(encoding="utf-8")
    return "\n".join(block.text for block in blocks(page) if block.language == "python")


def run(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "test_page.py").write_text(text)
    options = [
        "-q",
        "-W",
        "error",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:asyncio",
        "--rootdir",
        str(folder),
    ]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-c", "/dev/null", str(folder / "test_page.py")],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=RUN_S_MAX,
    )


def test_the_tests_of_the_page_pass(tmp_path: Path) -> None:
    text = program()
    count = len(re.findall(r"^def test_", text, re.MULTILINE))
    ran = run(text, tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert count >= 6
    assert f"{count} passed" in ran.stdout


def test_a_planted_mistake_in_the_page_is_found(tmp_path: Path) -> None:
    text = program().replace("session.rollback()\n    assert", "session.commit()\n    assert")
    assert text != program()
    assert run(text, tmp_path).returncode == 1
