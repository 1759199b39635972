"""The circuit breaker of the broker, shared by all databases of one watchdog.

A broker that is away is away for every database. Without this, hundreds of them would claim rows,
try, and give them back for as long as it lasts. With it, one database at a time tries, at growing
intervals, and the others leave their rows alone until it gets through.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from qmq_client.clock import SYSTEM_CLOCK, Clock
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
        #: Somebody is trying, and is waited for until then.
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
