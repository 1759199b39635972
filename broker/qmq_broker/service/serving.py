"""The serving state of the broker: whether it accepts messages, and if not, why. Every route checks it.

::

    serving ◀─▶ read-only        (asked for: pulls and settlements only)
       └───┬───────┘
           ├──▶ draining         (a stop was asked for; ends with the process)
           └──▶ poisoned         (a write or sync failed; nothing is acknowledged any more)
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from qmq_broker.errors import UnavailableError


class Serving(StrEnum):
    """States of a broker."""

    SERVING = "serving"
    READ_ONLY = "read-only"
    DRAINING = "draining"
    POISONED = "poisoned"


_NEXT: Final = {
    Serving.SERVING: frozenset({Serving.READ_ONLY, Serving.DRAINING, Serving.POISONED}),
    Serving.READ_ONLY: frozenset({Serving.SERVING, Serving.DRAINING, Serving.POISONED}),
    Serving.DRAINING: frozenset({Serving.POISONED}),
    Serving.POISONED: frozenset[Serving](),
}
_TAKES_MESSAGES: Final = frozenset({Serving.SERVING})
_DELIVERS: Final = frozenset({Serving.SERVING, Serving.READ_ONLY, Serving.DRAINING})
#: A client that reaches a stopping broker tries again when the next one may be running.
_RETRY_AFTER_S: Final = 2.0


class ServingState:
    """The broker's state; changed by the loop thread only."""

    def __init__(self, state: Serving = Serving.SERVING, reason: str = "") -> None:
        self.state = state
        #: Why the broker is in this state; empty while it serves normally.
        self.reason = reason

    def become(self, state: Serving, reason: str) -> bool:
        """Go to `state` if the table allows it; returns whether the state changed."""
        if state not in _NEXT[self.state]:
            return False
        self.state = state
        self.reason = reason
        return True

    @property
    def is_stopping(self) -> bool:
        """Whether all waits must end."""
        return self.state in (Serving.DRAINING, Serving.POISONED)

    def check_takes_messages(self) -> None:
        """Raise `UnavailableError` unless messages are accepted."""
        if self.state not in _TAKES_MESSAGES:
            raise self.refusal("messages are not accepted")

    def check_delivers(self) -> None:
        """Raise `UnavailableError` unless pulls and settlements are served."""
        if self.state not in _DELIVERS:
            raise self.refusal("messages are not delivered or settled")

    def refusal(self, what: str) -> UnavailableError:
        """The error with the refused operation and the reason."""
        return UnavailableError(
            f"{what}: the broker is {self.state}: {self.reason}",
            state=str(self.state),
            retry_after_s=_RETRY_AFTER_S,
        )
