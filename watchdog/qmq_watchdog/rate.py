"""The rate limit of one database in one watchdog: so many rows a second.

After a pause at most one second's worth goes at once; at the start one row does, since nobody knows
what the watchdog before has just sent.
"""

from __future__ import annotations

#: How much may go at once, and what to wait for, in seconds' worth of rows.
_BURST_S = 1.0
_WAIT_S = 0.25


class RowRate:
    """A token bucket of rows; it knows no clock. One thread at a time."""

    def __init__(self, rows_per_s: int, now_s: float) -> None:
        self._rows_per_s = rows_per_s
        self._rows = 1.0
        self._filled_s = now_s

    @property
    def is_limited(self) -> bool:
        """Whether there is a rate at all."""
        return self._rows_per_s > 0

    def allowed(self, now_s: float) -> int | None:
        """How many rows may be taken now; None for any number."""
        if not self.is_limited:
            return None
        added = (now_s - self._filled_s) * self._rows_per_s
        self._rows = min(self._rows + added, max(1.0, self._rows_per_s * _BURST_S))
        self._filled_s = now_s
        return max(0, int(self._rows))

    def take(self, rows: int) -> None:
        """This many rows were taken."""
        self._rows -= rows

    def wait_s(self) -> float:
        """How long to wait until it is worth coming back, if nothing is allowed now."""
        if not self.is_limited:
            return 0.0
        wanted = max(1.0, self._rows_per_s * _WAIT_S)
        return max(0.0, (wanted - self._rows) / self._rows_per_s)
