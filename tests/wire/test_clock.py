"""The machine's clock: milliseconds of 1970, a monotonic second that is not the wall's, and sleep."""

from __future__ import annotations

import datetime

from qmq_client.clock import SYSTEM_CLOCK, Clock, SystemClock


def test_the_system_clock_counts_milliseconds_since_1970() -> None:
    clock: Clock = SystemClock()
    before_ms = datetime.datetime.now(datetime.UTC).timestamp() * 1000
    now_ms = clock.now_ms()
    after_ms = datetime.datetime.now(datetime.UTC).timestamp() * 1000
    assert isinstance(now_ms, int)
    assert before_ms - 1 <= now_ms <= after_ms + 1


def test_the_monotonic_clock_never_goes_back_and_sleep_takes_its_time() -> None:
    first_s = SYSTEM_CLOCK.monotonic_s()
    SYSTEM_CLOCK.sleep(0.01)
    second_s = SYSTEM_CLOCK.monotonic_s()
    assert second_s - first_s >= 0.009
    assert SYSTEM_CLOCK.monotonic_s() >= second_s
