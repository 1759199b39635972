"""The counters of a consumer."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from typing import Final

#: The names of all counters, so that unused ones are reported as zero.
NAMES: Final = (
    "pulled",
    "acked",
    "nacked",
    "rejected",
    "dropped",
    "duplicates",
    "malformed",
    "timed_out",
    "late",
    "stale",
    "lost_leases",
    "pull_failures",
    "settle_failures",
    "settle_refused",
    "inbox_failures",
)


class Counters:
    """Numbers that only grow. Thread safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: Counter[str] = Counter(dict.fromkeys(NAMES, 0))

    def add(self, name: str, count: int = 1) -> None:
        """Count `count` more of `name`."""
        if count:
            with self._lock:
                self._values[name] += count

    def snapshot(self) -> Mapping[str, int]:
        """All numbers at one moment."""
        with self._lock:
            return dict(self._values)
