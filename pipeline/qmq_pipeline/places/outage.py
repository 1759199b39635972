"""The wait for a broker that is unreachable.

A restart takes seconds, and after a crash the broker reads its logs before it answers. A reader
waits meanwhile and continues where it was. The wait is measured since the last received data, so an
incomplete answer restarts it. An outage of more than a second is logged when it begins and when it
ends.
"""

from __future__ import annotations

import logging
import random
import ssl
from collections.abc import Callable
from math import isinf
from typing import Final, TypeVar

from qmq_client.clock import SYSTEM_CLOCK, Clock
from qmq_client.retry import Backoff
from qmq_pipeline.errors import UnreachableError

_LOG: Final = logging.getLogger("qmq.pipeline")
#: Default wait for a broker: longer than a clean restart and most recoveries.
WAIT_S: Final = 60.0
#: The longest wait: a week.
WAIT_S_MAX: Final = 7 * 86_400.0
#: A broken connection is tried again for at least this long, without a log line.
_FLICKER_S: Final = 1.0
#: Pauses between two tries. The longest one bounds how late a restart is noticed.
_BACKOFF: Final = Backoff(first_ms=100, factor=2.0, max_ms=1_000, jitter=0.2)
_Result = TypeVar("_Result")


class AwayError(Exception):
    """A call got no usable answer: the broker is unreachable or not ready, perhaps for a short time."""


class Outage:
    """The waits of one client of a broker while the broker is unreachable. One thread at a time."""

    def __init__(self, source: str, wait_s: float, *, clock: Clock = SYSTEM_CLOCK) -> None:
        """`wait_s`: seconds without new data after which the wait ends; infinite for never."""
        self.wait_s = wait_s
        self._source = source
        self._clock = clock
        self._is_logged = False
        #: Time since which no requested data has arrived.
        self._since_s = clock.monotonic_s()

    def outlast(self, call: Callable[[], _Result], *, remedy: str) -> _Result:
        """The result of a call, which is repeated while it raises `AwayError`.

        Raises `UnreachableError` with this remedy after the longest wait.
        """
        self._since_s = self._clock.monotonic_s()
        failures = 0
        while True:
            try:
                result = call()
            except AwayError as error:
                reason = f"the broker does not answer: {error}"
                left_s = max(self.wait_s, _FLICKER_S) - self._seconds()
                if left_s <= 0:
                    self._is_logged = False
                    raise UnreachableError(
                        source=self._source, reason=reason, remedy=remedy
                    ) from error
                self._log_begin(reason)
                if failures:  # most broken connections can be opened again at once
                    pause_s = _BACKOFF.delay_ms(failures, random.random()) / 1000
                    until_logged_s = _FLICKER_S - self._seconds()
                    bounds_s = [left_s] + ([until_logged_s] if until_logged_s > 0 else [])
                    self._clock.sleep(min(pause_s, *bounds_s))
                failures += 1
            else:
                self.arrived()
                return result

    def arrived(self) -> None:
        """Record that data has arrived."""
        if self._is_logged:
            seconds = self._seconds()
            _LOG.warning("%s: the broker answers again, after %.0f s", self._source, seconds)
            self._is_logged = False
        self._since_s = self._clock.monotonic_s()

    def _log_begin(self, reason: str) -> None:
        if self._is_logged or self._seconds() < _FLICKER_S:
            return
        bound = "" if isinf(self.wait_s) else f", for {self.wait_s:g} s at most"
        _LOG.warning("%s: %s; waiting for it%s", self._source, reason, bound)
        self._is_logged = True

    def _seconds(self) -> float:
        return self._clock.monotonic_s() - self._since_s


def is_about_trust(error: BaseException | None) -> bool:
    """Whether TLS refused the peer, or the peer refused us: waiting does not help then.

    A connection that ends in the middle of TLS counts as broken.
    """
    while error is not None:
        if isinstance(error, ssl.SSLError):
            return not isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError)
        error = error.__cause__ or error.__context__
    return False
