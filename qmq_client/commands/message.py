"""`qmq message find | show`: messages as the broker has them, by id, or by key and time.

Changes nothing. When the broker's key index lags, or a bound was reached, the answer says so on
standard error: what is not listed may then be there nevertheless.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import click

from qmq_client.commands.broker_json import broker_address, broker_options, get_json, print_json
from qmq_client.commands.exit_codes import ATTENTION
from qmq_client.commands.message_view import message_lines, message_table
from qmq_client.commands.outbox import row_told, rows_of_message
from qmq_client.commands.settings import database_option, loaded
from qmq_client.commands.story import story_lines, story_of, what_is_missing
from qmq_client.commands.times import TIME
from qmq_client.commands.waiting import waiting_lines, waiting_message
from qmq_client.errors import BrokerRefusedError, ConfigurationError
from qmq_client.wire.message_id import format_message_id, parse_message_id

#: As many as the broker gives at once.
_FOUND_MAX: Final = 1_000


@click.group()
def message() -> None:
    """Find messages at the broker, and trace what became of them."""


@message.command()
@click.option("--id", "message_id", metavar="ID", help="Id of the message.")
@click.option("--key", help="Messages with this key; needs --subject.")
@click.option("--subject", help="Subject of the messages with that key.")
@click.option("--from", "first_ms", type=TIME, help="Stored at this time or later.")
@click.option("--to", "next_ms", type=TIME, help="Stored before this time.")
@click.option(
    "--limit",
    type=click.IntRange(1, _FOUND_MAX),
    default=100,
    show_default=True,
    help="Maximum number of messages.",
)
@broker_options
def find(
    *,
    message_id: str | None,
    key: str | None,
    subject: str | None,
    limit: int,
    broker: str | None,
    config_file: Path | None,
    as_json: bool,
    **times: int | None,
) -> None:
    """List messages by id, or by subject, key and time; newest first.

    Times are ISO 8601, UTC unless they name a zone. Exit code 1 when nothing was found.
    """
    if (message_id is None) == (key is None) or (key is not None and subject is None):
        raise ConfigurationError(
            setting="--id, --key",
            value="one of them is needed, and --key needs --subject",
            remedy="Give --id, or --subject with --key; `qmq tail SUBJECT` prints the latest.",
        )
    if message_id is not None and (subject, *times.values()) != (None, None, None):
        raise ConfigurationError(
            setting="--id",
            value="with --subject, --from or --to",
            remedy="Give --id alone: an id names one message.",
        )
    question = {
        "id": _checked(message_id),
        "subject": subject,
        "key": key,
        "from": times["first_ms"],
        "to": times["next_ms"],
        "count": limit,
    }
    answer = _ask(broker, config_file, question)
    if as_json:
        print_json(answer)
    else:
        for line in message_table(answer["messages"]):
            click.echo(line)
    _warn(answer)
    if not answer["messages"]:
        raise SystemExit(ATTENTION)


@message.command()
@click.argument("message_id")
@database_option
@broker_options
def show(
    *,
    message_id: str,
    database: str | None,
    broker: str | None,
    config_file: Path | None,
    as_json: bool,
) -> None:
    """Show everything known about one message, and what became of it in each group.

    A message that was sent again after the dedupe window is shown once for each copy, a delayed one
    as waiting, and one that no broker has yet as its row in an outbox. Exit code 1 when there is no such
    message.
    """
    answer = _ask(broker, config_file, {"id": _checked(message_id), "count": _FOUND_MAX})
    if not answer["messages"] and _show_elsewhere(
        database, broker, config_file, message_id, as_json=as_json
    ):
        return
    if as_json:
        print_json(answer)
    else:
        for number, found in enumerate(answer["messages"]):
            if number:
                click.echo()
            for line in message_lines(found):
                click.echo(line)
    _warn(answer)
    if not answer["messages"]:
        if not as_json:
            click.echo(_not_here(message_id), err=True)
        raise SystemExit(ATTENTION)


@message.command()
@click.argument("message_id")
@database_option
@broker_options
def trace(
    *,
    message_id: str,
    database: str | None,
    broker: str | None,
    config_file: Path | None,
    as_json: bool,
) -> None:
    """Tell the story of one message: when it was stored, who got it, what they did, where it is.

    Says so where the story begins before the broker's records, and where it has not begun: in an
    outbox. Exit code 1 when there is no such message.
    """
    wanted = _checked(message_id)
    address = broker_address(broker, config_file)
    try:
        answer = get_json(address, f"/v1/messages/{wanted}/trace", {}, known=("places",))
    except BrokerRefusedError as error:
        if error.status != 404:
            raise
        if _show_elsewhere(database, broker, config_file, message_id, as_json=as_json):
            return
        click.echo(_not_here(message_id), err=True)
        raise SystemExit(ATTENTION) from error
    stories = [story_of(answer["message_id"], place) for place in answer["places"]]
    missing = [text for place in answer["places"] for text in what_is_missing(place)]
    if not answer["is_complete"] and not missing:
        missing = ["not everything was looked at; ask again later"]
    if as_json:
        print_json({"stories": stories, "missing": missing})
        return
    for line in (line for steps in stories for line in story_lines(steps)):
        click.echo(line)
    for text in missing:
        click.echo(text, err=True)


def _show_elsewhere(
    database: str | None,
    broker: str | None,
    config_file: Path | None,
    message_id: str,
    *,
    as_json: bool,
) -> bool:
    """Show a message that is in no subject: it waits, or no broker has it yet; whether it was found."""
    return _show_waiting(broker, config_file, message_id, as_json) or _show_outbox(
        database, config_file, message_id, as_json
    )


def _show_waiting(
    broker: str | None, config_file: Path | None, message_id: str, as_json: bool
) -> bool:
    """Show a delayed message that was not released; whether there is one."""
    delayed = waiting_message(broker_address(broker, config_file), str(_checked(message_id)))
    if delayed is None:
        return False
    if as_json:
        print_json(delayed)
    else:
        for line in waiting_lines(delayed):
            click.echo(line)
    return True


def _show_outbox(
    database: str | None, config_file: Path | None, message_id: str, as_json: bool
) -> bool:
    """Show a message that the broker has not got from its row in an outbox; whether there is one."""
    known = loaded(config_file, () if database is None else (database,)).config.databases
    rows = list(rows_of_message(parse_message_id(message_id.lower()), known))
    if rows and as_json:
        print_json({"outbox": rows})
    for row in () if as_json else rows:
        click.echo(row_told(row))
    return bool(rows)


def _not_here(message_id: str) -> str:
    return (
        f"{message_id} is in no subject of this broker, and does not wait for a due time; "
        "nor is it in the outbox of a database that is configured or given with --database"
    )


def _ask(
    broker: str | None, config_file: Path | None, question: Mapping[str, object]
) -> dict[str, Any]:
    address = broker_address(broker, config_file)
    return get_json(address, "/v1/messages", question, known=("messages", "is_complete"))


def _checked(message_id: str | None) -> str | None:
    """The id, if it can be one: a slip is told here, without asking anybody."""
    return None if message_id is None else format_message_id(parse_message_id(message_id.lower()))


def _warn(answer: Mapping[str, Any]) -> None:
    if answer.get("has_more"):
        click.echo("there are more; raise --limit, or narrow --from and --to", err=True)
    if not answer["is_complete"]:
        click.echo(
            f"not everything was looked at: {answer.get('unsearched_bytes', 0)} bytes of the log are "
            "not indexed yet, or a bound was reached; ask again later, or narrow --from and --to",
            err=True,
        )
