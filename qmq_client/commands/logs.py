"""What long-running commands write to standard error, and how much of it."""

from __future__ import annotations

import logging
import sys
from typing import Final

import click

#: They tell each request at INFO: several lines a second of a process that has nothing to do.
_CHATTY: Final = ("httpx", "httpcore")
_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s %(message)s"

log_level_option = click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"], case_sensitive=False),
    default="info",
    show_default=True,
    help="Log lines of this level and above.",
)


def log_to_stderr(log_level: str) -> None:
    """Log from this level on; of the HTTP library warnings at most."""
    logging.basicConfig(level=log_level.upper(), format=_FORMAT, stream=sys.stderr)
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
