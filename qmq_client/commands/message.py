"""`qmq message find | show`: messages as the broker has them, by id, or by key and time.

Changes nothing. When the broker's key index lags, or a bound was reached, the answer says so on
standard error: what is not listed may then be there nevertheless.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click

from qmq_client.commands.broker_json import broker_address, broker_options, get_json, print_json
from qmq_client.commands.exit_codes import ATTENTION
from qmq_client.commands.message_view import NO_GROUP, message_lines, message_table, why_text
from qmq_client.commands.outbox import row_told, rows_of_message
from qmq_client.commands.settings import database_option, loaded
from qmq_client.commands.table import table_lines, time_text
from qmq_client.commands.times import TIME
from qmq_client.errors import BrokerRefusedError, ConfigurationError
from qmq_client.transport.address import BrokerAddress
from qmq_client.wire.message_id import format_message_id, parse_message_id


def waiting_message(address: BrokerAddress, message_id: str) -> dict[str, Any] | None:
    """What the broker knows about a delayed message; None if it is not one, or may not be seen."""
    try:
        return get_json(address, f"/v1/delayed/{message_id}", {}, known=("places",))
    except BrokerRefusedError as error:
        if error.status not in (403, 404):
            raise
        return None


def waiting_lines(answer: Mapping[str, Any]) -> Iterator[str]:
    """Every time it was scheduled for, and the message itself while it waits."""
    for place in answer["places"]:
        yield f"{place['state']:<11} due {time_text(place['due_at_ms'])}"
    last = answer["places"][-1]
    if found := answer.get("message"):
        yield from message_lines({**found, "subject": last["subject"], "sequence": None})
        return
    for name in ("message_id", "subject"):
        yield f"{name:<10} {last[name]}"
    yield f"{'message':<10} not kept any more"


Step = Mapping[str, Any]


def story_of(message_id: str, place: Mapping[str, Any]) -> list[Step]:
    """What happened to a message at one place, in order of time; its present place comes last.

    A step has `at_ms` (None without a time), `group` (empty for the message itself), `what`, and
    any further facts.
    """
    stored = {
        "at_ms": place["stored_at_ms"],
        "group": "",
        "what": "stored",
        "message_id": message_id,
        "subject": place["subject"],
        "sequence": place["sequence"],
    }
    past = [step for told in place["groups"] for step in _past(told, place)]
    now = [_now(told, place) for told in place["groups"] if told.get("now")]
    return [stored, *sorted(past, key=lambda step: step["at_ms"]), *now]


def what_is_missing(place: Mapping[str, Any]) -> Iterator[str]:
    """What this story cannot tell, as sentences."""
    if (first_ms := place.get("told_from_ms")) is not None:
        yield (
            f"events before {time_text(first_ms)} are no longer kept, except failed attempts of a "
            "message that is not acked"
        )
    if (next_ms := place.get("told_until_ms")) is not None:
        yield f"events after {time_text(next_ms)} were too many to read"
    if not place["groups"]:
        yield f"consumer groups: {NO_GROUP}"


def _past(told: Mapping[str, Any], place: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of one group, and attempts that only its state remembers."""
    group, first_ms = told["group"], place.get("told_from_ms")
    events = [{**event, "group": group, "what": event["event"]} for event in told["events"]]
    history = (told.get("now") or {}).get("history", ())
    known = {(event["what"], event.get("attempt"), event["at_ms"]) for event in events}
    for past in history if first_ms is not None else ():
        named = {"group": group, "attempt": past["attempt"], "consumer": past["consumer"]}
        given = {**named, "at_ms": past["given_at_ms"], "what": "given"}
        ended = {**named, "at_ms": past["ended_at_ms"], "what": past["outcome"]}
        if error := past.get("error"):
            ended["error"] = error
        for step in (given, ended):
            if (step["what"], step["attempt"], step["at_ms"]) not in known:
                yield step
    for event in events:
        del event["event"]
        yield event


def _now(told: Mapping[str, Any], place: Mapping[str, Any]) -> dict[str, Any]:
    now = told["now"]
    known = {name: now[name] for name in ("attempts", "consumer", "reason", "error") if name in now}
    why = why_text(now)
    if now["state"] == "passed" and not why and not told["events"] and "told_from_ms" not in place:
        why = "never delivered: the group starts after it, or was moved past it"
    if why:
        known["why"] = why
    return {
        "group": told["group"],
        **known,
        "at_ms": now.get("at_ms") or None,
        "what": now["state"],
        "is_now": True,
    }


def story_lines(steps: Sequence[Step]) -> Iterator[str]:
    """The steps as a table; the last of each group says where the message is now."""
    rows = [
        (
            time_text(step["at_ms"]) if step.get("at_ms") else "-",
            step["group"] or "-",
            f"now {step['what']}" if step.get("is_now") else step["what"],
            step.get("attempt") or step.get("attempts") or "-",
            step.get("consumer") or "-",
            "; ".join(filter(None, map(step.get, ("error", "reason", "why")))) or "-",
        )
        for step in steps
    ]
    return table_lines(("at", "group", "what", "attempt", "consumer", "why"), rows)


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
    """The id, if it can be one: a slip is reported here, without asking anybody."""
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
