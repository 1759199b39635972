"""The process that outlives a run's workers, ends what they started and removes their folder.

Run as a script, with the folder; needs the standard library only. See `run.py`.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

PYTHON = Path(sys.executable)
_STOP_S_MAX = 5.0
_LOOK_S = 0.05


def wait_for_the_last(folder: Path) -> None:
    """Return when no worker is left, with everything ended and the folder gone."""
    with (folder / "holders").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for path in sorted(folder.glob("*.json")):
            facts = json.loads(path.read_text())
            if "process" in facts:
                end(facts["process"], str(folder))
            if "container" in facts:
                subprocess.run(
                    ["docker", "rm", "--force", "--volumes", facts["container"]],
                    check=False,
                    stdout=subprocess.DEVNULL,
                )
        for data in folder.glob("*/data"):
            free_memory(data)
        shutil.rmtree(folder, ignore_errors=True)


def free_memory(data: Path) -> None:
    """Give back what a PostgreSQL that was killed, and never started again, holds in the kernel."""
    try:
        lines = (data / "postmaster.pid").read_text().splitlines()
        segment = lines[6].split()[1]  # the seventh line: key and number of the segment
    except (OSError, IndexError):
        return
    if shutil.which("ipcrm"):
        subprocess.run(["ipcrm", "-m", segment], check=False, capture_output=True)


def end(number: int, folder: str) -> None:
    """Stop a server, kindly and then by force; a number that became another's is left alone."""
    # PostgreSQL's «smart» shutdown at SIGTERM would wait for every client, its «fast» one does not.
    for kind in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL):
        ends_at = time.monotonic() + _STOP_S_MAX
        while is_ours(number, folder) and time.monotonic() < ends_at:
            with suppress(ProcessLookupError):  # it has ended since that look
                os.kill(number, kind)
            time.sleep(_LOOK_S)


def is_ours(number: int, folder: str) -> bool:
    """Tell whether this process lives and was started with a path in our folder."""
    line = subprocess.run(
        ["ps", "-ww", "-o", "stat=,args=", "-p", str(number)],
        check=False,
        capture_output=True,
        text=True,
    )
    state, _, command = line.stdout.strip().partition(" ")
    return folder in command and not state.startswith("Z")


if __name__ == "__main__":
    for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    wait_for_the_last(Path(sys.argv[1]))
