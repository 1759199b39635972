"""Options that several commands share, and the configuration that they select."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from qmq_client.errors import ConfigurationError
from qmq_client.settings.config import LoadedConfig, load_config
from qmq_client.settings.sections import DatabaseSection

_Function = TypeVar("_Function", bound=Callable[..., Any])

config_option = click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path, dir_okay=False),
    envvar="QMQ_CONFIG",
    help="Configuration file; by default that of QMQ_CONFIG, else qmq.toml in the working directory.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")


database_option = click.option(
    "--database",
    metavar="URL|NAME",
    help="Database URL, or the name of a configured one; not needed when there is only one.",
)


def database_options(function: _Function) -> _Function:
    """Add `--database` and `--config` for a command on one database."""
    return database_option(config_option(function))


def loaded(
    config_file: Path | None, databases: Sequence[str] = (), flags: Mapping[str, Any] | None = None
) -> LoadedConfig:
    """The configuration of this process."""
    return load_config(environment=os.environ, file=config_file, flags=flags, databases=databases)


def the_database(database: str | None, config_file: Path | None) -> DatabaseSection:
    """The selected database; raises `ConfigurationError` if the choice is ambiguous."""
    known = loaded(config_file, () if database is None else (database,)).config.databases
    if len(known) == 1:
        return known[0]
    if not known:
        raise ConfigurationError(
            setting="--database",
            value="none is configured",
            remedy="Give --database with a URL like sqlite:///shop.db, or [[database]] in qmq.toml.",
        )
    raise ConfigurationError(
        setting="--database",
        value=f"{len(known)} are configured: {', '.join(section.name for section in known)}",
        remedy="Give --database with one of the names, or a URL.",
    )
