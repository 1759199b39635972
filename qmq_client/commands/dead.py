"""`qmq dead list | show | replay | purge`: messages that a group gave up.

A replay delivers them again, to their own group only. Replay and purge print what they would do, and do
it only with `--yes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from qmq_client.commands.broker_json import (
    broker_address,
    broker_options,
    get_json,
    post_json,
    print_json,
)
from qmq_client.commands.exit_codes import ATTENTION
from qmq_client.commands.message_view import message_lines, shortened
from qmq_client.commands.named import GROUP, SUBJECT
from qmq_client.commands.table import table_lines, time_text
from qmq_client.errors import ConfigurationError
from qmq_client.transport.address import BrokerAddress
from qmq_client.wire.shown import printable

_Function = TypeVar("_Function", bound=Callable[..., Any])
_COLUMNS: Final = ("sequence", "attempts", "reason", "at", "error")
#: Most dead letters in one answer of the broker.
_LISTED_MAX: Final = 1_000
#: Most requests of one command, in case the broker reports more each time.
_REQUESTS_MAX: Final = 10_000
_DONE: Final = {"replay": "replayed", "purge": "purged"}


@click.group()
def dead() -> None:
    """List, replay and purge the dead letters of a group."""


@dead.command(name="list")
@click.argument("subject", type=SUBJECT)
@click.argument("group", type=GROUP)
@click.option("--first", type=click.IntRange(0), default=0, help="First sequence.")
@click.option(
    "--limit",
    type=click.IntRange(1, _LISTED_MAX),
    default=100,
    show_default=True,
    help="Maximum number of dead letters.",
)
@broker_options
def list_(
    *,
    subject: str,
    group: str,
    first: int,
    limit: int,
    broker: str | None,
    config_file: Path | None,
    as_json: bool,
) -> None:
    """List the dead letters of GROUP on SUBJECT by sequence, with the last error."""
    answer = _letters(broker_address(broker, config_file), subject, group, first=first, count=limit)
    if as_json:
        print_json(answer)
        return
    rows = [
        (
            letter["sequence"],
            letter["attempts"],
            letter["reason"],
            time_text(letter["at_ms"]),
            shortened(letter["error"]) or "-",
        )
        for letter in answer["dead"]
    ]
    for line in table_lines(_COLUMNS, rows):
        click.echo(line)
    if len(rows) == limit:
        click.echo(f"there may be more; continue with --first {rows[-1][0] + 1}", err=True)


@dead.command()
@click.argument("subject", type=SUBJECT)
@click.argument("group", type=GROUP)
@click.argument("sequence", type=click.IntRange(0))
@broker_options
def show(
    *,
    subject: str,
    group: str,
    sequence: int,
    broker: str | None,
    config_file: Path | None,
    as_json: bool,
) -> None:
    """Show one dead letter: its message, the reason, and each attempt.

    Exit code 1 when there is none with this sequence.
    """
    address = broker_address(broker, config_file)
    answer = _letters(address, subject, group, first=sequence, count=1, messages=1)
    letters = [one for one in answer["dead"] if one["sequence"] == sequence]
    if as_json:
        print_json({"dead": letters})
    else:
        for line in (text for letter in letters for text in _lines(letter)):
            click.echo(line)
    if not letters:
        click.echo(
            f"{group} has no dead letter {sequence} on {subject}; "
            f"`qmq dead list {subject} {group}` lists them",
            err=True,
        )
        raise SystemExit(ATTENTION)


def _change_options(function: _Function) -> _Function:
    """The arguments and options of a command that changes a range of dead letters."""
    for option in reversed(
        (
            click.argument("subject", type=SUBJECT),
            click.argument("group", type=GROUP),
            click.option("--first", type=click.IntRange(0), help="First sequence."),
            click.option(
                "--next", "next_", type=click.IntRange(0), help="Sequence to stop before."
            ),
            click.option("--yes", is_flag=True, help="Confirm; without it nothing is changed."),
            broker_options,
        )
    ):
        function = option(function)
    return function


@dead.command()
@_change_options
def replay(*, broker: str | None, config_file: Path | None, **wanted: Any) -> None:
    """Deliver dead letters to their GROUP again, all or a range; other groups see nothing.

    Exit code 1 when the messages of some are gone from the broker, or without --yes.
    """
    _change(broker_address(broker, config_file), "replay", **wanted)


@dead.command()
@_change_options
def purge(*, broker: str | None, config_file: Path | None, **wanted: Any) -> None:
    """Delete dead letters, all or a range of sequences. Exit code 1 without --yes."""
    _change(broker_address(broker, config_file), "purge", **wanted)


def _letters(
    address: BrokerAddress, subject: str, group: str, **question: object
) -> dict[str, Any]:
    asked = {"subject": subject, "group": group, **question}
    return get_json(address, "/v1/dead", asked, known=("dead",))


def _lines(letter: Mapping[str, Any]) -> Iterator[str]:
    yield f"{'died_at':<10} {time_text(letter['at_ms'])}"
    yield f"{'reason':<10} {printable(letter['reason'])}"
    yield f"{'attempts':<10} {letter['attempts']}"
    yield f"{'error':<10} {printable(letter['error']) or '-'}"
    for past in letter.get("history", ()):
        yield f"{'attempt':<10} {printable(attempt_text(past))}"
    if letter.get("message"):
        yield from message_lines({"subject": letter["subject"], **letter["message"]})
    else:
        yield f"{'message':<10} gone from the broker, or not told"


def attempt_text(past: Mapping[str, Any]) -> str:
    """One earlier attempt, on one line."""
    ended = time_text(past["ended_at_ms"]) if past.get("ended_at_ms") else "?"
    error = f": {past['error']}" if past.get("error") else ""
    return (
        f"{past['attempt']} given to {past['consumer']} {time_text(past['given_at_ms'])}, "
        f"{past['outcome']} {ended}{error}"
    )


def _change(
    address: BrokerAddress,
    change: str,
    *,
    subject: str,
    group: str,
    first: int | None,
    next_: int | None,
    yes: bool,
    as_json: bool,
) -> None:
    if first is not None and next_ is not None and next_ <= first:
        raise ConfigurationError(
            setting="--next",
            value=f"{next_}, with --first {first}",
            remedy="Give a --next above --first.",
        )
    if not yes:
        letters = _letters(address, subject, group, first=first, count=None)["dead"]
        chosen = [one for one in letters if next_ is None or one["sequence"] < next_]
        if as_json:
            print_json({"dead": chosen})
        _preview(change, chosen)
        return
    body = {"subject": subject, "group": group, "first": first, "next": next_}
    count, gone = _carry_out(address, change, body)
    if as_json:
        print_json({"count": count, "gone": gone})
    else:
        click.echo(f"dead letters {_DONE[change]}: {count}")
    if gone:
        click.echo(f"{gone} could not be replayed: their messages are gone", err=True)
        raise SystemExit(ATTENTION)


def _preview(change: str, letters: Sequence[Mapping[str, Any]]) -> None:
    """Say how many dead letters would be changed."""
    if not letters:
        click.echo(f"no dead letters to {change}", err=True)
        return
    many = f"{len(letters)} or more" if len(letters) >= _LISTED_MAX else str(len(letters))
    click.echo(f"dead letters to {change}: {many}; add --yes to do it", err=True)
    raise SystemExit(ATTENTION)


def _carry_out(address: BrokerAddress, change: str, body: Mapping[str, object]) -> tuple[int, int]:
    """Change the whole range, request by request; returns how many were changed and how many are gone."""
    count = gone = 0
    for _ in range(_REQUESTS_MAX):
        answer = post_json(address, f"/v1/dead/{change}", body, known=("count",))
        count += answer["count"]
        gone = answer.get("gone", 0)  # they stay, so each request reports them again
        if not answer.get("has_more") or not answer["count"]:
            break
    return count, gone
