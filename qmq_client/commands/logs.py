"""The logs of long-running commands on standard error, bounded."""

from __future__ import annotations

import logging
import sys
from typing import Final

import click

from qmq_client.wire.shown import utc_text

#: Libraries that log each request at INFO: several lines a second for an idle process.
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
    """Log from this level on; from the HTTP library only warnings and errors."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(_FORMAT))
    logging.basicConfig(level=log_level.upper(), handlers=[handler])
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)


class _Formatter(logging.Formatter):
    """Times in the format of the broker's log."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        return utc_text(record.created)
