"""Parses the time that a call may wait."""

from __future__ import annotations

import math
import threading
from typing import Any

from qmq_client.errors import ConfigurationError
from qmq_client.wire.shown import shorten


def checked_deadline_s(argument: str, given: Any) -> float:
    """The deadline, limited to the longest wait of the system; raises `ConfigurationError` for
    other values than numbers.
    """
    is_number = isinstance(given, int) or (isinstance(given, float) and not math.isnan(given))
    if not is_number:
        raise ConfigurationError(
            setting=argument,
            value=f"{type(given).__name__} {shorten(given)}",
            remedy="Give a number of seconds.",
        )
    return float(min(given, threading.TIMEOUT_MAX))
