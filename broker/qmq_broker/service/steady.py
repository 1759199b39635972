"""Wall-clock milliseconds that never jump: the wall clock at the start, advanced by the monotonic
clock.

Leases and redeliveries are measured with it, so that setting the machine's clock neither ends
leases early nor keeps messages back. Only a restart reads the wall clock again.
"""

from __future__ import annotations

from qmq_broker.clock import Clock


class SteadyTime:
    """The time by which deliveries are measured."""

    __slots__ = ("_clock", "_offset_ms")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._offset_ms = clock.now_ms() - clock.monotonic_s() * 1000

    def now_ms(self) -> int:
        """Milliseconds since 1970 UTC; never goes back while this process lives."""
        return int(self._offset_ms + self._clock.monotonic_s() * 1000)

    def latest_ms(self) -> int:
        """This time, or the wall clock's if that is later.

        Due times are other people's wall clocks: one that was behind at the start and has been put
        right since, or is wrong only now, must not make what they allow seem too far ahead.
        """
        return max(self.now_ms(), self._clock.now_ms())
