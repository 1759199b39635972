"""Where a running broker is, for the commands that ask it: as every other command of `qmq` has it.

The command line goes before `QMQ_BROKER_URL`, that before `[broker] url` of the configuration file,
that before the built-in address. The client's own reading of that file is not used, because of the
client this package knows only the wire; what else the file says is not looked at here.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Final

import click

DEFAULT_BROKER: Final = "http://127.0.0.1:9470"
_CONFIG_FILE: Final = "qmq.toml"
_CONFIG_VARIABLE: Final = "QMQ_CONFIG"


def configured_url() -> str:
    """The URL of the file that `QMQ_CONFIG` names, or of `qmq.toml` in the working directory.

    The built-in address where neither says one; `click.UsageError` when the file cannot be used.
    """
    given = os.environ.get(_CONFIG_VARIABLE)
    path = Path(given or _CONFIG_FILE)
    if not given and not path.is_file():
        return DEFAULT_BROKER
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # of which TOML and text errors are kinds
        raise click.UsageError(f"{path}: {error}. Mend the file, or give --broker.") from error
    section = content.get("broker", {})
    url = section.get("url", DEFAULT_BROKER) if isinstance(section, dict) else None
    if not isinstance(url, str):
        raise click.UsageError(f"{path}: broker.url is no text. Give one like {DEFAULT_BROKER}.")
    return url


def _without_slash(_: click.Context, __: click.Parameter, url: str) -> str:
    return url.rstrip("/")


broker_option = click.option(
    "--broker",
    "url",
    default=configured_url,
    show_default=f"broker.url of {_CONFIG_FILE}, or {DEFAULT_BROKER}",
    envvar="QMQ_BROKER_URL",
    show_envvar=True,
    callback=_without_slash,
    help="URL of the broker.",
)
