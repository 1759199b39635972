"""What a frame can hold, by its kind; how long the marks are that some kinds carry.

Frames of messages come in several kinds. A client sends MESSAGES and DELAYED; the others are made by
the broker out of records that it was sent, and carry marks behind them (`marks.py`).
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final


class FrameKind(IntEnum):
    """What a frame's body holds."""

    #: Messages that may be delivered at once.
    MESSAGES = 1
    #: Messages with a due time; they travel in frames of their own.
    DELAYED = 2
    #: Entries of the action log.
    ACTIONS = 3
    #: First frame of a segment: which store and offset it belongs to.
    SEGMENT_HEAD = 4
    #: The unused rest of a sealed segment; its fill is not covered by the body CRC.
    PADDING = 5
    #: Answer to a pull; only on the wire.
    DELIVERIES = 6
    #: A request or an answer without messages; only on the wire.
    CONTROL = 7
    #: Stands where accepted frames were damaged; says which sequences are lost.
    LOST = 8
    #: Delayed messages whose time has come: from here on they are in their consume queues.
    RELEASED = 9
    #: Delayed messages once more, with another due time.
    RESCHEDULED = 10
    #: Messages that will not be delivered.
    CANCELLED = 11
    #: Delayed messages in the schedule log of their time.
    SCHEDULED = 12
    #: What became of messages of a schedule log.
    DISPATCHED = 13


#: Kinds whose body is that of a message frame.
MESSAGE_KINDS: Final = frozenset(
    {
        FrameKind.MESSAGES,
        FrameKind.DELAYED,
        FrameKind.RELEASED,
        FrameKind.RESCHEDULED,
        FrameKind.SCHEDULED,
    }
)
#: Bytes of the marks of a frame and of each of its records.
_MARK_BYTES: Final = {
    FrameKind.RELEASED: (8, 16),
    FrameKind.RESCHEDULED: (0, 32),
    FrameKind.SCHEDULED: (0, 40),
}
#: Their checksum and four zeros.
MARK_CRC_BYTES: Final = 8


def mark_bytes(kind: FrameKind, count: int) -> int:
    """Length of the marks at the end of a frame with so many records; a multiple of 8."""
    if kind not in _MARK_BYTES:
        return 0
    of_frame, of_record = _MARK_BYTES[kind]
    return of_frame + of_record * count + MARK_CRC_BYTES
