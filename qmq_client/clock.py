"""Time, behind a port: the only module of client and broker that reads a clock.

Everything that advances by time takes `now` as an argument or a `Clock`, so that tests and
simulations decide what time it is.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Where time comes from."""

    def now_ms(self) -> int:
        """Wall clock, integer milliseconds since 1970 UTC; may jump."""
        ...

    def monotonic_s(self) -> float:
        """Seconds since some moment; never goes back. For measuring and waiting."""
        ...

    def sleep(self, seconds: float) -> None:
        """Block this thread."""
        ...


class SystemClock:
    """The clock of the machine."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    # Asked at every commit with messages: without a call in between.
    monotonic_s = staticmethod(time.monotonic)
    sleep = staticmethod(time.sleep)


SYSTEM_CLOCK = SystemClock()
