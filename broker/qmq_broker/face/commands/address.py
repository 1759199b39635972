"""Where a running broker is and what lets one in, for the commands that ask it: as every other command.

The command line goes before `QMQ_BROKER_URL`, that before `[broker] url` of the configuration file,
that before the built-in address. The client's own reading of that file is not used, because of the
client this package knows only the wire; what else the file says is not looked at here.
"""

from __future__ import annotations

import os
import re
import ssl
import tomllib
from pathlib import Path
from typing import Final

import click

DEFAULT_BROKER: Final = "http://127.0.0.1:9470"
_CONFIG_FILE: Final = "qmq.toml"
_CONFIG_VARIABLE: Final = "QMQ_CONFIG"
_TOKEN: Final = re.compile(r"[!-~]{8,150}\Z")


def configured_url() -> str:
    """The URL of the file that `QMQ_CONFIG` names, or of `qmq.toml` in the working directory.

    The built-in address where neither says one; `click.UsageError` when the file cannot be used.
    """
    url = _section().get("url", DEFAULT_BROKER)
    if not isinstance(url, str):
        raise click.UsageError(f"{_file()}: broker.url is no text. Give one like {DEFAULT_BROKER}.")
    return url


def configured_headers() -> dict[str, str]:
    """The headers that show the operator's token, by the names that every command knows."""
    token, file = _setting("token"), _setting("token_file")
    if file and not token:
        try:
            token = Path(file).read_text(encoding="ascii").strip()
        except (OSError, ValueError) as error:
            raise click.UsageError(f"broker.token_file {file}: {error}.") from error
    if not token:
        return {}
    if not _TOKEN.match(token):
        raise click.UsageError("The token (not shown) is none; give what `token add` printed.")
    return {"authorization": f"Bearer {token}"}


def configured_tls() -> ssl.SSLContext:
    """How TLS is spoken with the broker: its host name checked, own certificate where one is set."""
    try:
        context = ssl.create_default_context(cafile=_setting("ca_file") or None)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if certificate := _setting("cert_file"):
            context.load_cert_chain(certificate, _setting("key_file") or None)
    except (OSError, ValueError) as error:
        raise click.UsageError(
            f"broker.ca_file, broker.cert_file or broker.key_file: {error}. Give files in PEM."
        ) from error
    return context


def _setting(key: str) -> str:
    value = os.environ.get(f"QMQ_BROKER_{key.upper()}") or _section().get(key, "")
    if not isinstance(value, str):
        raise click.UsageError(f"{_file()}: broker.{key} is no text. Write it in quotes.")
    return value


def _section() -> dict[str, object]:
    """`[broker]` of the file; empty without one."""
    path = _file()
    if not os.environ.get(_CONFIG_VARIABLE) and not path.is_file():
        return {}
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # of which TOML and text errors are kinds
        raise click.UsageError(f"{path}: {error}. Mend the file, or give --broker.") from error
    section = content.get("broker", {})
    if not isinstance(section, dict):
        raise click.UsageError(f"{path}: broker is no section. Write [broker].")
    return section


def _file() -> Path:
    return Path(os.environ.get(_CONFIG_VARIABLE) or _CONFIG_FILE)


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
