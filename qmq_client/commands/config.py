"""`qmq config show`: every setting, its value and where it came from; secrets masked."""

from __future__ import annotations

import json
from pathlib import Path

import click

from qmq_client.commands.settings import config_option, json_option, loaded


@click.group()
def config() -> None:
    """Show every setting and where its value came from."""


@config.command()
@config_option
@json_option
def show(config_file: Path | None, as_json: bool) -> None:
    """Print each setting, its value, and what set it."""
    settings = loaded(config_file).settings
    if as_json:
        rows = [
            {"setting": setting.path, "value": setting.value, "origin": setting.origin}
            for setting in settings
        ]
        click.echo(json.dumps(rows, indent=2))
        return
    width = max(len(setting.path) for setting in settings)
    value_width = max(len(str(setting.value)) for setting in settings)
    for setting in settings:
        click.echo(f"{setting.path:<{width}}  {setting.value!s:<{value_width}}  {setting.origin}")
