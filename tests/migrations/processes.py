"""Migrations in processes of their own: to be killed, and to meet each other.

Run as `python -m tests.migrations.processes die URL …`: each URL is migrated by a child that kills
itself after as many statements as the URL has before it; or as `… migrate URL`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event

from qmq_migrations.upgrade import migrate
from tests.kit import warm

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 100.0
#: Statements that change nothing.
_READING = ("SELECT", "SHOW", "PRAGMA", "DESCRIBE", "BEGIN")


def start(role: str, *urls: str) -> warm.Process:
    """This module as a process."""
    return warm.start(["tests.migrations.processes", role, *urls], stdout=subprocess.PIPE)


def changes_of(engine: sa.Engine) -> list[str]:
    """The list that every statement which changes something is added to, once it was run."""
    changes: list[str] = []

    def note(_c: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if not statement.strip().upper().startswith(_READING):
            changes.append(statement)

    event.listen(engine, "after_cursor_execute", note)
    return changes


def _die_one_after_the_other(urls: list[str]) -> None:
    for count, url in enumerate(urls):
        child = os.fork()
        if not child:
            _die(url, count)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL, f"{count}: it was not killed"


def _die(url: str, count: int) -> None:
    engine = sa.create_engine(url)
    changes = changes_of(engine)

    def die(*_: Any) -> None:
        if len(changes) >= count:
            os.kill(os.getpid(), signal.SIGKILL)

    for moment in ("before_cursor_execute", "after_cursor_execute"):
        event.listen(engine, moment, die)
    migrate(engine)
    os._exit(1)


def _migrate(url: str) -> None:
    engine = sa.create_engine(url)
    print("ready", flush=True)
    done = migrate(engine)
    print(json.dumps([done.before, done.after]), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "die":
        _die_one_after_the_other(sys.argv[2:])
    else:
        _migrate(sys.argv[2])
