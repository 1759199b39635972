"""`qmq watchdog databases`: commands for the registry, used by people and deployment scripts.

Running watchdogs apply every change within `registry.refresh_s`, without a restart.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click
import msgspec

from qmq_client.commands.exit_codes import ATTENTION
from qmq_client.commands.settings import config_option, json_option, loaded
from qmq_client.database.registry import Registry
from qmq_client.errors import ConfigurationError
from qmq_client.settings.sections import DatabaseSection
from qmq_watchdog.databases import open_registry


@click.group()
def databases() -> None:
    """Manage the registry: the table of databases to sweep."""


@databases.command()
@config_option
@json_option
def init(config_file: Path | None, as_json: bool) -> None:
    """Create the registry's table.

    Does nothing if the table exists.
    """
    is_new = _registry(config_file).create()
    _say({"created": is_new}, "created" if is_new else "already there", as_json)


@databases.command("list")
@config_option
@json_option
def list_(config_file: Path | None, as_json: bool) -> None:
    """Show every row.

    Exit code 1 when the watchdog refuses a row.
    """
    content = _registry(config_file).read()
    rows = [
        {**msgspec.structs.asdict(each.section), "is_enabled": each.is_enabled}
        for each in content.databases
    ]
    refused = {name: str(error) for name, error in content.refused.items()}
    if as_json:
        click.echo(json.dumps({"databases": rows, "refused": refused}, indent=2))
    else:
        for row in rows:
            state = "enabled" if row["is_enabled"] else "disabled"
            click.echo(f"{row['name']}  {state}  {row['url']}")
        for name, reason in refused.items():
            click.echo(f"{name}  refused  {reason}")
    if refused:
        raise SystemExit(ATTENTION)


@databases.command()
@click.argument("name")
@click.argument("url")
@click.option("--password-env", default="", help="Variable that holds the password.")
@click.option("--password-file", default="", help="File that holds the password.")
@click.option("--schema", default="", help="Schema of the outbox.")
@click.option(
    "--table-prefix", default="qmq_", show_default=True, help="Prefix of the names of its tables."
)
@click.option(
    "--rows-per-s",
    type=int,
    default=0,
    help="Most rows that each watchdog sends in a second; 0 for no limit.",
)
@click.option("--keep-sent-s", type=float, default=0.0, help="Seconds to keep accepted rows.")
@click.option("--keep-inbox-s", type=float, default=0.0, help="Seconds to keep inbox ids.")
@click.option("--disabled", is_flag=True, help="Add it, but do not sweep it yet.")
@config_option
@json_option
def add(
    name: str,
    url: str,
    *,
    disabled: bool,
    config_file: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Add a database, or replace the one with this name.

    Do not put a password into URL: name the variable or the file that holds it.
    """
    values = {"name": name, "url": url, **options}
    try:
        section = msgspec.convert(values, DatabaseSection, strict=False)
    except msgspec.ValidationError as error:
        raise click.UsageError(str(error)) from None
    is_new = _registry(config_file).add(section, is_enabled=not disabled)
    _say({"name": name, "is_new": is_new}, "added" if is_new else "changed", as_json)


@databases.command()
@click.argument("name")
@config_option
@json_option
def remove(name: str, config_file: Path | None, as_json: bool) -> None:
    """Remove a database.

    It is no longer swept. Exit code 1 when the registry has no such name.
    """
    _report(name, _registry(config_file).remove(name), "removed", as_json)


@databases.command()
@click.argument("name")
@config_option
@json_option
def enable(name: str, config_file: Path | None, as_json: bool) -> None:
    """Enable the sweeps of a database.

    Exit code 1 when the registry has no such name.
    """
    found = _registry(config_file).set_enabled(name, is_enabled=True)
    _report(name, found, "enabled", as_json)


@databases.command()
@click.argument("name")
@config_option
@json_option
def disable(name: str, config_file: Path | None, as_json: bool) -> None:
    """Stop sweeping a database, but keep its row.

    Exit code 1 when the registry has no such name.
    """
    found = _registry(config_file).set_enabled(name, is_enabled=False)
    _report(name, found, "disabled", as_json)


def _registry(config_file: Path | None) -> Registry:
    config = loaded(config_file).config
    if not config.registry.url:
        raise ConfigurationError(
            setting="registry.url",
            value="none is configured",
            remedy="Write [registry] with a url into qmq.toml, or set QMQ_REGISTRY_URL.",
        )
    return open_registry(config, os.environ)


def _report(name: str, is_found: bool, done: str, as_json: bool) -> None:
    if not is_found:
        click.echo(
            f"{name} is not in the registry; `qmq watchdog databases list` shows what is", err=True
        )
        raise SystemExit(ATTENTION)
    _say({"name": name, done: True}, done, as_json)


def _say(found: dict[str, Any], text: str, as_json: bool) -> None:
    click.echo(json.dumps(found) if as_json else text)
