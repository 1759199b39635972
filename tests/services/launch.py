"""Become another program: as another user, dying with its parent or outliving it.

Run as a script, by path, before anything of the house is imported; needs the standard library only.
`--detached` prints the process's number and returns when it has become that program and has the mark no
more, which shows in /proc until then; without it the process is the program itself,
and on Linux the kernel kills it when the thread that started it is gone, however that ended.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import pwd
import signal
import sys
from pathlib import Path

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
#: Tells in a process's environment which process of the tests it is to end with; see `orphans.py`.
MARK = "STARTED_BY_QMQ_TESTS"


def command_line(command: list[str], *, user: str | None, is_detached: bool) -> list[str]:
    """The arguments that start `command` through this script."""
    options = ["--user", user] if user else []
    if is_detached:
        options.append("--detached")
    return [sys.executable, "-I", "-S", str(Path(__file__).resolve()), *options, "--", *command]


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--user")
    parser.add_argument("--detached", action="store_true")
    parser.add_argument("command", nargs="+")
    given = parser.parse_args()
    if given.user:
        _become(given.user)
    if given.detached:
        _detach()
    elif sys.platform == "linux":
        # After the change of user, which would clear it.
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    os.execvp(given.command[0], given.command)


def _become(user: str) -> None:
    entry = pwd.getpwnam(user)
    os.setgroups([])
    os.setgid(entry.pw_gid)
    os.setuid(entry.pw_uid)


def _detach() -> None:
    reading, writing = os.pipe()  # closed by what the process becomes
    number = os.fork()
    if number:
        os.close(writing)
        os.read(reading, 1)
        print(number, flush=True)
        os._exit(0)
    os.setsid()
    os.environ.pop(MARK, None)
    quiet = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):
        os.dup2(quiet, stream)


if __name__ == "__main__":
    _main()
