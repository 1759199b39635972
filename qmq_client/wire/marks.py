"""Marks: columns with facts about the records of a frame that the broker makes.

::

    RELEASED      bucket 8, then columns: schedule sequences (8 n), sources (8 n)
    RESCHEDULED   columns: buckets, schedule sequences, sources, new due times (8 n each)
    SCHEDULED     columns: schedule sequences, sources, due times (8 n each), message ids (16 n)
    all           then CRC-32C of kind 4, number of records 4 and these columns; four zeros

They are at the very end of a frame after the records' fill, so that a reader finds them by the
header alone and reads them without the records; therefore they have their own checksum. A *bucket*
is the first millisecond of a span of due times that share one schedule log, a *schedule sequence*
the place of a message in it, a *source* the commit log offset of the record that was put there.
Together they name one delayed message permanently. Big-endian; see `docs/format/schedule.md`.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from qmq_client.wire.checksum import crc32c
from qmq_client.wire.errors import ChecksumError, ProtocolError
from qmq_client.wire.frame import FrameHeader, FrameKind, MessageFrame
from qmq_client.wire.frame_head import MARK_CRC_BYTES, mark_bytes
from qmq_client.wire.message_id import MESSAGE_ID_BYTES

_CRC: Final = struct.Struct(">I4x")
_NUMBER: Final = struct.Struct(">Q")
#: Whether this machine is little-endian.
_IS_LITTLE: Final = struct.pack("=H", 1) == b"\1\0"
#: The fields of the header in the checksum: those that describe the columns.
_HEAD: Final = struct.Struct(">II")
#: Columns of numbers in each kind, besides the bucket of RELEASED and the ids of SCHEDULED.
_COLUMNS: Final = {FrameKind.RELEASED: 2, FrameKind.RESCHEDULED: 4, FrameKind.SCHEDULED: 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """The columns of one frame's marks; columns that a kind does not have are empty."""

    #: RELEASED: one value, the bucket of all; RESCHEDULED: the old bucket of each.
    buckets: Sequence[int] = ()
    sequences: Sequence[int]
    sources: Sequence[int]
    due_at_ms: Sequence[int] = ()
    #: The ids of all records one after the other.
    message_ids: bytes = b""


def pack_marks(kind: FrameKind, marks: Marks) -> bytes:
    """Marks as bytes, for `build_message_frame`."""
    columns: Sequence[Iterable[int]]
    if kind is FrameKind.RELEASED:
        columns = (marks.buckets, marks.sequences, marks.sources)
    elif kind is FrameKind.RESCHEDULED:
        columns = (marks.buckets, marks.sequences, marks.sources, marks.due_at_ms)
    else:
        columns = (marks.sequences, marks.sources, marks.due_at_ms)
    numbers = [number for column in columns for number in column]
    content = struct.pack(f">{len(numbers)}Q", *numbers) + marks.message_ids
    head = _HEAD.pack(kind, len(marks.sequences))
    return content + _CRC.pack(crc32c(content, crc32c(head)))


def read_marks(header: FrameHeader, data: bytes) -> Marks:
    """Marks from their bytes, verified; raises `ProtocolError`.

    Requires: a kind that has marks. `data` is the last `mark_bytes` of the frame.
    """
    kind, count = header.kind, header.record_count
    if len(data) != mark_bytes(kind, count):
        raise ProtocolError(
            f"marks of {count} records are {len(data)} bytes, not {mark_bytes(kind, count)}"
        )
    content = data[:-MARK_CRC_BYTES]
    head = _HEAD.pack(kind, count)
    if crc32c(content, crc32c(head)) != _CRC.unpack(data[-MARK_CRC_BYTES:])[0]:
        raise ChecksumError(
            "the frame's marks do not fit their checksum", offset=header.frame_bytes - len(data)
        )
    first = _NUMBER.size if kind is FrameKind.RELEASED else 0
    width = _NUMBER.size * count
    columns = [
        numbers(content[first + width * place : first + width * (place + 1)])
        for place in range(_COLUMNS[kind])
    ]
    if kind is FrameKind.RELEASED:
        return Marks(buckets=numbers(content[:first]), sequences=columns[0], sources=columns[1])
    if kind is FrameKind.RESCHEDULED:
        buckets, sequences, sources, due_at_ms = columns
        return Marks(buckets=buckets, sequences=sequences, sources=sources, due_at_ms=due_at_ms)
    sequences, sources, due_at_ms = columns
    ids = content[3 * width :]
    assert len(ids) == MESSAGE_ID_BYTES * count
    return Marks(sequences=sequences, sources=sources, due_at_ms=due_at_ms, message_ids=ids)


def frame_marks(frame: MessageFrame) -> Marks:
    """The marks of a whole frame; raises `ProtocolError`."""
    header = frame.header
    return read_marks(header, frame.data[-mark_bytes(header.kind, header.record_count) :])


def numbers(data: bytes) -> array[int]:
    """A column of 8-byte numbers; there may be millions, so they are not converted to objects yet."""
    column = array("Q", data)
    if _IS_LITTLE:
        column.byteswap()
    return column
