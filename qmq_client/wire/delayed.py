"""What is asked of delayed messages over HTTP, and the answers: bodies in JSON."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

from qmq_client.wire.requests import Natural

#: Messages in one request; each may mean a search through everything that waits.
CANCELLED_PER_REQUEST_MAX: Final = 100


class Cancellation(StrEnum):
    """What became of the wish to withdraw a message."""

    #: It will never be delivered.
    CANCELLED = "cancelled"
    #: It is in its subject already: released, or never delayed.
    TOO_LATE = "too_late"
    #: The outbox or broker that was asked has no such message, or no longer has it.
    UNKNOWN = "unknown"

    def __bool__(self) -> bool:
        """Whether it was done."""
        return self is Cancellation.CANCELLED


class Rescheduling(StrEnum):
    """What became of the wish to put a message off."""

    #: It waits for the new time.
    RESCHEDULED = "rescheduled"
    #: It was cancelled before: it will never be delivered.
    CANCELLED = "cancelled"
    #: It was released: it is in its subject already.
    TOO_LATE = "too_late"

    def __bool__(self) -> bool:
        """Whether it was done."""
        return self is Rescheduling.RESCHEDULED


class CancelRequest(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Take delayed messages back."""

    message_ids: tuple[str, ...]
    #: When they are due, if the caller knows: then fewer files are searched.
    deliver_at_ms: Natural | None = None
    #: Only messages of this subject; None for all subjects that the caller may send to.
    subject: str | None = None
    #: Whether their outbox has given them up, so that they are not sent any more: what is unknown
    #: is not stored either when an earlier send of it to `subject` arrives later.
    withdrawn: bool = False


class CancelAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of each message, in the order of the request."""

    outcomes: tuple[Cancellation, ...]


class RescheduleRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Give a pending message another due time."""

    message_id: str
    #: Milliseconds since 1970 UTC; a past time means at once.
    deliver_at_ms: Natural
    #: The message of this subject; needed only if several have one with this id.
    subject: str | None = None


class RescheduleAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of the message."""

    outcomes: tuple[Rescheduling, ...]


#: Their annotations are read by the one thread that imports this; see `requests.py`.
_READ_NOW: Final = [
    msgspec.json.Decoder(kind)
    for kind in (CancelRequest, CancelAnswer, RescheduleRequest, RescheduleAnswer)
]
