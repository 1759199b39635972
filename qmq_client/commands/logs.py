"""What long-running commands write to standard error, and how much of it."""

from __future__ import annotations

import logging
import sys
from typing import Final

import click

#: They tell each request at INFO: several lines a second of a process that has nothing to do.
_CHATTY: Final = ("httpx", "httpcore")
_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s %(message)s"
#: Times as the broker's log has them, so that the lines of all processes may be sorted together.
_TIME_FORMATS: Final = ("%Y-%m-%dT%H:%M:%S", "%s.%03d")

log_level_option = click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"], case_sensitive=False),
    default="info",
    show_default=True,
    help="Log lines of this level and above.",
)


def log_to_stderr(log_level: str) -> None:
    """Log from this level on; of the HTTP library warnings at most."""
    form = logging.Formatter(_FORMAT)
    form.default_time_format, form.default_msec_format = _TIME_FORMATS
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(form)
    logging.basicConfig(level=log_level.upper(), handlers=[handler])
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
