"""How long a broker that is away is waited for.

A restart takes seconds, and after a crash the broker reads its logs before it answers. Whoever reads
from it waits meanwhile and goes on where it was. What counts is the time in which nothing comes: an
answer that breaks off has brought something, so a line that breaks again and again gets on.
"""

from __future__ import annotations

import random
import ssl
from collections.abc import Callable
from math import inf, isinf
from typing import Final, TypeVar

from tenacity import RetryCallState, RetryError, Retrying, retry_if_exception_type

from qmq_client.clock import SYSTEM_CLOCK, Clock
from qmq_client.retry import Backoff
from qmq_pipeline.errors import UnreachableError
from qmq_pipeline.places.outage_notices import NOTICES, OutageNotice, OutageNotices

#: How long a broker is waited for by default: longer than a restart in good order and most recoveries.
WAIT_S: Final = 60.0
#: As long as anybody may want to wait for one: a week.
WAIT_S_MAX: Final = 7 * 86_400.0
#: However short the wait, a connection that broke is tried again for so long; what is over by then is not told.
_FLICKER_S: Final = 1.0
#: Between two tries. The cap is what a restart is noticed late by.
_BACKOFF: Final = Backoff(first_ms=100, factor=2.0, max_ms=1_000, jitter=0.2)
_Result = TypeVar("_Result")


class AwayError(Exception):
    """A call got no answer that means anything: the broker is away, or not ready; it may come back."""


class Outage:
    """How one caller of a broker waits while that is away. One thread at a time."""

    def __init__(
        self,
        source: str,
        wait_s: float,
        *,
        clock: Clock = SYSTEM_CLOCK,
        notices: OutageNotices = NOTICES,
    ) -> None:
        """`wait_s`: seconds without anything new, after which it is given up; infinite for never."""
        self.wait_s = wait_s
        self._source = source
        self._clock = clock
        self._notices = notices
        self._failures = 0
        #: Since when nothing has come that was asked for.
        self._since_s = clock.monotonic_s()

    def outlast(self, call: Callable[[], _Result], *, remedy: str) -> _Result:
        """The result of a call that may be repeated, and is for as long as it raises `AwayError`.

        Raises `UnreachableError`, with this remedy, when that was waited for long enough.
        """
        tries = Retrying(
            before=lambda _: self.asking(),
            retry=retry_if_exception_type(AwayError),
            wait=self._pause_after,
            stop=lambda state: isinf(state.upcoming_sleep),
            sleep=self._clock.sleep,
        )
        try:
            result = tries(call)
        except RetryError as error:
            last = error.last_attempt.exception()
            raise UnreachableError(
                source=self._source, reason=_reason(last), remedy=remedy
            ) from last
        self.arrived()
        return result

    def _pause_after(self, state: RetryCallState) -> float:
        """`pause_s` for a try that failed; infinite if enough was waited."""
        assert state.outcome is not None
        pause_s = self.pause_s(_reason(state.outcome.exception()))
        return inf if pause_s is None else pause_s

    def asking(self) -> None:
        """An outage that comes now is counted from here; to be called before each try, or where a long one has failed."""
        if not self._failures:
            self._since_s = self._clock.monotonic_s()

    def arrived(self) -> None:
        """Something has come."""
        if self._failures:
            self._notices.over(self, self._notice(""))
            self._failures = 0
        self._since_s = self._clock.monotonic_s()

    def pause_s(self, reason: str) -> float | None:
        """After a try that brought nothing more: how long to pause before the next; None: enough was waited."""
        seconds = self._seconds()
        left_s = max(self.wait_s, _FLICKER_S) - seconds
        if left_s <= 0:
            self.close()
            return None
        if seconds >= _FLICKER_S:
            self._notices.began(self, self._notice(reason))
        self._failures += 1
        if self._failures == 1:  # most connections that break can be made again at once
            return 0.0
        return min(_BACKOFF.delay_ms(self._failures - 1, random.random()) / 1000, left_s)

    def close(self) -> None:
        """Wait no more, without a word."""
        self._notices.gone(self)
        self._failures = 0

    def _seconds(self) -> float:
        return self._clock.monotonic_s() - self._since_s

    def _notice(self, reason: str) -> OutageNotice:
        wait_s = None if isinf(self.wait_s) else self.wait_s
        return OutageNotice(
            source=self._source, reason=reason, seconds=self._seconds(), wait_s=wait_s
        )


def _reason(error: BaseException | None) -> str:
    return f"the broker does not answer: {error}"


def is_about_trust(error: BaseException | None) -> bool:
    """Whether TLS refused the other side, or was refused by it: no waiting helps there.

    A connection that ends in the middle of TLS is one that broke.
    """
    while error is not None:
        if isinstance(error, ssl.SSLError):
            return not isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError)
        error = error.__cause__ or error.__context__
    return False
