"""`qmq message find | show | trace`: finds messages at the broker, by id, or by key and time.

Changes nothing. If the broker's key index lags, or a limit was reached, a line on standard error
says that messages may be missing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from qmq_client.commands.broker_json import broker_address, broker_options, get_json, print_json
from qmq_client.commands.exit_codes import ATTENTION, UNREACHABLE
from qmq_client.commands.message_view import (
    NO_GROUP,
    by_subject,
    message_lines,
    message_table,
    why_text,
)
from qmq_client.commands.named import MESSAGE_ID, SUBJECT
from qmq_client.commands.outbox import RowsFound, row_text, rows_of_message
from qmq_client.commands.settings import database_option, loaded
from qmq_client.commands.table import table_lines, time_text
from qmq_client.commands.times import TIME
from qmq_client.errors import (
    BrokerOlderError,
    BrokerRefusedError,
    ConfigurationError,
    TransportError,
)
from qmq_client.settings.sections import Config, RegistrySection
from qmq_client.transport.address import BrokerAddress
from qmq_client.wire.message_id import parse_message_id
from qmq_client.wire.shown import printable


def waiting_lines(places: Sequence[Mapping[str, Any]], waiting: Mapping[str, Any]) -> Iterator[str]:
    """All due times of a subject's message, and the message itself while it waits."""
    for place in places:
        yield f"{place['state']:<11} due {time_text(place['due_at_ms'])}"
    last = places[-1]
    if found := waiting.get("message"):
        yield from message_lines({**found, "subject": last["subject"], "sequence": None})
        return
    for name in ("message_id", "subject"):
        yield f"{name:<10} {last[name]}"
    if damage := waiting.get("damage"):
        yield f"{'held':<10} {printable(damage['message'])}"
    else:
        kept = "not shown" if last["state"] == "pending" else "no longer kept"
        yield f"{'message':<10} {kept}"


Step = Mapping[str, Any]


def story_of(message_id: str, place: Mapping[str, Any]) -> list[Step]:
    """The history of a message at one place, in order of time; its current state is last.

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
    past = [step for trace in place["groups"] for step in _past(trace, place)]
    now = [_now(trace, place) for trace in place["groups"] if trace.get("now")]
    return [stored, *sorted(past, key=lambda step: step["at_ms"]), *now]


def what_is_missing(place: Mapping[str, Any]) -> Iterator[str]:
    """The gaps of this history, as sentences."""
    if (first_ms := place.get("history_from_ms")) is not None:
        yield (
            f"events before {time_text(first_ms)} are no longer kept, except failed attempts of a "
            "message that is not acked"
        )
    if (next_ms := place.get("history_until_ms")) is not None:
        yield f"events after {time_text(next_ms)} were too many to read"
    if not place["groups"]:
        yield f"consumer groups: {NO_GROUP}"


def _past(trace: Mapping[str, Any], place: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of one group, and attempts that are only in its state."""
    group, first_ms = trace["group"], place.get("history_from_ms")
    events = [{**event, "group": group, "what": event["event"]} for event in trace["events"]]
    history = (trace.get("now") or {}).get("history", ())
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


def _now(trace: Mapping[str, Any], place: Mapping[str, Any]) -> dict[str, Any]:
    now = trace["now"]
    known = {name: now[name] for name in ("attempts", "consumer", "reason", "error") if name in now}
    why = why_text(now)
    if (
        now["state"] == "passed"
        and not why
        and not trace["events"]
        and "history_from_ms" not in place
    ):
        why = "never delivered: the group starts after it, or was moved past it"
    if why:
        known["why"] = why
    return {
        "group": trace["group"],
        **known,
        "at_ms": now.get("at_ms") or None,
        "what": now["state"],
        "is_now": True,
    }


def story_lines(steps: Sequence[Step]) -> Iterator[str]:
    """The steps as a table; the last step of each group is the message's current state."""
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


_NOT_STORED: Final = "no subject has it; `qmq message show {message_id}` also looks among delayed messages and in outboxes"
#: As many as the broker gives at once.
_FOUND_MAX: Final = 1_000


@click.group()
def message() -> None:
    """Find messages at the broker, and trace their history."""


