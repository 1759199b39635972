"""`qmq subjects`: lists subjects, and removes an unused one."""

from __future__ import annotations

from collections.abc import Sequence
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
from qmq_client.commands.named import SUBJECT
from qmq_client.commands.table import table_lines
from qmq_client.transport.address import BrokerAddress

_COLUMNS: Final = ("subject", "first_sequence", "next_sequence", "messages", "delayed")


@click.group(invoke_without_command=True)
@broker_options
@click.pass_context
def subjects(
    context: click.Context, broker: str | None, config_file: Path | None, as_json: bool
) -> None:
    """List the subjects of a broker, or remove one; without a command, list them."""
    if context.invoked_subcommand is None:
        _list(broker_address(broker, config_file), as_json)


@subjects.command(name="list")
@broker_options
def list_(broker: str | None, config_file: Path | None, as_json: bool) -> None:
    """List the subjects with the range of messages in each; the same as `qmq subjects` alone."""
    _list(broker_address(broker, config_file), as_json)


@subjects.command()
@click.argument("subject", type=SUBJECT)
@click.option("--yes", is_flag=True, help="Confirm; without it nothing is removed.")
@broker_options
def remove(
    subject: str, yes: bool, broker: str | None, config_file: Path | None, as_json: bool
) -> None:
    """Remove a subject that has no messages, no delayed messages and no groups.

    The next message creates it again, and its sequences continue where they ended.
    """
    address = broker_address(broker, config_file)
    if not yes:
        found = _list(address, as_json, only=subject)
        click.echo(_preview(address, subject, found), err=True)
        raise SystemExit(ATTENTION)
    answer = post_json(
        address, "/v1/subjects/remove", {"subject": subject}, known=("subject", "next_sequence")
    )
    if as_json:
        print_json(answer)
    else:
        click.echo(f"{subject} is removed")


def _preview(address: BrokerAddress, subject: str, found: Sequence[dict[str, Any]]) -> str:
    """Print what a removal would do."""
    if not found:
        return f"there is no subject {subject}"
    groups = get_json(address, "/v1/groups", {"subject": subject}, known=("groups",))["groups"]
    left = {
        "messages": sum(map(_messages, found)),
        "delayed messages": sum(map(_delayed, found)),
        "groups": len(groups),
    }
    told = ", ".join(f"{name}: {count}" for name, count in left.items() if count)
    if told:
        return f"nothing was removed, and cannot be: it still has {told}"
    return "nothing was removed; add --yes to do it"


def _messages(one: dict[str, Any]) -> int:
    return int(one["next_sequence"] - one["first_sequence"])


def _delayed(one: dict[str, Any]) -> int:
    return int(one.get("delayed", 0))  # an older broker does not report it


def _list(
    address: BrokerAddress, as_json: bool, *, only: str | None = None
) -> Sequence[dict[str, Any]]:
    """Print all subjects, or only this one, and return them."""
    answer = get_json(address, "/v1/subjects", {}, known=("subjects",))
    found: list[dict[str, Any]] = [
        one for one in answer["subjects"] if only in (None, one["subject"])
    ]
    if as_json:
        shown = [one | {"messages": _messages(one)} for one in found]
        print_json(answer | {"subjects": shown})
        return found
    rows = [
        (
            one["subject"],
            one["first_sequence"],
            one["next_sequence"],
            _messages(one),
            _delayed(one),
        )
        for one in found
    ]
    for line in table_lines(_COLUMNS, rows):
        click.echo(line)
    return found
