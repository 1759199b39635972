"""Log lines: an event name and its fields as `key=value`, one line each, control characters escaped.

Bodies of messages are never logged.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Final

from qmq_client.wire.shown import printable, utc_text

#: Characters shown of one value.
_VALUE_CHARACTERS_MAX: Final = 2_000


def log_event(
    logger: logging.Logger,
    level: int,
    event: str,
    *,
    error: BaseException | None = None,
    details: Mapping[str, object] | None = None,
    **named: object,
) -> None:
    """Write one line; `error` adds its type, text and place, `details` more fields."""
    if not logger.isEnabledFor(level):
        return
    named |= details or {}
    if error is not None:
        named["error"] = type(error).__name__
        named["reason"] = str(error)
        named["trace"] = " | ".join(
            f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno} {frame.name}"
            for frame in traceback.extract_tb(error.__traceback__)[-8:]
        )
    parts = [event, *(f"{name}={show(value)}" for name, value in named.items())]
    logger.log(level, "%s", " ".join(parts))


def values(prefix: str, settings: object) -> dict[str, object]:
    """The fields of a dataclass for a log line, each as `prefix.name`."""
    assert is_dataclass(settings)
    return {f"{prefix}.{field.name}": getattr(settings, field.name) for field in fields(settings)}


def show(value: object) -> str:
    """A value of a log line: bounded, printable, quoted if it contains a space."""
    text = str(value)[:_VALUE_CHARACTERS_MAX]
    if text.isprintable() and text.isascii():
        if text and not any(character in text for character in ' "='):
            return text
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return ascii(text)


def start_logging(level: int) -> None:
    """Send every log line of this process to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    # The server's own lines repeat ours, one per hostile request among them.
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
    logging.getLogger("asyncio").setLevel(logging.ERROR)


class _Formatter(logging.Formatter):
    """One line per record, whatever other libraries put into it."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        return utc_text(record.created)

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))
