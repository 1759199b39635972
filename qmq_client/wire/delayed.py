"""Requests and answers about delayed messages over HTTP, as JSON bodies; and the limit of due times.

A producer refuses a delay over the limit before any SQL; the broker refuses it too, but leaves room
for clocks that differ, so that it accepts every message that a producer with the same limit has accepted.
"""

from __future__ import annotations

import struct
from enum import StrEnum
from typing import Annotated, Final

import msgspec

from qmq_client.wire.errors import InvalidMessageError
from qmq_client.wire.limits import Limits
from qmq_client.wire.record import DELAYED_FLAG, FLAGS_POSITION, RECORD_FIXED_BYTES
from qmq_client.wire.requests import MessageId, Name, Natural

_DUE: Final = struct.Struct(">Q")
#: Tolerance of the broker's limit beyond that of the producers, because clocks differ and rows wait.
CLOCKS_MS: Final = 24 * 3_600_000
_DAY_MS: Final = 24 * 3_600_000
#: A million years; beyond it an error does not show the number of days.
_COUNTED_MS_MAX: Final = 1_000_000 * 365 * _DAY_MS


def record_due_at_ms(data: bytes, position: int = 0) -> int | None:
    """The due time of the record at `position`; None for at once."""
    if not data[position + FLAGS_POSITION] & DELAYED_FLAG:
        return None
    due_at_ms: int = _DUE.unpack_from(data, position + RECORD_FIXED_BYTES)[0]
    return due_at_ms


def check_due(due_at_ms: int, now_ms: int, limits: Limits, *, field: str = "deliver_at") -> None:
    """Raise `InvalidMessageError` for a time beyond the limit; it is never adjusted."""
    ahead_ms = due_at_ms - now_ms
    if ahead_ms > limits.delay_ms:
        raise InvalidMessageError(
            field=field,
            limit=_ahead(limits.delay_ms),
            value=_ahead(ahead_ms),
            remedy="Send it later, or raise the limit delay_ms of producers and broker.",
        )


def _ahead(span_ms: int) -> str:
    """A time span for people, with its exact milliseconds."""
    if span_ms > _COUNTED_MS_MAX:
        return "more than a million years ahead"
    return f"{span_ms} ms ahead ({span_ms / _DAY_MS:,.1f} days)"


#: Messages in one request; each may need a search of all delayed messages.
CANCELLED_PER_REQUEST_MAX: Final = 100
_COUNT_FORM: Final = {"minItems": 1, "maxItems": CANCELLED_PER_REQUEST_MAX}


class Cancellation(StrEnum):
    """The outcome of a cancellation."""

    #: It will never be delivered.
    CANCELLED = "cancelled"
    #: It is already in its subject: released, or never delayed.
    TOO_LATE = "too_late"
    #: The outbox or broker has no such message, or no longer has it.
    UNKNOWN = "unknown"

    def __bool__(self) -> bool:
        """Whether it succeeded."""
        return self is Cancellation.CANCELLED


class Rescheduling(StrEnum):
    """The outcome of a reschedule."""

    #: It waits for the new time.
    RESCHEDULED = "rescheduled"
    #: It was cancelled before: it will never be delivered.
    CANCELLED = "cancelled"
    #: It was released: it is already in its subject.
    TOO_LATE = "too_late"

    def __bool__(self) -> bool:
        """Whether it succeeded."""
        return self is Rescheduling.RESCHEDULED


class CancelRequest(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Cancel delayed messages."""

    message_ids: Annotated[tuple[MessageId, ...], msgspec.Meta(extra_json_schema=_COUNT_FORM)]
    #: When they are due, if the caller knows: then fewer files are searched.
    deliver_at_ms: Natural | None = None
    #: Only messages of this subject; None for all subjects that the caller may send to.
    subject: Name | None = None
    #: Whether their outbox has removed them, so that they are not sent any more: unknown ones are
    #: then refused if an earlier send of them to `subject` arrives later.
    withdrawn: bool = False


class CancelAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of each message, in the order of the request."""

    outcomes: tuple[Cancellation, ...]


class RescheduleRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Give a pending message another due time."""

    message_id: MessageId
    #: Milliseconds since 1970 UTC; a past time means at once.
    deliver_at_ms: Natural
    #: The message of this subject; needed only if several have one with this id.
    subject: Name | None = None


class RescheduleAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of the message."""

    outcomes: tuple[Rescheduling, ...]


#: Annotations are resolved at import, in one thread; see `requests.py`.
_READ_NOW: Final = [
    msgspec.json.Decoder(kind)
    for kind in (CancelRequest, CancelAnswer, RescheduleRequest, RescheduleAnswer)
]
