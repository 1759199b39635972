"""Cancelled delayed messages, as they stand in the commit log.

Body of a frame of kind CANCELLED: length 4 (big-endian), MessagePack list of Cancelled; then, if
there are any, length 4 and the ids of withdrawn messages, 16 bytes each; zeros. A frame without
either carries nothing but its time.

A *withdrawn* message is one that its outbox gave up and that the log does not have. An earlier send
of it may still be on its way: its id is remembered like those of stored messages.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import msgspec

from qmq_client.wire.errors import ProtocolError
from qmq_client.wire.frame import FRAME_HEADER_BYTES, FrameKind, build_frame
from qmq_client.wire.message_id import MESSAGE_ID_BYTES
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


def cancelled_frame(cancelled: Sequence[Cancelled], withdrawn: Sequence[bytes] = ()) -> bytes:
    """An unstamped frame with these cancellations and ids of withdrawn messages."""
    parts = [msgspec.msgpack.encode(cancelled)]
    if withdrawn:
        parts.append(b"".join(withdrawn))
    body = b"".join(_LENGTH.pack(len(part)) + part for part in parts)
    return build_frame(FrameKind.CANCELLED, body)


def read_cancelled(frame: bytes) -> list[Cancelled]:
    """The cancellations of a CANCELLED frame; raises `ProtocolError`."""
    return decode_msgpack(sized_part(frame, FRAME_HEADER_BYTES), list[Cancelled])


def read_withdrawn(frame: bytes) -> list[bytes]:
    """The ids of withdrawn messages of a CANCELLED frame; raises `ProtocolError`."""
    position = FRAME_HEADER_BYTES + _LENGTH.size + len(sized_part(frame, FRAME_HEADER_BYTES))
    if len(frame) - position < _LENGTH.size:  # nothing but fill
        return []
    ids = sized_part(frame, position)
    if len(ids) % MESSAGE_ID_BYTES:
        raise ProtocolError("ids of withdrawn messages that are cut short", offset=position)
    return [ids[first : first + MESSAGE_ID_BYTES] for first in range(0, len(ids), MESSAGE_ID_BYTES)]
