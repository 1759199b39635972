"""The time by which delayed messages are released: the wall clock, without its jumps.

If the wall clock is set back, this time is set back with it, so that nothing is early; the writer
sees to it that nothing is released twice. If it is set forward to where it never was, or the machine
slept, this time moves by `STEP_MS` at once and then runs `CATCH_UP` times as fast. So a clock that is
wrong by a day releases at first only what is due within a minute. An alarm stands until the two agree
again, or somebody accepts the clock as it is. Slow drift is followed silently: there the wall clock
is right.
"""

from __future__ import annotations

import logging
from typing import Final

from qmq_broker.clock import Clock

_log = logging.getLogger(__name__)
#: More than any correction of a well-kept clock, and more than a short sleep of the machine.
STEP_MS: Final = 60_000
#: Ten hours of sleep are caught up with in one.
CATCH_UP: Final = 10
#: A smaller distance from the wall clock raises no alarm.
ALARM_MS: Final = 1_000


class DelayClock:
    """Milliseconds since 1970 UTC that never jump far ahead. For one thread, but for `accept`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._steady_s = clock.monotonic_s()
        #: The furthest this time has come.
        self._reached_ms = float(clock.now_ms())
        #: How far this time may still be moved at once, beyond the time that passes.
        self._budget_ms = float(STEP_MS)
        #: How far the wall clock is ahead of what was reached; negative if it was set back.
        self.ahead_ms = 0
        #: What time it would be, had the clock not been changed; the later of the two that are possible.
        self.latest_ms = int(self._reached_ms)
        self._is_alarmed = False
        self._is_accepted = False

    def now_ms(self) -> int:
        """The time. Call it often, at least every few seconds."""
        steady_s = self._clock.monotonic_s()
        passed_ms = (steady_s - self._steady_s) * 1000
        self._steady_s = steady_s
        wall_ms = self._clock.now_ms()
        if self._is_accepted:
            self._is_accepted = False
            self._reached_ms, self.latest_ms, passed_ms = float(wall_ms), 0, 0.0
        refilled_ms = self._budget_ms + passed_ms * (CATCH_UP - 1)
        self._budget_ms = min(float(STEP_MS), refilled_ms)
        wanted_ms = max(self._reached_ms, float(wall_ms))
        jump_ms = wanted_ms - self._reached_ms - passed_ms
        if jump_ms > self._budget_ms:
            wanted_ms -= jump_ms - self._budget_ms
            jump_ms = self._budget_ms
        self._budget_ms -= max(0.0, jump_ms)
        self._reached_ms = wanted_ms
        self.ahead_ms = round(wall_ms - wanted_ms)
        is_back = self.ahead_ms < -ALARM_MS
        self.latest_ms = max(wall_ms, int(self.latest_ms + passed_ms) if is_back else 0)
        self._alarm()
        return min(int(wanted_ms), wall_ms)

    def accept(self) -> None:
        """Take the clock as it is, as a start does. In any thread; the next `now_ms` follows."""
        self._is_accepted = True

    @property
    def alarm(self) -> str:
        """What is wrong with the clock just now; empty for nothing."""
        if self.ahead_ms > ALARM_MS:
            return f"the clock was set forward: {self.ahead_ms} ms are being caught up with"
        if self.ahead_ms < -ALARM_MS:
            return (
                f"the clock was set back: messages delayed before wait {-self.ahead_ms} ms longer"
            )
        return ""

    def _alarm(self) -> None:
        alarm = self.alarm
        if alarm and not self._is_alarmed:
            _log.warning("clock jumped: ahead_ms=%d; %s", self.ahead_ms, alarm)
        elif self._is_alarmed and not alarm:
            _log.warning("clock is right again: delayed messages are released in time")
        self._is_alarmed = bool(alarm)
