"""The list of `qmq`'s sub-commands, made from their names without importing them or click.

Also handles a standard output that cannot be written: its disk is full, or its reader has exited.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Final

COMMANDS_GROUP: Final = "qmq.commands"

#: One line for each command of this distribution; the command's own help would require an import.
SUMMARIES: Final[Mapping[str, str]] = {
    "broker": "Run the broker on a data directory.",
    "config": "Show every setting and where its value came from.",
    "consume": "Run the consumers of a module.",
    "dead": "List, show, replay or purge the dead letters of a group.",
    "db": "Create, upgrade or check the tables in an application's database.",
    "delayed": "List, show, cancel or reschedule delayed messages.",
    "doctor": "Find settings and states that endanger the guarantees, and say how to fix them.",
    "groups": "List consumer groups; pause, resume, seek or configure one.",
    "lag": "Show how far each group is behind, in messages and seconds.",
    "message": "Find messages at the broker by id, or by key and time; trace one.",
    "outbox": "List, show, retry or purge the rows of an outbox.",
    "send": "Send a message from the shell, without a transaction.",
    "pipeline": "Messages as tables: ingest, audit, report, replay (needs Spark).",
    "store": "Verify, read, rebuild, back up and restore a broker's data directory.",
    "subjects": "List the subjects of a broker, or remove one.",
    "tail": "Print the latest messages of a subject, and follow new ones.",
    "up": "Run a broker and a watchdog together.",
    "watchdog": "Send the outbox rows that crashed or slow processes left behind.",
}


def found_commands(group: str = COMMANDS_GROUP) -> dict[str, EntryPoint]:
    """Every installed command by name, including those of other distributions."""
    return {point.name: point for point in entry_points(group=group)}


def help_text(commands: Mapping[str, EntryPoint]) -> str:
    """The text of `qmq --help`."""
    width = max((len(name) for name in commands), default=0)
    lines = [
        f"  {name:<{width}}  {SUMMARIES.get(name, f'From {point.module}.')}"
        for name, point in sorted(commands.items())
    ]
    return "\n".join(
        [
            "Usage: qmq [--help | --version] COMMAND [ARGUMENT …]",
            "",
            "  Transactional messages: sent if and only if the database transaction commits.",
            "",
            "Commands:",
            *lines,
            "",
            "`qmq COMMAND --help` explains each. Exit codes, unless it says otherwise: 0 done, 1 something",
            "needs attention, 2 bad usage or configuration, 3 unreachable or temporarily unable.",
        ]
    )


def discard_output() -> None:
    """Discard the rest of the output.

    Otherwise the interpreter tries to write it again when it exits, prints that this fails, and
    since Python 3.12 returns an exit code of its own.
    """
    with contextlib.suppress(io.UnsupportedOperation):  # a caller's stream, which is not a file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
