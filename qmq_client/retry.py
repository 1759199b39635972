"""Retries: the backoff of rows and messages, and the exceptions by which a handler settles its message."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from qmq_client.errors import ConfigurationError
from qmq_client.wire.backoff import ExponentialBackoff
from qmq_client.wire.limits import DEFAULT_LIMITS
from qmq_client.wire.requests import BACKOFF_FACTOR_MAX

#: The longest wait before a next delivery: as long as a message may be delayed.
AFTER_MAX: Final = timedelta(milliseconds=DEFAULT_LIMITS.delay_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff(ExponentialBackoff):
    """Growing waits with a limit and jitter; raises `ConfigurationError` for invalid settings."""

    def __post_init__(self) -> None:
        waits_ms = (self.first_ms, self.max_ms)
        if not all(map(_is_whole, waits_ms)) or not 0 <= self.first_ms <= self.max_ms:
            remedy = "Give whole milliseconds from 0, and max_ms no less than first_ms."
            raise _wrong_backoff("first_ms, max_ms", waits_ms, remedy)
        if not (_is_number(self.factor) and 1 <= self.factor <= BACKOFF_FACTOR_MAX):
            raise _wrong_backoff(
                "factor", self.factor, f"Give a number from 1 to {BACKOFF_FACTOR_MAX}."
            )
        if not (_is_number(self.jitter) and 0 <= self.jitter <= 1):
            raise _wrong_backoff("jitter", self.jitter, "Give a number from 0 to 1.")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, float) or _is_whole(value)


def _wrong_backoff(name: str, value: object, remedy: str) -> ConfigurationError:
    return ConfigurationError(setting=f"Backoff {name}", value=repr(value), remedy=remedy)


class Breaker:
    """A circuit breaker: stops requests to a service that does not answer, and tries it again at growing intervals.

    ::

        closed ──n failures in a row──▶ open ──wait is over──▶ half open ──success──▶ closed
                                          ▲                        │
                                          └──failure, wait doubled─┘

    Used by one thread; does not read a clock.
    """

    def __init__(self, *, failures_max: int, first_ms: int, wait_ms_max: int) -> None:
        self._failures_max = failures_max
        self._backoff = Backoff(first_ms=first_ms, max_ms=wait_ms_max, jitter=0.0)
        self._failures = 0
        self._open_until_s: float | None = None

    def allows(self, now_s: float) -> bool:
        """Whether to send a request now. In the half open state send only one."""
        return self._open_until_s is None or now_s >= self._open_until_s

    @property
    def is_open(self) -> bool:
        """Whether so many requests failed that most work is held back."""
        return self._open_until_s is not None

    @property
    def failures(self) -> int:
        """How many requests in a row have failed."""
        return self._failures

    def on_success(self) -> None:
        """Record an answer."""
        self._failures = 0
        self._open_until_s = None

    def on_failure(self, now_s: float, *, at_least_s: float = 0.0) -> None:
        """Record a failure; `at_least_s` is the pause that the service requested."""
        self._failures += 1
        if self._failures >= self._failures_max or at_least_s > 0:
            times_open = max(1, self._failures - self._failures_max + 1)
            wait_s = self._backoff.delay_ms(times_open, 0.0) / 1000
            self._open_until_s = now_s + max(wait_s, at_least_s)


class Retry(Exception):  # noqa: N818  # a handler's request, not an error
    """Raised by a handler to return the message for another delivery.

    `after` is a number of seconds or a `timedelta`, up to two years; None uses the group's backoff.
    Raises `ConfigurationError` for anything else.
    """

    def __init__(self, after: float | timedelta | None = None) -> None:
        super().__init__("again by the backoff" if after is None else f"again after {after}")
        #: Milliseconds to wait, or None.
        self.after_ms: int | None = None if after is None else _after_ms(after)


class Reject(Exception):  # noqa: N818  # a handler's verdict, not an error
    """Raised by a handler whose message can never be handled: it becomes a dead letter at once.

    `reason` is a text or an error.
    """

    def __init__(self, reason: str | BaseException = "") -> None:
        super().__init__(reason)
        self.reason = reason


def _after_ms(after: object) -> int:
    seconds = after.total_seconds() if isinstance(after, timedelta) else after
    seconds_max = AFTER_MAX.total_seconds()
    if not isinstance(seconds, int | float) or not 0 <= seconds <= seconds_max:
        raise ConfigurationError(
            setting="after",
            value=repr(after),
            remedy=f"Give seconds from 0 to {seconds_max:.0f}, or a timedelta.",
        )
    return round(seconds * 1000)
