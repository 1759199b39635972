"""The environments of the other projects: made once under `.cache`, never the product's own.

Versions are fixed, so that a figure says what it ran.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
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
#: Redis' client with its parser in C, which its documentation recommends.
REDIS: Final = ("redis==8.1.0", "hiredis==3.5.0")
#: Clients of the message systems, each the one that its project or its users recommend for speed.
CLIENTS: Final = (
    "confluent-kafka==2.16.1",
    *REDIS,
    "nats-py==2.16.0",
    "aio-pika==10.2.1",
    "rocketmq-python-client==5.1.2",
    "uvloop>=0.21",
)
DIRECTORY: Final = ROOT / ".cache" / "bench-peers"
CLIENTS_DIRECTORY: Final = ROOT / ".cache" / "bench-engines"
REDIS_DIRECTORY: Final = ROOT / ".cache" / "bench-redis"
_ERROR_CHARACTERS: Final = 2_000


class NoPeersError(Exception):
    """The other projects could not be installed; says what the installer said."""


def peers_python(requirements: Sequence[str] = REQUIREMENTS, directory: Path = DIRECTORY) -> str:
    """The interpreter that has them; installs them when they are not there yet."""
    python = directory / "bin" / "python"
    stamp = directory / "requirements.txt"
    wanted = "\n".join(requirements)
    if stamp.is_file() and stamp.read_text() == wanted and python.exists():
        return str(python)
    shutil.rmtree(directory, ignore_errors=True)
    if uv := shutil.which("uv"):
        _run([uv, "venv", "--python", sys.executable, str(directory)])
        _run([uv, "pip", "install", "--python", str(python), *requirements])
    else:
        # By the pip that is here: one of its own takes seconds, and so does bytecode that nothing runs.
        _run([sys.executable, "-m", "venv", "--without-pip", str(directory)])
        pip = [sys.executable, "-m", "pip", "--python", str(python)]
        _run([*pip, "install", "--quiet", "--no-compile", *requirements])
    stamp.write_text(wanted)
    return str(python)


def _run(line: list[str]) -> None:
    done = subprocess.run(line, cwd=Path("/"), capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoPeersError(f"{' '.join(line)}: {done.stderr[-_ERROR_CHARACTERS:]}")
