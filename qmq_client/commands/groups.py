"""`qmq groups …`, `qmq lag`: positions and lag of groups, and changes of groups.

A group has the name of the listing: `group`, or `group@consumer` for one consumer of a broadcast. A
change of a group is durable when its command ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
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
from qmq_client.commands.named import GROUP, SUBJECT
from qmq_client.commands.table import table_lines
from qmq_client.commands.times import TIME
from qmq_client.errors import ConfigurationError
from qmq_client.transport.address import BrokerAddress
from qmq_client.wire.errors import InvalidMessageError
from qmq_client.wire.start import parse_start


class StartParameter(click.ParamType):  # type: ignore[type-arg]  # generic only in the newest click
    """`earliest`, `latest`, a sequence, or an ISO 8601 time; in the form of the wire."""

    name = "place"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = f"sequence:{value}" if value.isascii() and value.isdecimal() else value
        try:
            return str(parse_start(text))
        except InvalidMessageError:
            pass
        try:
            return f"time:{TIME.convert(value, param, ctx)}"
        except click.BadParameter:
            self.fail(
                f"{value!r} is not a position; write earliest, latest, a sequence, "
                "or a time like 2013-01-01T09:57 or with +01:00",
                param,
                ctx,
            )


START: Final = StartParameter()


_GROUP_COLUMNS: Final = (
    "subject",
    "group",
    "cursor",
    "lag",
    "lag_s",
    "in_flight",
    "redelivery",
    "dead",
    "consumers",
    "state",
)
_LAG_COLUMNS: Final = ("subject", "group", "lag", "lag_s", "state")


@click.group(invoke_without_command=True)
@click.option("--subject", type=SUBJECT, help="Only groups of this subject.")
@click.option("--group", type=GROUP, help="Only groups of this name.")
@broker_options
@click.pass_context
def groups(
    context: click.Context,
    subject: str | None,
    group: str | None,
    broker: str | None,
    config_file: Path | None,
    as_json: bool,
) -> None:
    """List the consumer groups, or change one of them; without a command, list them."""
    if context.invoked_subcommand is None:
        _list(broker_address(broker, config_file), subject, group, as_json)


@groups.command(name="list")
@click.option("--subject", type=SUBJECT, help="Only groups of this subject.")
@click.option("--group", type=GROUP, help="Only groups of this name.")
@broker_options
def list_(
    subject: str | None,
    group: str | None,
    broker: str | None,
    config_file: Path | None,
    as_json: bool,
) -> None:
    """List the consumer groups; the same as `qmq groups` alone."""
    _list(broker_address(broker, config_file), subject, group, as_json)


@groups.command()
@click.argument("subject", type=SUBJECT)
@click.argument("group", type=GROUP)
@broker_options
def pause(
    subject: str, group: str, broker: str | None, config_file: Path | None, as_json: bool
) -> None:
    """Stop delivering messages to a group until it is resumed.

    Messages that its consumers hold can still be acked.
    """
    _change(
        broker_address(broker, config_file), "pause", {"subject": subject, "group": group}, as_json
    )


@groups.command()
@click.argument("subject", type=SUBJECT)
@click.argument("group", type=GROUP)
@broker_options
def resume(
    subject: str, group: str, broker: str | None, config_file: Path | None, as_json: bool
) -> None:
    """Deliver messages to a paused group again."""
    _change(
        broker_address(broker, config_file), "resume", {"subject": subject, "group": group}, as_json
    )


@groups.command()
@click.argument("subject", type=SUBJECT)
@click.argument("group", type=GROUP)
@click.argument("to", type=START)
@broker_options
def seek(
    subject: str, group: str, to: str, broker: str | None, config_file: Path | None, as_json: bool
) -> None:
    """Move a group to the position TO: earliest, latest, a time of storing, or a sequence.

    Messages in flight or waiting for redelivery are dropped, and so are dead letters from TO on;
    those from TO on are delivered again. A time is ISO 8601, UTC unless it names a zone.
    """
    _change(
        broker_address(broker, config_file),
        "seek",
        {"subject": subject, "group": group, "to": to},
        as_json,
    )


@groups.command()
@click.argument("subject", type=SUBJECT)
@click.argument("group", type=GROUP)
@click.option("--tag", "any_tags", multiple=True, help="Only messages with one of these tags.")
@click.option("--all-tag", "all_tags", multiple=True, help="Only messages with all of these tags.")
@click.option("--no-tags", is_flag=True, help="Remove the filter: messages with any tags, or none.")
@click.option(
    "--max-attempts",
    type=click.IntRange(1),
    help="Deliveries before a message becomes a dead letter.",
)
@broker_options
def configure(
    subject: str,
    group: str,
    broker: str | None,
    config_file: Path | None,
    as_json: bool,
    **settings: Any,
) -> None:
    """Change the settings of a group; settings that are not given stay the same.

    A new filter applies to messages beyond the group's position.
    """
    body = {"subject": subject, "group": group, "max_attempts": settings["max_attempts"]}
    tags = {name: list(settings[f"{name}_tags"]) for name in ("any", "all")}
    if settings["no_tags"] and any(tags.values()):
        raise ConfigurationError(
            setting="--no-tags", value="with --tag or --all-tag", remedy="Give one of them."
        )
    if settings["no_tags"] or any(tags.values()):
        body["tags"] = tags
    if len(body) == 3 and body["max_attempts"] is None:
        raise ConfigurationError(
            setting="groups configure",
            value="nothing to change",
            remedy="Give --tag, --all-tag, --no-tags or --max-attempts.",
        )
    _change(broker_address(broker, config_file), "configure", body, as_json)


@groups.command()
@click.argument("subject", type=SUBJECT)
@click.argument("group", type=GROUP)
@click.option("--yes", is_flag=True, help="Confirm; without it nothing is removed.")
@broker_options
def remove(
    subject: str,
    group: str,
    yes: bool,
    broker: str | None,
    config_file: Path | None,
    as_json: bool,
) -> None:
    """Remove a group, its position and its dead letters; the next pull creates it again."""
    address = broker_address(broker, config_file)
    if not yes:
        found = _list(address, subject, group, as_json)
        missing = f"there is no group {group} on subject {subject}"
        click.echo("nothing was removed; add --yes to do it" if found else missing, err=True)
        raise SystemExit(ATTENTION)
    body = {"subject": subject, "group": group}
    answer = post_json(address, "/v1/groups/remove", body, known=("subject", "group"))
    if as_json:
        print_json(answer)
    else:
        click.echo(f"{group} is removed from {subject}")


@click.command()
@click.option("--subject", type=SUBJECT, help="Only groups of this subject.")
@click.option("--group", type=GROUP, help="Only groups of this name.")
@click.option(
    "--messages-max", type=click.IntRange(0), help="Exit with 1 when a group is further behind."
)
@click.option(
    "--seconds-max",
    type=click.FloatRange(0),
    help="Exit with 1 when its oldest waiting message is older.",
)
@broker_options
def lag(
    *,
    subject: str | None,
    group: str | None,
    messages_max: int | None,
    seconds_max: float | None,
    broker: str | None,
    config_file: Path | None,
    as_json: bool,
) -> None:
    """Show how far each group is behind, in messages and seconds, the furthest first.

    Exit code 1 when a group is over --messages-max or --seconds-max.
    """
    answer = _groups(broker_address(broker, config_file), subject, group)
    behind = sorted(answer["groups"], key=lambda one: -one["lag"])
    if as_json:
        names = ("subject", "group", "lag", "lag_s", "is_paused")
        print_json({"lag": [{name: one.get(name) for name in names} for one in behind]})
    else:
        _print(_LAG_COLUMNS, [_row(one, _LAG_COLUMNS) for one in behind])
    if any(_is_over(one, messages_max, seconds_max) for one in behind):
        raise SystemExit(ATTENTION)


def _is_over(found: Mapping[str, Any], messages_max: int | None, seconds_max: float | None) -> bool:
    if messages_max is not None and found["lag"] > messages_max:
        return True
    return seconds_max is not None and (found.get("lag_s") or 0) > seconds_max


def _list(address: BrokerAddress, subject: str | None, group: str | None, as_json: bool) -> bool:
    """Print these groups; returns whether there are any."""
    answer = _groups(address, subject, group)
    if as_json:
        print_json(answer)
    else:
        _print(_GROUP_COLUMNS, [_row(one, _GROUP_COLUMNS) for one in answer["groups"]])
    return bool(answer["groups"])


def _groups(address: BrokerAddress, subject: str | None, group: str | None) -> dict[str, Any]:
    question = {"subject": subject, "group": group}
    return get_json(address, "/v1/groups", question, known=("groups",))


def _change(address: BrokerAddress, change: str, body: Mapping[str, object], as_json: bool) -> None:
    answer = post_json(address, f"/v1/groups/{change}", body, known=("subject", "group"))
    if as_json:
        print_json(answer)
    else:
        _print(_GROUP_COLUMNS, [_row(answer, _GROUP_COLUMNS)])


def _row(found: Mapping[str, Any], columns: Sequence[str]) -> tuple[object, ...]:
    values = {**found, "state": "paused" if found.get("is_paused") else "active"}
    seconds = found.get("lag_s")
    values["lag_s"] = "-" if seconds is None else f"{seconds:.1f}"
    return tuple(values.get(column, "-") for column in columns)


def _print(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    for line in table_lines(columns, rows):
        click.echo(line)
