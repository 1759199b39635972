"""Which sub-commands `qmq` has, from names alone: nothing of them is imported, nor is click."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Final

COMMANDS_GROUP: Final = "qmq.commands"

#: One line for each of our own commands; asking the command itself would import it.
SUMMARIES: Final[Mapping[str, str]] = {
    "broker": "Run the broker on a data directory.",
    "config": "Show every setting and where its value came from.",
    "consume": "Run the consumers of a module.",
    "dead": "List, show, replay or purge the dead letters of a group.",
    "db": "Create, check or print the tables in a business database.",
    "delayed": "List, show, cancel or put off messages that wait for their time.",
    "doctor": "Say what breaks promises in a database, and what mends it.",
    "groups": "List consumer groups; pause, resume, move or configure one.",
    "lag": "Say how far each group is behind, in messages and in seconds.",
    "message": "Find messages at the broker by id, or by key and time; tell their story.",
    "outbox": "Look after the rows that wait in an outbox.",
    "send": "Send a message from the shell, without a transaction.",
    "pipeline": "Messages as tables: ingest, audit, report, replay (needs Spark).",
    "store": "Verify, read, rebuild, back up and restore a broker's data directory.",
    "subjects": "List the subjects of a broker.",
    "tail": "Print the last messages of a subject, and those to come.",
    "watchdog": "Send the outbox rows that a dead or slow process left behind.",
}


def found_commands(group: str = COMMANDS_GROUP) -> dict[str, EntryPoint]:
    """Every installed command by name, ours and those of other distributions."""
    return {point.name: point for point in entry_points(group=group)}


def help_text(commands: Mapping[str, EntryPoint]) -> str:
    """What `qmq --help` prints."""
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
            "`qmq COMMAND --help` says more. Exit codes, unless that says otherwise: 0 done, 1 something",
            "needs attention, 2 a wrong call or configuration, 3 not reachable or not now.",
        ]
    )
