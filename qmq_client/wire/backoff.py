"""Exponential backoff: the growing wait before a next attempt, for the SDK and the broker's groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: Default share by which a wait may be shorter.
JITTER: Final = 0.2
#: Most doublings; more would only overflow, and every sensible `max_ms` is reached long before.
_EXPONENT_MAX: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ExponentialBackoff:
    """Growing waits with a limit and jitter, so that messages that failed together are not retried together."""

    #: Wait after the first failed attempt.
    first_ms: int = 1_000
    #: Each wait is the previous one multiplied by this.
    factor: float = 2.0
    #: The longest wait.
    max_ms: int = 600_000
    #: Share by which a wait may be shorter; 0 for none, at most 1.
    jitter: float = JITTER

    def delay_ms(self, attempt: int, random: float) -> int:
        """The wait after the failed attempt number `attempt`, counted from 1.

        Requires: `0 <= random <= 1`.
        """
        exponent = min(max(attempt, 1) - 1, _EXPONENT_MAX)
        whole_ms = min(self.first_ms * self.factor**exponent, self.max_ms)
        return int(whole_ms * (1.0 - self.jitter * random))
