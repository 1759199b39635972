"""`qmq delayed list | show | cancel | reschedule | histogram | status | retry | accept-clock`: delayed messages.

The commands send requests to the broker; a change is durable when its command ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import click

from qmq_client.commands.broker_json import (
    broker_address,
    broker_options,
    get_json,
    post_json,
    print_json,
)
from qmq_client.commands.exit_codes import ATTENTION
from qmq_client.commands.message_view import body_text, by_subject, shortened
from qmq_client.commands.named import MESSAGE_ID, SUBJECT
from qmq_client.commands.table import table_lines, time_text
from qmq_client.commands.times import TIME
from qmq_client.wire.delayed import CANCELLED_PER_REQUEST_MAX

#: Most messages of one answer of the broker.
_LISTED_MAX: Final = 1_000
_BAR_CHARACTERS: Final = 40
_NOT_RESCHEDULED: Final = {
    "cancelled": "not rescheduled: it was cancelled before",
    "too_late": "not rescheduled: too late, it was released before",
}
_COLUMNS: Final = ("deliver_at", "message_id", "subject", "state")


@click.group()
def delayed() -> None:
    """List, show, cancel or reschedule the messages that the broker holds until they are due."""


@delayed.command(name="list")
@click.option("--subject", type=SUBJECT, help="Only messages of this subject.")
@click.option("--from", "first_ms", type=TIME, help="Due at this time or later.")
@click.option("--to", "next_ms", type=TIME, help="Due before this time.")
@click.option(
    "--limit",
    type=click.IntRange(1, _LISTED_MAX),
    default=100,
    show_default=True,
    help="Maximum number of messages.",
)
@broker_options
def list_(
    *,
    subject: str | None,
    first_ms: int | None,
    next_ms: int | None,
    limit: int,
    broker: str | None,
    config_file: Path | None,
    as_json: bool,
) -> None:
    """List delayed messages, the earliest due time first. Times are UTC unless they name a zone."""
    question = {"subject": subject, "from": first_ms, "to": next_ms, "count": limit}
    address = broker_address(broker, config_file)
    answer = get_json(address, "/v1/delayed", question, known=("delayed", "has_more"))
    if as_json:
        print_json(answer)
        return
    for line in table_lines(_COLUMNS, [_row(one) for one in answer["delayed"]]):
        click.echo(line)
    if answer["has_more"]:
        click.echo("there are more; use --from or a higher --limit", err=True)


@delayed.command()
@click.argument("message_id", type=MESSAGE_ID)
@broker_options
def show(message_id: str, broker: str | None, config_file: Path | None, as_json: bool) -> None:
    """Show one message and all its due times, for each subject that has a message with this id.

    Exit code 1 when there is none, or when it cannot be read.
    """
    address = broker_address(broker, config_file)
    answer = get_json(address, f"/v1/delayed/{message_id}", {}, known=("places", "messages"))
    if as_json:
        print_json(answer)
    else:
        for line in _shown(answer):
            click.echo(line)
    if any(one.get("damage") for one in answer["messages"]):
        raise SystemExit(ATTENTION)


@delayed.command()
@click.argument("message_ids", type=MESSAGE_ID, nargs=-1, required=True)
@click.option("--subject", type=SUBJECT, help="Only messages of this subject.")
@broker_options
def cancel(
    *,
    message_ids: tuple[str, ...],
    subject: str | None,
    broker: str | None,
    config_file: Path | None,
    as_json: bool,
) -> None:
    """Cancel messages. Exit code 1 when any of them was already released, or is unknown."""
    address = broker_address(broker, config_file)
    outcomes: list[str] = []
    for first in range(0, len(message_ids), CANCELLED_PER_REQUEST_MAX):
        part = message_ids[first : first + CANCELLED_PER_REQUEST_MAX]
        body = {"message_ids": part, "subject": subject}
        answer = post_json(address, "/v1/delayed/cancel", body, known=("outcomes",))
        outcomes += answer["outcomes"]
    _print_outcomes(message_ids, outcomes, as_json, done="cancelled")


@delayed.command()
@click.argument("message_id", type=MESSAGE_ID)
@click.argument("deliver_at", type=TIME)
@click.option(
    "--subject",
    type=SUBJECT,
    help="Subject of the message; needed if several have a message with this id.",
)
@broker_options
def reschedule(
    *,
    message_id: str,
    deliver_at: int,
    subject: str | None,
    broker: str | None,
    config_file: Path | None,
    as_json: bool,
) -> None:
    """Change when a message is due. Exit code 1 when it was already released or cancelled."""
    address = broker_address(broker, config_file)
    body = {"message_id": message_id, "deliver_at_ms": deliver_at, "subject": subject}
    answer = post_json(address, "/v1/delayed/reschedule", body, known=("outcomes",))
    _print_outcomes(
        [message_id], answer["outcomes"], as_json, done="rescheduled", said=_NOT_RESCHEDULED
    )


@delayed.command()
@click.option("--subject", type=SUBJECT, help="Only messages of this subject.")
@click.option("--from", "first_ms", type=TIME, help="Due at this time or later.")
@click.option("--to", "next_ms", type=TIME, help="Due before this time.")
@click.option(
    "--span",
    type=click.Choice(["second", "minute", "hour", "day"]),
    default="hour",
    show_default=True,
    help="Length of the intervals; empty ones are left out.",
)
@broker_options
def histogram(
    *,
    subject: str | None,
    first_ms: int | None,
    next_ms: int | None,
    span: str,
    broker: str | None,
    config_file: Path | None,
    as_json: bool,
) -> None:
    """Show the number of messages by due time."""
    question = {"subject": subject, "from": first_ms, "to": next_ms, "span": span}
    address = broker_address(broker, config_file)
    answer = get_json(address, "/v1/delayed/histogram", question, known=("rows", "span"))
    if as_json:
        print_json(answer)
        return
    highest = max((row["count"] for row in answer["rows"]), default=1)
    rows = [
        (
            time_text(row["first_ms"]),
            row["count"],
            "█" * max(1, round(row["count"] * _BAR_CHARACTERS / highest)),
        )
        for row in answer["rows"]
    ]
    for line in table_lines((f"{answer['span']}_of", "messages", ""), rows):
        click.echo(line.rstrip())


@delayed.command()
@broker_options
def status(broker: str | None, config_file: Path | None, as_json: bool) -> None:
    """Show how many messages wait, how late releases are, and faults.

    Exit code 1 while the clock has a fault, or messages cannot be read.
    """
    address = broker_address(broker, config_file)
    answer = get_json(address, "/v1/delayed/status", {}, known=("pending", "clock", "damaged"))
    if as_json:
        print_json(answer)
    else:
        for name, value in answer.items():
            if name in ("subjects", "held"):
                continue
            shown = time_text(value) if name == "loaded_until_ms" else value
            told = "-" if shown in ("", []) else shown
            click.echo(
                f"{name.removesuffix('_ms') if name == 'loaded_until_ms' else name:<16}{told}"
            )
        for subject, count in answer.get("subjects", {}).items():
            click.echo(f"{'pending':<16}{count} of {subject}")
        for reason in answer.get("held", ()):
            click.echo(f"{'held':<16}{reason}")
    if answer["clock"] or answer["damaged"] or answer.get("damaged_buckets"):
        raise SystemExit(ATTENTION)


@delayed.command()
@broker_options
def retry(broker: str | None, config_file: Path | None, as_json: bool) -> None:
    """Read unreadable messages again, after their files were restored.

    Messages that are due by now are released as after a stop. `qmq delayed status` shows remaining faults.
    """
    address = broker_address(broker, config_file)
    answer = post_json(address, "/v1/delayed/retry", {}, known=("buckets",))
    if as_json:
        print_json(answer)
        return
    for bucket in answer["buckets"]:
        click.echo(f"reading again {time_text(bucket)}")
    if not answer["buckets"]:
        click.echo("no messages are held")


@delayed.command(name="accept-clock")
@broker_options
def accept_clock(broker: str | None, config_file: Path | None, as_json: bool) -> None:
    """Accept the broker's clock after a change, and release by it, as a restart does.

    Messages held because the clock was set forward are released at once. After a clock was set
    back, messages delayed before keep their times: `qmq delayed reschedule` changes them.
    """
    address = broker_address(broker, config_file)
    answer = post_json(address, "/v1/delayed/accept-clock", {}, known=("clock", "clock_held"))
    if as_json:
        print_json(answer)
        return
    click.echo(answer["clock"] or "the clock was not changed")
    if answer["clock_held"]:
        click.echo(f"held messages, at most: {answer['clock_held']}")


def _shown(answer: Mapping[str, Any]) -> Iterator[str]:
    """Lines for each subject: the places, and the known facts of the message."""
    for number, (places, waiting) in enumerate(by_subject(answer)):
        if number:
            yield ""
        yield from table_lines(_COLUMNS, [_row(one) for one in places])
        if found := waiting.get("message"):
            yield f"body  {shortened(body_text(found))}"
        if damage := waiting.get("damage"):
            yield f"held  {damage['message']}. {damage.get('remedy', '')}".rstrip()


def _row(one: dict[str, Any]) -> tuple[str, str, str, str]:
    return time_text(one["due_at_ms"]), one["message_id"], one["subject"], one["state"]


def _print_outcomes(
    wanted: Sequence[str],
    outcomes: list[str],
    as_json: bool,
    *,
    done: str,
    said: Mapping[str, str] = MappingProxyType({}),
) -> None:
    if as_json:
        print_json({"outcomes": dict(zip(wanted, outcomes, strict=True))})
    else:
        for message_id, outcome in zip(wanted, outcomes, strict=True):
            click.echo(f"{message_id}  {said.get(outcome, outcome.replace('_', ' '))}")
    if any(outcome != done for outcome in outcomes):
        raise SystemExit(ATTENTION)
