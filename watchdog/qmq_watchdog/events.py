"""Log lines of the watchdog: an event name and fields, one line per decision, none per row."""

from __future__ import annotations

import json
import logging
from typing import Any, Final

from qmq_client.wire.shown import printable

LOGGER: Final = logging.getLogger("qmq_watchdog")


def log_event(event: str, *, level: int = logging.INFO, **fields: Any) -> None:
    """Write `event name=value …`; handlers get the same pairs as `record.qmq`."""
    if LOGGER.isEnabledFor(level):
        LOGGER.log(level, event_line(event, fields), extra={"qmq": {"event": event, **fields}})


def event_line(event: str, fields: dict[str, Any]) -> str:
    """The text of the line: values with spaces are quoted, empty ones left out, control characters escaped."""
    pairs = [f"{name}={_shown(value)}" for name, value in fields.items() if value not in ("", None)]
    return " ".join([event, *pairs])


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}".rstrip("0").rstrip(".")
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return printable(json.dumps(text, ensure_ascii=False) if set(text) & set(' "\n=') else text)
