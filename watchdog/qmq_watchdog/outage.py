"""Outages of a database or of the broker: how often to try, and how often to log.

Both rates are bounded for an outage of any length: waits grow to a maximum, and a line is logged
when the trouble begins, changes its kind, doubles its count of failures, or ends.

The circuit breaker of the broker is shared by all databases of one watchdog: without it hundreds of
them would claim rows, try, and return them for as long as the outage lasts. With it one database at a
time tries, at growing intervals, and the others leave their rows alone until one request succeeds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from qmq_client.clock import SYSTEM_CLOCK, Clock
from qmq_client.errors import QmqError
from qmq_client.retry import Backoff

#: One failure may be the fault of one batch; the next is not.
_FAILURES_MAX: Final = 2
#: How often the others check whether the one that tries got through: it has as soon as one batch
#: has.
_LOOK_S: Final = 2.0
#: When another may try although the first has reported nothing: far longer than a request may take.
_TRY_S_MAX: Final = 60.0


class BrokerGate:
    """Open while the broker answers. Safe for any number of threads."""

    def __init__(
        self, backoff: Backoff, random: Callable[[], float], clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._backoff = backoff
        self._random = random
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._shut_until_s = 0.0
        #: A thread is trying, and is waited for until then.
        self._tried_until_s = 0.0

    def wait_s(self) -> float:
        """0 to go ahead; otherwise how long to leave the broker and the rows alone."""
        with self._lock:
            if self._failures < _FAILURES_MAX:
                return 0.0
            now_s = self._clock.monotonic_s()
            if now_s < self._tried_until_s:
                return min(_LOOK_S, self._tried_until_s - now_s)
            left_s = self._shut_until_s - now_s
            if left_s <= 0:
                self._tried_until_s = now_s + _TRY_S_MAX  # this caller tries for all
                return 0.0
            return left_s * (1.0 + 0.1 * self._random())

    def on_nothing(self) -> None:
        """The one that went ahead had nothing to send: let another try."""
        with self._lock:
            self._tried_until_s = 0.0  # the wait set by another's failure stays

    def on_failure(self, *, at_least_s: float = 0.0) -> None:
        """The broker gave no answer, or asks to be left alone for this long.

        Requests that were under way when the gate was shut fail with it. They are no further tries, or a
        moment's outage would be waited for like a long one.
        """
        with self._lock:
            now_s = self._clock.monotonic_s()
            self._tried_until_s = 0.0
            if now_s < self._shut_until_s:
                self._shut_until_s = max(self._shut_until_s, now_s + at_least_s)
                return
            self._failures += 1
            if self.is_shut:
                tries = self._failures - _FAILURES_MAX + 1
                delay_s = self._backoff.delay_ms(tries, self._random()) / 1000
                self._shut_until_s = now_s + max(delay_s, at_least_s)

    def on_success(self) -> None:
        """The broker took something."""
        with self._lock:
            self._failures = 0
            self._shut_until_s = self._tried_until_s = 0.0

    @property
    def is_shut(self) -> bool:
        """Whether the broker is being left alone, except for one try at a time."""
        return self._failures >= _FAILURES_MAX


#: Kinds of trouble, as the log, the metrics and /healthz show them.
BROKER_UNREACHABLE: Final = "broker_unreachable"
READ_ONLY: Final = "read_only"
FAULT: Final = "fault"
#: How databases say that they cannot be written to.
_READ_ONLY_TEXTS: Final = ("read-only", "readonly")


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What to do after a failure."""

    #: How long to wait before the next try.
    delay_s: float
    #: Whether it is worth a line in the log.
    is_news: bool


class Outage:
    """Counts failures in a row. One thread at a time."""

    def __init__(self, backoff: Backoff, random: Callable[[], float]) -> None:
        self._backoff = backoff
        self._random = random
        self._kind = ""
        #: Failures since the last success; 0 while all is well.
        self.failures = 0

    def on_failure(self, kind: str, *, at_least_s: float = 0.0) -> Failure:
        """Count a failure; `kind` tells one trouble from another."""
        self.failures += 1
        is_news = kind != self._kind or self.failures & (self.failures - 1) == 0
        self._kind = kind
        delay_s = self._backoff.delay_ms(self.failures, self._random()) / 1000
        return Failure(delay_s=max(delay_s, at_least_s), is_news=is_news)

    @property
    def kind(self) -> str:
        """The kind of the last trouble; empty while all is well."""
        return self._kind

    def on_success(self) -> int:
        """All is well; returns how many failures that ends."""
        ended, self.failures, self._kind = self.failures, 0, ""
        return ended


def kind_of(error: QmqError) -> str:
    """One of a few words for what a database did not do."""
    if any(text in str(error) for text in _READ_ONLY_TEXTS):
        return READ_ONLY
    return error.code
