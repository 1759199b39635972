"""`qmq tail SUBJECT`: messages as they are stored, without a group and without taking any.

A look from outside: nothing is leased, and no group moves.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import click

from qmq_client.clock import SYSTEM_CLOCK
from qmq_client.commands.broker_json import broker_address, broker_options, get_json
from qmq_client.commands.message_view import body_text
from qmq_client.commands.table import printable, time_text
from qmq_client.errors import BrokerRefusedError
from qmq_client.transport.address import BrokerAddress

#: Of one request.
_COUNT_MAX: Final = 500
#: Between looks at a subject that has nothing new.
_LOOK_S: Final = 0.5


@click.command()
@click.argument("subject")
@click.option(
    "-n",
    "--count",
    type=click.IntRange(0),
    default=10,
    show_default=True,
    help="Messages at most; with --follow before those to come.",
)
@click.option("--first", type=click.IntRange(0), help="From this sequence on, and not the last.")
@click.option("-f", "--follow", is_flag=True, help="Go on with what is stored from now on.")
@broker_options
def tail(
    *,
    subject: str,
    count: int,
    first: int | None,
    follow: bool,
    broker: str | None,
    config_file: Path | None,
    as_json: bool,
) -> None:
    """Print the last messages of SUBJECT, oldest first; with --json one object on each line.

    Exit code 1 when there is no such subject; with --follow it is waited for.
    """
    address = broker_address(broker, config_file)
    place = _end(address, subject) - count if first is None else first
    place, left = max(0, place), None if follow else count
    while left is None or left > 0:
        asked = _COUNT_MAX if left is None else min(left, _COUNT_MAX)
        messages = _messages(address, subject, place, asked, is_awaited=follow)
        for found in messages:
            click.echo(_line({"subject": subject, **found}, as_json))
        if messages:
            place = messages[-1]["sequence"] + 1
            left = None if left is None else left - len(messages)
        elif not follow:
            break
        else:
            SYSTEM_CLOCK.sleep(_LOOK_S)


def _end(address: BrokerAddress, subject: str) -> int:
    subjects = get_json(address, "/v1/subjects", {}, known=("subjects",))["subjects"]
    return next((one["next_sequence"] for one in subjects if one["subject"] == subject), 0)


def _messages(
    address: BrokerAddress, subject: str, first: int, count: int, *, is_awaited: bool
) -> list[dict[str, Any]]:
    question = {"subject": subject, "first": first, "count": count}
    try:
        found = get_json(address, "/v1/messages", question, known=("messages",))["messages"]
    except BrokerRefusedError as error:
        if is_awaited and error.status == 404:
            return []
        raise
    return list(found)


def _line(found: dict[str, Any], as_json: bool) -> str:
    if as_json:
        return json.dumps(found, ensure_ascii=False)
    born = time_text(found["born_at_ms"]) if "born_at_ms" in found else "?"
    key = f" key={found['key']}" if found.get("key") else ""
    tags = f" tags={','.join(found['tags'])}" if found.get("tags") else ""
    identity = found.get("message_id") or "?"
    return printable(f"{found['sequence']} {born} {identity}{key}{tags} {body_text(found)}")
