"""Who has not installed the extra is told so in a line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_WITHOUT = (
    "import sys; sys.modules['pyarrow'] = None; sys.argv = ['qmq', *sys.argv[1:]]; "
    "from qmq_client.cli import main; main()"
)


def qmq(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _WITHOUT, *arguments], capture_output=True, text=True
    )


@pytest.mark.parametrize("command", ["ingest", "marts", "report", "run"])
def test_without_the_extra_each_command_ends_with_one_line(command: str, tmp_path: Path) -> None:
    done = qmq("pipeline", command, "--tables", str(tmp_path / "tables"))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "not installed: pyarrow" in done.stderr
    assert 'pip install "qmq[pipeline]"' in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_help_needs_no_extra() -> None:
    done = qmq("pipeline", "report", "--help")
    assert done.returncode == 0
    assert "--out" in done.stdout
