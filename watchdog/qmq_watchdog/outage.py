"""An outage: how often to try, and how often to log, while a database or the broker is away.

Both rates are bounded for an outage of any length: waits grow to a maximum, and a line is logged
when the trouble begins, changes its kind, doubles its count of failures, or ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from qmq_client.errors import QmqError
from qmq_client.retry import Backoff

#: Kinds of trouble, as the log, the metrics and /healthz show them.
BROKER_AWAY: Final = "broker_unreachable"
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
        """Something is away; `kind` tells one trouble from another."""
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