@message.command()
@click.option("--id", "message_id", type=MESSAGE_ID, metavar="ID", help="Id of the message.")
@click.option("--key", help="Messages with this key; needs --subject.")
@click.option("--subject", type=SUBJECT, help="Subject of the messages with that key.")
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
            value="one of them is needed, not both, and --key needs --subject",
            remedy="Give --id, or --subject with --key; `qmq tail SUBJECT` prints the latest.",
        )
    first_ms, next_ms = times["first_ms"], times["next_ms"]
    if first_ms is not None and next_ms is not None and first_ms >= next_ms:
        raise ConfigurationError(
            setting="--from, --to",
            value="no time lies between them",
            remedy="Give --to a later time than --from.",
        )
    if message_id is not None and (subject, *times.values()) != (None, None, None):
        raise ConfigurationError(
            setting="--id",
            value="with --subject, --from or --to",
            remedy="Give --id alone: an id names one message.",
        )
    question = {
        "id": message_id,
        "subject": subject,
        "key": key,
        "from": times["first_ms"],
        "to": times["next_ms"],
        "count": limit,
    }
    address = broker_address(broker, config_file)
    answer = get_json(address, "/v1/messages", question, known=("messages", "is_complete"))
    if as_json:
        print_json(answer)
    else:
        for line in message_table(answer["messages"]):
            click.echo(line)
    _warn(answer)
    if not answer["messages"]:
        if message_id is not None:
            click.echo(_NOT_STORED.format(message_id=message_id), err=True)
        raise SystemExit(ATTENTION)


@message.command()
@click.argument("message_id", type=MESSAGE_ID)
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
    """Show all facts about one message, and its state in each group.

    A message that was sent again after the dedupe window is shown once for each copy, and messages
    of several subjects with the same id once for each subject. A delayed message is shown as
    waiting, and one that the broker does not have yet as its row in an outbox. Exit code 1 when
    there is no such message, 3 when an outbox could not be read.
    """
    address, outboxes = broker_address(broker, config_file), _outboxes(database, config_file)
    with _outbox_without_broker(message_id, outboxes, as_json):
        question = {"id": message_id, "count": _FOUND_MAX}
        answer = get_json(address, "/v1/messages", question, known=("messages", "is_complete"))
        stored = {found["subject"] for found in answer["messages"]}
        delayed = _delayed(address, message_id, stored)
    blocks = [message_lines(found) for found in answer["messages"]]
    _warn(answer)
    _print_answer(message_id, answer, blocks, delayed, outboxes, as_json)


@message.command()
@click.argument("message_id", type=MESSAGE_ID)
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
    """Show the history of one message: when it was stored, its deliveries and settlements, and its current state.

    If several subjects have a message with this id, shows each. Says so if the history begins
    before the broker's records, and if the message is still in an outbox. Exit code 1 when there is
    no such message.
    """
    address, outboxes = broker_address(broker, config_file), _outboxes(database, config_file)
    with _outbox_without_broker(message_id, outboxes, as_json):
        places, is_complete = _traced(address, message_id)
        delayed = _delayed(address, message_id, {place["subject"] for place in places})
    stories = [story_of(message_id, place) for place in places]
    missing = [
        f"{place['subject']}: {text}" if len(places) > 1 else text
        for place in places
        for text in what_is_missing(place)
    ]
    if not is_complete and not missing:
        missing = ["the search was incomplete; try again later"]
    is_one = len(stories) == 1 and not delayed
    blocks = [
        chain(() if is_one else [f"{place['subject']} {place['sequence']}"], story_lines(steps))
        for place, steps in zip(places, stories, strict=True)
    ]
    for text in () if as_json else missing:
        click.echo(text, err=True)
    answer = {"stories": stories, "missing": missing}
    _print_answer(message_id, answer, blocks, delayed, outboxes, as_json)


def _traced(address: BrokerAddress, message_id: str) -> tuple[list[dict[str, Any]], bool]:
    """The places of a message with their history, and whether these are all places."""
    try:
        path = f"/v1/messages/{message_id}/trace"
        answer = get_json(address, path, {}, known=("places", "is_complete"))
    except BrokerRefusedError as error:
        if error.status != 404:
            raise
        return [], True
    return answer["places"], answer["is_complete"]


