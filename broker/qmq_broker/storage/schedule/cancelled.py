"""CANCELLED frames of the commit log: cancelled and withdrawn delayed messages.

Body of a frame of kind CANCELLED: length 4 (big-endian), MessagePack list of Cancelled; then, if there are
withdrawn messages, length 4 and ids without their subjects, 16 bytes each, then length 4 and a MessagePack
map from each subject to its ids, 16 bytes each; zeros. A frame without either carries only its
time. Only frames of earlier versions have ids without a subject.

A *withdrawn* message is one that its outbox gave up and that is not in the log. An earlier send of
it may still arrive, so its id is remembered for its subject like that of a stored message.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

import msgspec

from qmq_client.wire.errors import ProtocolError
from qmq_client.wire.frame import FRAME_HEADER_BYTES, FrameKind, build_frame
from qmq_client.wire.message_id import MESSAGE_ID_BYTES
from qmq_client.wire.requests import decode_msgpack, sized_part

_LENGTH: Final = struct.Struct(">I")
#: Cancellations per frame; bounds how long one call delays the writer.
CANCELLED_MAX: Final = 1_000
#: Ids of withdrawn messages, by subject.
WithdrawnIds = Mapping[str, Sequence[bytes]]
NOTHING_WITHDRAWN: Final[WithdrawnIds] = MappingProxyType({})


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


def cancelled_frame(
    cancelled: Sequence[Cancelled], withdrawn: WithdrawnIds = NOTHING_WITHDRAWN
) -> bytes:
    """An unstamped frame with these cancellations and, by subject, ids of withdrawn messages."""
    parts = [msgspec.msgpack.encode(cancelled)]
    if withdrawn:
        joined = {subject: b"".join(ids) for subject, ids in withdrawn.items()}
        parts += [b"", msgspec.msgpack.encode(joined)]
    body = b"".join(_LENGTH.pack(len(part)) + part for part in parts)
    return build_frame(FrameKind.CANCELLED, body)


def read_cancelled(frame: bytes) -> list[Cancelled]:
    """The cancellations of a CANCELLED frame; raises `ProtocolError`."""
    return decode_msgpack(sized_part(frame, FRAME_HEADER_BYTES), list[Cancelled])


def read_withdrawn(frame: bytes) -> dict[str, list[bytes]]:
    """The ids of withdrawn messages of a CANCELLED frame, by subject; raises `ProtocolError`.

    Ids from frames of earlier versions are under the empty subject, which no message has.
    """
    old_at = FRAME_HEADER_BYTES + _LENGTH.size + len(sized_part(frame, FRAME_HEADER_BYTES))
    if len(frame) - old_at < _LENGTH.size:  # nothing but fill
        return {}
    old = sized_part(frame, old_at)
    found = {"": old} if old else {}
    position = old_at + _LENGTH.size + len(old)
    if len(frame) - position >= _LENGTH.size and (part := sized_part(frame, position)):
        found |= decode_msgpack(part, dict[str, bytes])
    return {subject: _ids(ids, position) for subject, ids in found.items()}


def _ids(joined: bytes, position: int) -> list[bytes]:
    if len(joined) % MESSAGE_ID_BYTES:
        raise ProtocolError("ids of withdrawn messages that are cut short", offset=position)
    return [
        joined[first : first + MESSAGE_ID_BYTES]
        for first in range(0, len(joined), MESSAGE_ID_BYTES)
    ]
