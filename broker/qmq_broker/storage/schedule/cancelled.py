"""Cancelled delayed messages, as they stand in the commit log.

Body of a frame of kind CANCELLED: length 4 (big-endian), MessagePack list of Cancelled, zeros. An
empty list carries nothing but the time of its frame.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import msgspec

from qmq_client.wire.frame import FRAME_HEADER_BYTES, FrameKind, build_frame
from qmq_client.wire.requests import decode_msgpack, sized_part

_LENGTH: Final = struct.Struct(">I")
#: Cancellations per frame; bounds how long one call holds up the writer.
CANCELLED_MAX: Final = 1_000


class Cancelled(msgspec.Struct, frozen=True, array_like=True):
    """One message that will not be delivered."""

    #: First millisecond of its bucket.
    bucket: int
    #: Its schedule sequence.
    sequence: int
    #: Commit log offset of the record in the schedule.
    source: int
    subject: str
    message_id: bytes


def cancelled_frame(cancelled: Sequence[Cancelled]) -> bytes:
    """An unstamped frame with these cancellations."""
    content = msgspec.msgpack.encode(cancelled)
    return build_frame(FrameKind.CANCELLED, _LENGTH.pack(len(content)) + content)


def read_cancelled(frame: bytes) -> list[Cancelled]:
    """The cancellations of a CANCELLED frame; raises `ProtocolError`."""
    return decode_msgpack(sized_part(frame, FRAME_HEADER_BYTES), list[Cancelled])
