"""Messages that a group does not get again, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from qmq_broker.service.delivery.history import History

#: A consumer rejected it.
REJECTED: Final = "rejected"
#: It was delivered as often as the group allows.
ATTEMPTS_USED_UP: Final = "attempts used up"
#: Its time to live ended before it was delivered.
EXPIRED: Final = "expired"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A message that this group does not get again unless it is replayed."""

    sequence: int
    attempts: int
    reason: str
    #: What the last consumer said.
    error: str
    at_ms: int
    #: The attempts so far.
    history: History = ()
