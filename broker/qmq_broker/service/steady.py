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

    def by_wall(self, at_ms: int) -> int:
        """What the wall clock will show at a moment of this time, if it was set back since the start.

        What is released by the wall clock must be stored with that, or it came too late. If the clock
        is ahead, the moment stays as it is: it may be wrong, and be put right.
        """
        return at_ms + min(0, self._clock.now_ms() - self.now_ms())

    def wall_ms(self) -> int:
        """What the wall clock shows."""
        return self._clock.now_ms()

    def latest_ms(self) -> int:
        """This time, or the wall clock's if that is later.

        Due times are other people's wall clocks: one that was behind at the start and has been put
        right since, or is wrong only now, must not make what they allow seem too far ahead.
        """
        return max(self.now_ms(), self._clock.now_ms())
