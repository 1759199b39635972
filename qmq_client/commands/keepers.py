"""`qmq broker keepers | remove-keeper`: the archives that retention waits for."""

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
from qmq_client.commands.table import table_lines

_COLUMNS: Final = ("name", "kept_offset", "age_s", "lag_bytes", "held_bytes", "lost_bytes")


@click.command()
@broker_options
def keepers(broker: str | None, config_file: Path | None, as_json: bool) -> None:
    """List who keeps the logs elsewhere: retention waits for each of them.

    held_bytes is what retention would already have deleted. Exit codes: 0 done, 1 the broker refused, 2 bad
    usage or a token without the role, 3 no broker answers.
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
    """Let retention wait no longer for an archive that is not run any more.

    What waited for it is deleted when it is old enough. Exit codes: 0 done, 1 the broker refused, 2 bad usage
    or a token without the role, 3 no broker answers.
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