def _delayed(
    address: BrokerAddress, message_id: str, stored: Collection[str]
) -> dict[str, Any] | None:
    """The delayed messages with this id, also past ones; None without any, or if the message is
    `stored` in its subject.

    For a stored message, standard error says that the broker has no more facts.
    """
    try:
        answer = get_json(address, f"/v1/delayed/{message_id}", {}, known=("places", "messages"))
    except BrokerRefusedError as error:
        if error.status not in (403, 404):
            raise
        return None
    except TransportError as error:
        if not stored:
            raise
        click.echo(f"not known whether it is delayed in another subject: {error}", err=True)
        return None
    pending = {place["subject"] for place in answer["places"] if place["state"] == "pending"}
    passed = set(stored) - pending
    trace = {
        name: [one for one in answer[name] if one["subject"] not in passed]
        for name in ("places", "messages")
    }
    return trace if trace["places"] else None


def _print_answer(
    message_id: str,
    answer: Mapping[str, Any],
    blocks: Sequence[Iterable[str]],
    delayed: Mapping[str, Any] | None,
    outboxes: Config,
    as_json: bool,
) -> None:
    """Print the broker's facts about a message; without any, its rows in outboxes, or that there are none."""
    if delayed is not None:
        answer = {**answer, "delayed": delayed}
        blocks = [*blocks, *(waiting_lines(*one) for one in by_subject(delayed))]
    found = RowsFound() if blocks else rows_of_message(parse_message_id(message_id), outboxes)
    rows, unread = found.rows, found.unread
    if as_json:
        print_json({**answer, "outbox": rows} if rows else answer)
    else:
        _print(blocks or [[row_text(row)] for row in rows])
    if not blocks and not rows:
        if not as_json:
            click.echo(_not_here(message_id, unread), err=True)
        raise SystemExit(UNREACHABLE if unread else ATTENTION)


def _print(blocks: Sequence[Iterable[str]]) -> None:
    for number, lines in enumerate(blocks):
        if number:
            click.echo()
        for line in lines:
            click.echo(line)


def _outboxes(database: str | None, config_file: Path | None) -> Config:
    """The databases in whose outboxes a message may wait: the given one, or all."""
    if database is None:
        return loaded(config_file).config
    config = loaded(config_file, (database,)).config
    return msgspec.structs.replace(config, registry=RegistrySection())


@contextmanager
def _outbox_without_broker(message_id: str, outboxes: Config, as_json: bool) -> Iterator[None]:
    """If the broker does not answer, print the rows in outboxes; then raise the error."""
    try:
        yield
    except (BrokerRefusedError, BrokerOlderError):  # the broker answered
        raise
    except TransportError:
        found = rows_of_message(parse_message_id(message_id), outboxes)
        was_looked_at = bool(found.read or found.unread)
        if as_json and was_looked_at:
            print_json({"outbox": found.rows})
        for row in () if as_json else found.rows:
            click.echo(row_text(row))
        if found.read and not found.rows:
            names = ", ".join(found.read)
            click.echo(f"{message_id} is not in the outbox of {names}", err=True)
        if not was_looked_at:
            click.echo("no outbox was searched: give --database", err=True)
        click.echo("the broker could not be asked:", err=True)
        raise


def _not_here(message_id: str, unread: Sequence[str]) -> str:
    here = f"{message_id} is in no subject of this broker, and does not wait for a due time; "
    if unread:
        return f"{here}it may be in an outbox that could not be read: {', '.join(unread)}"
    return (
        f"{here}nor is it in the outbox of any database that is configured, registered or given with "
        "--database"
    )


def _warn(answer: Mapping[str, Any]) -> None:
    if answer.get("has_more"):
        click.echo("there are more; raise --limit, or narrow --from and --to", err=True)
    if not answer["is_complete"]:
        click.echo(
            f"the search was incomplete: {answer.get('unsearched_bytes', 0)} bytes of the log are "
            "not indexed yet, or a limit was reached; try again later, or narrow --from and --to",
            err=True,
        )
