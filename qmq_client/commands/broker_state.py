"""`qmq broker status | readonly | drain | keepers | remove-keeper`, over HTTP to a running broker.

They are added to `serve` and `token`, commands of the broker's package, by entry points of the
group `qmq.commands.broker`, because the broker's package imports only `qmq_client.wire` of the
client.
"""

from __future__ import annotations

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
from qmq_client.commands.table import table_lines
from qmq_client.errors import TransportError
from qmq_client.transport.address import BrokerAddress

_COLUMNS: Final = ("name", "kept_offset", "age_s", "lag_bytes", "held_bytes", "lost_bytes")


@click.command()
@broker_options
def keepers(broker: str | None, config_file: Path | None, as_json: bool) -> None:
    """List keepers: archives of the logs that retention waits for.

    held_bytes is the length of the log that retention would already have deleted. Exit codes: 0
    done, 1 the broker refused, 2 bad usage or a token without the role, 3 no broker answers.
    """
    address = broker_address(broker, config_file)
    answer = get_json(address, "/v1/keepers", {}, known=("keepers",))
    if as_json:
        print_json(answer)
        return
    for line in keeper_lines(answer["keepers"]):
        click.echo(line)


@click.command(name="remove-keeper")
@click.argument("name")
@broker_options
def remove_keeper(
    *, name: str, broker: str | None, config_file: Path | None, as_json: bool
) -> None:
    """Make retention stop waiting for an archive that is no longer run.

    Segments that waited for it are deleted when they are old enough. Exit codes: 0 done, 1 the
    broker refused, 2 bad usage or a token without the role, 3 no broker answers.
    """
    address = broker_address(broker, config_file)
    answer = post_json(address, "/v1/keepers/remove", {"name": name}, known=("name",))
    if as_json:
        print_json(answer)
        return
    for line in keeper_lines([answer]):
        click.echo(line)


def keeper_lines(found: list[dict[str, Any]]) -> list[str]:
    """Keepers as lines for people."""
    rows = [tuple(_text(keeper.get(name)) for name in _COLUMNS) for keeper in found]
    return list(table_lines(_COLUMNS, rows))


def _text(value: object) -> str:
    return f"{value:.0f}" if isinstance(value, float) else str(value)


#: Includes a read-only broker, which serves its consumers.
_SERVING: Final = frozenset({"serving", "read-only"})
_reason_option = click.option("--reason", help="Shown to clients that are refused.")


@click.command()
@broker_options
def status(broker: str | None, config_file: Path | None, as_json: bool) -> None:
    """Show whether the broker serves, and if not, why; the use of its limits; and its keepers.

    Exit codes: 0 it serves (a read-only broker serves consumers), 1 it serves no client, 2 bad
    usage, 3 no broker answers.
    """
    address = broker_address(broker, config_file)
    # A 503 is for load balancers; its answer is complete nevertheless.
    answer = get_json(address, "/readyz", {}, known=("status",), statuses=(200, 503))
    kept = _keepers(address) if answer["status"] in _SERVING else []
    room = _room(address) if answer["status"] in _SERVING else {}
    more = {"keepers": kept, "room": room}
    _show(answer | {name: value for name, value in more.items() if value}, as_json)
    if room and not as_json:
        click.echo("\n".join(room_lines(room)))
    if kept and not as_json:
        click.echo("\n".join(keeper_lines(kept)))
    if answer["status"] not in _SERVING:
        raise SystemExit(ATTENTION)


@click.command()
@click.argument("switch", type=click.Choice(["on", "off"]))
@_reason_option
@broker_options
def readonly(
    *, switch: str, reason: str | None, broker: str | None, config_file: Path | None, as_json: bool
) -> None:
    """Refuse new messages, or accept them again; consumers are served as before.

    Lasts until the broker restarts; then its own options apply. Exit codes: 0 done, 1 the broker
    refused, 2 bad usage or a token without the role, 3 no broker answers.
    """
    address = broker_address(broker, config_file)
    wanted = {"state": "read-only" if switch == "on" else "serving", "reason": reason}
    _show(post_json(address, "/v1/state", wanted, known=("status",)), as_json)


@click.command()
@_reason_option
@broker_options
def drain(
    *, reason: str | None, broker: str | None, config_file: Path | None, as_json: bool
) -> None:
    """Shut down cleanly: refuse messages, answer waiting pulls, then end the process.

    Exit codes: 0 it has started, 1 the broker refused, 2 bad usage or a token without the role, 3 no
    broker answers.
    """
    address = broker_address(broker, config_file)
    wanted = {"state": "draining", "reason": reason}
    _show(post_json(address, "/v1/state", wanted, known=("status",)), as_json)


def _keepers(address: BrokerAddress) -> list[dict[str, Any]]:
    """The keepers; none for a caller who may not see all subjects, or from an older broker."""
    try:
        answer = get_json(address, "/v1/keepers", {}, known=("keepers",))
    except TransportError:
        return []
    found: list[dict[str, Any]] = answer["keepers"]
    return found


def room_lines(room: dict[str, Any]) -> list[str]:
    """The use of each limit, in total and by token, as lines for people."""
    bounds = [(one["name"], one["used"], one["limit"]) for one in room["bounds"]]
    lines = [*table_lines(("bound", "used", "limit"), bounds)]
    names = ("token", "subjects", "groups", "groups_bytes", "dead_letters_bytes")
    tokens = [tuple(one.get(name, 0) for name in names) for one in room.get("tokens", ())]
    letters = room.get("dead_letters")
    if letters is not None:
        heads = ("dead letters", "memory bytes", "at most", "file bytes")
        lines += table_lines(heads, [tuple(letters.values())])
    return [*lines, *(table_lines(names, tokens) if tokens else ())]


def _room(address: BrokerAddress) -> dict[str, Any]:
    """The use of the limits; none for a caller who may not see all subjects, or from an older broker."""
    try:
        return get_json(address, "/v1/room", {}, known=("bounds",))
    except TransportError:
        return {}


def _show(answer: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(answer)
        return
    reason = answer.get("reason")
    if answer["status"] == "serving" and not answer.get("takes_messages", True):
        reason = "consumers only: the disk is below its reserve, so messages are refused (507)"
    click.echo(f"{answer['status']}{f': {reason}' if reason else ''}")
