"""The clock: the only module of client and broker that reads the time.

All code that depends on time takes `now` or a `Clock` as an argument, so that tests and simulations control the time.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """The interface of a clock."""

    def now_ms(self) -> int:
        """Wall clock, integer milliseconds since 1970 UTC; may jump."""
        ...

    def monotonic_s(self) -> float:
        """Seconds since an arbitrary moment; never decreases. For measuring and waiting."""
        ...

    def sleep(self, seconds: float) -> None:
        """Block this thread."""
        ...


class SystemClock:
    """The clock of the machine."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    # Called at every commit with messages, so it is assigned directly, without a wrapper.
    monotonic_s = staticmethod(time.monotonic)
    sleep = staticmethod(time.sleep)


SYSTEM_CLOCK = SystemClock()
