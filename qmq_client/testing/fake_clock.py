"""A clock that tests advance."""

from __future__ import annotations

import threading


class FakeClock:
    """`Clock` for tests. Thread safe; `sleep` moves it instead of waiting."""

    def __init__(self, *, now_ms: int = 1_700_000_000_000) -> None:
        self._lock = threading.Lock()
        self._now_ms = now_ms
        self._monotonic_ms = 0

    def now_ms(self) -> int:
        """Wall clock; moved by `advance` and set by `jump`."""
        return self._now_ms

    def monotonic_s(self) -> float:
        """Moved by `advance` only."""
        return self._monotonic_ms / 1000

    def sleep(self, seconds: float) -> None:
        """Advance at once, by at least a millisecond, so that a waiting loop ends."""
        self.advance(max(1, round(seconds * 1000)) if seconds > 0 else 0)

    def advance(self, milliseconds: int) -> None:
        """Advance the time."""
        if milliseconds < 0:
            raise ValueError("time only advances; use jump for a wall clock that is set back")
        with self._lock:
            self._now_ms += milliseconds
            self._monotonic_ms += milliseconds

    def jump(self, milliseconds: int) -> None:
        """Set the wall clock forwards or back."""
        with self._lock:
            self._now_ms += milliseconds
