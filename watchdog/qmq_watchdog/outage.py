"""Outages of a database or of the broker: how often to try, and how often to log.

Both rates are bounded for an outage of any length: waits grow to a maximum, and a line is logged
when an outage begins, changes its kind, has doubled its count of failures, or ends.

The circuit breaker of the broker is shared by all databases of one watchdog: without it hundreds of
them would claim rows, try, and return them for as long as the outage lasts. With it one database at a
time probes the broker, at growing intervals, and the others leave their rows alone until one request succeeds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from qmq_client.clock import SYSTEM_CLOCK, Clock
from qmq_client.errors import QmqError
from qmq_client.retry import Backoff

#: A single failure may be caused by one batch; a second one in a row is an outage.
_FAILURES_MAX: Final = 2
#: How often the others check whether the probe succeeded: it has when one batch was accepted.
_LOOK_S: Final = 2.0
#: When another database may probe although the first has reported nothing: far longer than a request may take.
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
        #: A thread probes; the others wait for it until this time.
        self._tried_until_s = 0.0

    def wait_s(self) -> float:
        """0 to send; otherwise how long to send nothing and claim no rows."""
        with self._lock:
            if self._failures < _FAILURES_MAX:
                return 0.0
            now_s = self._clock.monotonic_s()
            if now_s < self._tried_until_s:
                return min(_LOOK_S, self._tried_until_s - now_s)
            left_s = self._shut_until_s - now_s
            if left_s <= 0:
                self._tried_until_s = now_s + _TRY_S_MAX  # this caller probes for all
                return 0.0
            return left_s * (1.0 + 0.1 * self._random())

    def on_nothing(self) -> None:
        """The probing caller had nothing to send: let another one probe."""
        with self._lock:
            self._tried_until_s = 0.0  # the wait set by another's failure stays

    def on_failure(self, *, at_least_s: float = 0.0) -> None:
        """The broker gave no answer, or asked for a pause of this length.

        Requests that were under way when the gate was shut fail with it. They do not count as
        further probes, otherwise a short outage would cause a long wait.
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
        """The broker accepted a batch."""
        with self._lock:
            self._failures = 0
            self._shut_until_s = self._tried_until_s = 0.0

    @property
    def is_shut(self) -> bool:
        """Whether the gate is shut, so that only one probe at a time is sent."""
        return self._failures >= _FAILURES_MAX


#: Kinds of failure, as the log, the metrics and /healthz show them.
BROKER_UNREACHABLE: Final = "broker_unreachable"
READ_ONLY: Final = "read_only"
FAULT: Final = "fault"
#: Error texts of databases that cannot be written to.
_READ_ONLY_TEXTS: Final = ("read-only", "readonly")


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What to do after a failure."""

    #: Wait before the next attempt.
    delay_s: float
    #: Whether it is worth a line in the log.
    is_news: bool


class Outage:
    """Counts failures in a row. One thread at a time."""

    def __init__(self, backoff: Backoff, random: Callable[[], float]) -> None:
        self._backoff = backoff
        self._random = random
        self._kind = ""
        #: Failures since the last success; 0 without an outage.
        self.failures = 0

    def on_failure(self, kind: str, *, at_least_s: float = 0.0) -> Failure:
        """Count a failure; `kind` tells one outage from another."""
        self.failures += 1
        is_news = kind != self._kind or self.failures & (self.failures - 1) == 0
        self._kind = kind
        delay_s = self._backoff.delay_ms(self.failures, self._random()) / 1000
        return Failure(delay_s=max(delay_s, at_least_s), is_news=is_news)

    @property
    def kind(self) -> str:
        """The kind of the current outage; empty without one."""
        return self._kind

    def on_success(self) -> int:
        """End an outage; returns its number of failures."""
        ended, self.failures, self._kind = self.failures, 0, ""
        return ended


def kind_of(error: QmqError) -> str:
    """The kind of a database's failure, one of a few words."""
    if any(text in str(error) for text in _READ_ONLY_TEXTS):
        return READ_ONLY
    return error.code
