"""Ends what a process of the tests started and left running, however that process ended.

Fixtures end what they start. A worker that is killed runs no fixture, and its brokers, consumers and
watchdogs would go on for ever. So each process of pytest sets a mark in its environment, which everything
that it starts inherits; beside it stands a process of this module, run as a script, which needs the
standard library only. When the kernel tells it that the one beside it has ended, it kills whatever has
that mark. What is started detached (`launch.py`) loses the mark: the keeper and the servers that the
workers share end with the last worker, see `run.py`.

Linux only, where the kernel shows the environments of processes; elsewhere nothing is started.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_PROCESSES: Final = Path("/proc")
#: What was just killed may have started something; nobody does so for as long as this.
_LOOKS_MAX: Final = 100
_LOOK_S: Final = 0.05


def end_with_this_process() -> None:
    """From now on whatever this process starts, and leaves behind, ends with it."""
    if sys.platform != "linux":
        return
    from tests.services import launch  # late: a script has the standard library only

    mark = secrets.token_hex(8)
    script = [sys.executable, "-I", "-S", str(Path(__file__).resolve())]
    command = [*script, str(os.getpid()), f"{launch.MARK}={mark}"]
    line = launch.command_line(command, user=None, is_detached=True)
    subprocess.run(line, check=True, stdout=subprocess.DEVNULL)
    os.environ[launch.MARK] = mark


def wait_for_the_end(process: int) -> None:
    """Return when this process has ended."""
    try:
        descriptor = os.pidfd_open(process)
    except ProcessLookupError:
        return
    select.select([descriptor], [], [])


def kill_all(mark: str) -> None:
    """Kill every process with this mark, and what these start meanwhile."""
    for _ in range(_LOOKS_MAX):
        found = list(marked(mark))
        if not found:
            return
        for process in found:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(_LOOK_S)


def marked(mark: str) -> Iterator[int]:
    """The processes that have this mark, `NAME=value`; of those that we may see into."""
    for folder in _PROCESSES.iterdir():
        if not folder.name.isdigit():
            continue
        try:
            environment = (folder / "environ").read_bytes()
        except OSError:
            continue  # it has ended, or is another user's
        if mark.encode() in environment.split(b"\0"):
            yield int(folder.name)


if __name__ == "__main__":
    for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    wait_for_the_end(int(sys.argv[1]))
    kill_all(sys.argv[2])
