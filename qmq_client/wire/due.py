"""When an encoded record is due, and how far ahead that may be.

A producer refuses a delay over the limit before any SQL; the broker refuses it too, but leaves room
for clocks that differ, so that it takes whatever a producer with the same limit has taken.
"""

from __future__ import annotations

import struct
from typing import Final

from qmq_client.wire.columns import byte_column
from qmq_client.wire.errors import InvalidMessageError
from qmq_client.wire.frame import MessageFrame
from qmq_client.wire.limits import Limits
from qmq_client.wire.record import RECORD_FIXED_BYTES

_DUE: Final = struct.Struct(">Q")
_FLAGS_POSITION: Final = 20
_DELAYED_FLAG: Final = 0b100
#: The flags of records that may be delivered at once.
_AT_ONCE: Final = bytes(flags for flags in range(256) if not flags & _DELAYED_FLAG)
#: By how much the broker's limit is above that of the producers: clocks differ, rows wait.
CLOCKS_MS: Final = 24 * 3_600_000
_DAY_MS: Final = 24 * 3_600_000
#: Beyond this an error does not count days any more: a million years.
_COUNTED_MS_MAX: Final = 1_000_000 * 365 * _DAY_MS


def record_due_at_ms(data: bytes, position: int = 0) -> int | None:
    """When the record at `position` may be delivered; None for at once."""
    if not data[position + _FLAGS_POSITION] & _DELAYED_FLAG:
        return None
    due_at_ms: int = _DUE.unpack_from(data, position + RECORD_FIXED_BYTES)[0]
    return due_at_ms


def has_due_times(frame: MessageFrame) -> bool:
    """Whether any record of a frame has a due time."""
    return bool(byte_column(frame, _FLAGS_POSITION).translate(None, _AT_ONCE))


def check_due(due_at_ms: int, now_ms: int, limits: Limits, *, field: str = "deliver_at") -> None:
    """Raise `InvalidMessageError` for a time beyond the limit; it is never moved."""
    ahead_ms = due_at_ms - now_ms
    if ahead_ms > limits.delay_ms:
        raise InvalidMessageError(
            field=field,
            limit=_ahead(limits.delay_ms),
            value=_ahead(ahead_ms),
            remedy="Send it later, or raise the limit delay_ms of producers and broker.",
        )


def _ahead(span_ms: int) -> str:
    """Exact, and as people count what is far away."""
    if span_ms > _COUNTED_MS_MAX:
        return "more than a million years ahead"
    return f"{span_ms} ms ahead ({span_ms / _DAY_MS:,.1f} days)"
