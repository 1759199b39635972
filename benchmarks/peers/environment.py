"""The environment of the other projects: made once under `.cache`, never the product's own.

Versions are fixed, so that a figure says what it ran.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from benchmarks.machine import ROOT

#: The projects with the drivers and the event loop that their documentation recommends.
REQUIREMENTS: Final = (
    "faststream-outbox[asyncpg]==0.19.0",
    "procrastinate==3.10.0",
    "pgqueuer[asyncpg]==1.6.0",
    "psycopg[binary,pool]>=3.2",
    "uvloop>=0.21",
)
DIRECTORY: Final = ROOT / ".cache" / "bench-peers"
_ERROR_CHARACTERS: Final = 2_000


class NoPeersError(Exception):
    """The other projects could not be installed; says what the installer said."""


def peers_python() -> str:
    """The interpreter that has them; installs them when they are not there yet."""
    python = DIRECTORY / "bin" / "python"
    stamp = DIRECTORY / "requirements.txt"
    wanted = "\n".join(REQUIREMENTS)
    if stamp.is_file() and stamp.read_text() == wanted and python.exists():
        return str(python)
    shutil.rmtree(DIRECTORY, ignore_errors=True)
    if uv := shutil.which("uv"):
        _run([uv, "venv", "--python", sys.executable, str(DIRECTORY)])
        _run([uv, "pip", "install", "--python", str(python), *REQUIREMENTS])
    else:
        _run([sys.executable, "-m", "venv", str(DIRECTORY)])
        _run([str(python), "-m", "pip", "install", "--quiet", *REQUIREMENTS])
    stamp.write_text(wanted)
    return str(python)


def _run(line: list[str]) -> None:
    done = subprocess.run(line, cwd=Path("/"), capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoPeersError(f"{' '.join(line)}: {done.stderr[-_ERROR_CHARACTERS:]}")
