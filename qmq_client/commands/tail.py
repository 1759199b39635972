"""`qmq tail SUBJECT`: prints stored messages without a consumer group.

It only reads: no message is leased, and no group moves.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import click

from qmq_client.clock import SYSTEM_CLOCK
from qmq_client.commands.broker_json import broker_address, broker_options, get_json
from qmq_client.commands.exit_codes import UNREACHABLE, exit_code_of
from qmq_client.commands.message_view import body_text
from qmq_client.commands.named import SUBJECT
from qmq_client.commands.table import time_text
from qmq_client.errors import BrokerRefusedError, TransportError
from qmq_client.transport.address import BrokerAddress
from qmq_client.wire.shown import printable

#: Messages in one request.
_COUNT_MAX: Final = 500
#: Pause between requests for a subject without new messages.
_LOOK_S: Final = 0.5
#: Pause between requests to a broker that does not answer.
_UNREACHABLE_S: Final = 1.0


@click.command()
@click.argument("subject", type=SUBJECT)
@click.option(
    "-n",
    "--count",
    type=click.IntRange(0),
    default=10,
    show_default=True,
    help="Maximum number of messages; with --follow, before the new ones.",
)
@click.option(
    "--first",
    type=click.IntRange(0),
    help="Print from this sequence on instead of the last messages.",
)
@click.option("-f", "--follow", is_flag=True, help="Keep printing new messages.")
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
    """Print the last messages of SUBJECT, oldest first; with --json one object per line.

    A line has the sequence, when the message was sent, its id, its key and tags if any, and its body.

    Messages lost to retention or a quarantine are skipped, and counted on standard error. Exit code 1
    when there is no such subject; with --follow, wait for it, and for a broker that is unreachable after it
    has answered once.
    """
    address = broker_address(broker, config_file)
    place = _last(address, subject, count) if first is None else first
    left = None if follow else count
    #: The sequence after the last printed message.
    printed = 0
    has_answered = is_unreachable = False
    while left is None or left > 0:
        asked = _COUNT_MAX if left is None else min(left, _COUNT_MAX)
        try:
            place = _place_now(address, subject, place, printed, was_unreachable=is_unreachable)
            messages, next_place = _messages(address, subject, place, asked, is_awaited=follow)
        except TransportError as error:
            # A failed request printed nothing, so a repeat neither duplicates nor skips messages.
            if not (follow and has_answered) or exit_code_of(error) != UNREACHABLE:
                raise
            if not is_unreachable:
                click.echo(f"{error}; waiting for the broker", err=True)
            is_unreachable = True
            SYSTEM_CLOCK.sleep(_UNREACHABLE_S)
            continue
        if is_unreachable:
            click.echo(f"the broker is back; continuing with message {place}", err=True)
        has_answered, is_unreachable = True, False
        for found in messages:
            click.echo(_line({"subject": subject, **found}, as_json))
            printed = found["sequence"] + 1
        if gone := next_place - place - len(messages):
            click.echo(f"gone: {gone} of the messages {place} to {next_place - 1}", err=True)
        left = None if left is None else left - len(messages)
        if next_place > place:
            place = next_place
        elif not follow:
            break
        else:
            SYSTEM_CLOCK.sleep(_LOOK_S)


def _last(address: BrokerAddress, subject: str, count: int) -> int:
    """The first sequence of the last `count` messages."""
    subjects = get_json(address, "/v1/subjects", {}, known=("subjects",))["subjects"]
    for one in subjects:
        if one["subject"] == subject:
            return int(max(one["first_sequence"], one["next_sequence"] - count))
    return 0


def _place_now(
    address: BrokerAddress, subject: str, place: int, printed: int, *, was_unreachable: bool
) -> int:
    """The sequence at which to continue: the subject's end if the broker was restored from an older copy."""
    if not was_unreachable or (end := _last(address, subject, 0)) >= printed:
        return place
    click.echo(
        f"{subject} ends at message {end} now, and messages below {printed} were printed: the "
        "broker has an older copy of its data",
        err=True,
    )
    return end


def _messages(
    address: BrokerAddress, subject: str, first: int, count: int, *, is_awaited: bool
) -> tuple[list[dict[str, Any]], int]:
    """The messages from a sequence on, and the sequence to continue with."""
    question = {"subject": subject, "first": first, "count": count}
    try:
        answer = get_json(address, "/v1/messages", question, known=("messages",))
    except BrokerRefusedError as error:
        if is_awaited and error.status == 404:
            return [], first
        raise
    messages = list(answer["messages"])
    # An older broker does not report how far it searched.
    behind = messages[-1]["sequence"] + 1 if messages else first
    return messages, answer.get("next_sequence", behind)


def _line(found: dict[str, Any], as_json: bool) -> str:
    if as_json:
        return json.dumps(found, ensure_ascii=False)
    born = time_text(found["born_at_ms"]) if "born_at_ms" in found else "?"
    key = f" key={found['key']}" if found.get("key") else ""
    tags = f" tags={','.join(found['tags'])}" if found.get("tags") else ""
    identity = found.get("message_id") or "?"
    return printable(f"{found['sequence']} {born} {identity}{key}{tags} {body_text(found)}")
