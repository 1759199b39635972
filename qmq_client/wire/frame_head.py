"""The head of a frame: its fields, kinds, stamp and checksums; frames of any kind, built and parsed.

`frame.py` shows the layout. There are several kinds of message frames. A client sends MESSAGES and
DELAYED; the broker makes the others from received records, with marks after them (`marks.py`).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Final

import msgspec

from qmq_client.wire.checksum import crc32c, crc32c_without
from qmq_client.wire.errors import ChecksumError, ProtocolError, UnknownVersionError


class FrameKind(IntEnum):
    """The kind of a frame's body."""

    #: Messages that may be delivered at once.
    MESSAGES = 1
    #: Messages with a due time, in separate frames.
    DELAYED = 2
    #: Entries of the action log.
    ACTIONS = 3
    #: First frame of a segment, with its store and offset.
    SEGMENT_HEAD = 4
    #: The unused rest of a sealed segment; its fill is not covered by the body CRC.
    PADDING = 5
    #: Answer to a pull; only on the wire.
    DELIVERIES = 6
    #: A request or an answer without messages; only on the wire.
    CONTROL = 7
    #: Replaces damaged accepted frames; lists the lost sequences.
    LOST = 8
    #: Delayed messages that became due: from here on they are in their consume queues.
    RELEASED = 9
    #: The same delayed messages with another due time.
    RESCHEDULED = 10
    #: Messages that will not be delivered.
    CANCELLED = 11
    #: Delayed messages in a schedule log.
    SCHEDULED = 12
    #: States of messages of a schedule log.
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
#: The checksum of the marks and four zeros.
MARK_CRC_BYTES: Final = 8


def mark_bytes(kind: FrameKind, count: int) -> int:
    """Length of the marks at the end of a frame with this many records; a multiple of 8."""
    if kind not in _MARK_BYTES:
        return 0
    of_frame, of_record = _MARK_BYTES[kind]
    return of_frame + of_record * count + MARK_CRC_BYTES


FRAME_MAGIC: Final = b"QMQF"
FRAME_VERSION: Final = 1
#: Frames begin and end at multiples of this, so a scanner checks only every eighth byte.
FRAME_ALIGNMENT_BYTES: Final = 8
DURABLE_GAP_MAX: Final = 2**32 - 1

_HEADER: Final = struct.Struct(">4sBBHIIIIQQIIQ")
_SENT: Final = struct.Struct(">4sBBHII")
_STAMP: Final = struct.Struct(">QQIIQ")
_CRC: Final = struct.Struct(">I")
_SENT_BYTES: Final = _SENT.size
_BODY_CRC_POSITION: Final = _SENT_BYTES
_STAMP_CRC_POSITION: Final = _BODY_CRC_POSITION + _CRC.size
PHYSICAL_OFFSET_POSITION: Final = _STAMP_CRC_POSITION + _CRC.size

FRAME_HEADER_BYTES: Final = _HEADER.size
SEQUENCE_BYTES: Final = 8

_KINDS: Final = {int(kind): kind for kind in FrameKind}


class FrameHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The fixed part of a frame as values; zero in the stamped fields until a log sets them."""

    kind: FrameKind
    subject_count: int
    frame_bytes: int
    record_count: int
    body_crc: int
    stamp_crc: int
    physical_offset: int
    stored_at_ms: int
    epoch: int
    durable_gap: int

    @property
    def head_bytes(self) -> int:
        """Length of the part that a log may change: the header and the sequences after it."""
        return FRAME_HEADER_BYTES + SEQUENCE_BYTES * self.subject_count


def build_frame(
    kind: FrameKind, *parts: bytes | memoryview, record_count: int = 0, subject_count: int = 0
) -> bytes:
    """A frame of any kind around a body, filled to the alignment, not yet stamped.

    The body consists of these parts; long ones are not copied before the join.
    """
    head_bytes = FRAME_HEADER_BYTES + SEQUENCE_BYTES * subject_count
    body_end = head_bytes + sum(map(len, parts))
    frame_bytes = aligned(body_end)
    sent = _SENT.pack(FRAME_MAGIC, FRAME_VERSION, kind, subject_count, frame_bytes, record_count)
    fill = bytes(frame_bytes - body_end)
    body_crc = crc32c(sent)
    for part in (*parts, fill):
        body_crc = crc32c(part, body_crc)
    head = sent + _CRC.pack(body_crc)
    return b"".join((head, bytes(head_bytes - len(head)), *parts, fill))


def stamp_frame(
    frame: bytes,
    *,
    physical_offset: int,
    stored_at_ms: int,
    epoch: int,
    durable_offset: int,
    first_sequences: Sequence[int] = (),
) -> bytes:
    """The stamped head of `frame`, to be written in place of its first `len(head)` bytes.

    Requires: a whole frame with `len(first_sequences)` subjects.
    """
    sequences = struct.pack(f">{len(first_sequences)}Q", *first_sequences)
    gap = min(physical_offset - durable_offset, DURABLE_GAP_MAX)
    stamp = _STAMP.pack(physical_offset, stored_at_ms, epoch, gap, 0)
    sent, stamped = frame[:_STAMP_CRC_POSITION], stamp + sequences
    return b"".join((sent, _CRC.pack(crc32c(sent + stamped)), stamped))


def build_padding(frame_bytes: int) -> bytes:
    """The header of a padding frame of `frame_bytes`; the zeros after it need not be written.

    Requires: `frame_bytes` a multiple of the alignment and at least a header.
    """
    sent = _SENT.pack(FRAME_MAGIC, FRAME_VERSION, FrameKind.PADDING, 0, frame_bytes, 0)
    return b"".join(
        (sent, _CRC.pack(crc32c(sent)), bytes(FRAME_HEADER_BYTES - _STAMP_CRC_POSITION))
    )


def read_header(data: bytes, position: int = 0) -> FrameHeader:
    """Read the header at `position`; checks its fields but no checksum.

    Raises `ProtocolError`, `UnknownVersionError` for another version.
    """
    if len(data) - position < FRAME_HEADER_BYTES:
        raise ProtocolError("frame ends inside its header", offset=len(data))
    (
        magic,
        version,
        kind,
        subject_count,
        frame_bytes,
        record_count,
        body_crc,
        stamp_crc,
        physical_offset,
        stored_at_ms,
        epoch,
        durable_gap,
        _,
    ) = _HEADER.unpack_from(data, position)
    if magic != FRAME_MAGIC:
        raise ProtocolError(f"frame magic is {magic!r}, not {FRAME_MAGIC!r}", offset=position)
    if version != FRAME_VERSION:
        raise UnknownVersionError(f"frame version {version}; this program knows {FRAME_VERSION}")
    known = _KINDS.get(kind)
    if known is None:
        raise ProtocolError(f"frame kind {kind} is not known", offset=position + 5)
    header = FrameHeader(
        kind=known,
        subject_count=subject_count,
        frame_bytes=frame_bytes,
        record_count=record_count,
        body_crc=body_crc,
        stamp_crc=stamp_crc,
        physical_offset=physical_offset,
        stored_at_ms=stored_at_ms,
        epoch=epoch,
        durable_gap=durable_gap,
    )
    if frame_bytes % FRAME_ALIGNMENT_BYTES or frame_bytes < header.head_bytes:
        raise ProtocolError(
            f"frame length {frame_bytes} is not a multiple of {FRAME_ALIGNMENT_BYTES}, or shorter than the header",
            offset=position + 8,
        )
    return header


def unknown_format(data: bytes, position: int = 0) -> str:
    """The unknown version or kind of the frame at `position`, if another version wrote it.

    Empty for frames that this program knows, and if the log's checksum does not match. For this, every
    version keeps the header: where its version, kind, number of subjects, lengths and stamp are.
    """
    if len(data) - position < FRAME_HEADER_BYTES:
        return ""
    fields = _HEADER.unpack_from(data, position)
    magic, version, kind, subject_count, stamp_crc = (*fields[:4], fields[7])
    if magic != FRAME_MAGIC or (version == FRAME_VERSION and kind in _KINDS):
        return ""
    head_bytes = FRAME_HEADER_BYTES + SEQUENCE_BYTES * subject_count
    if _stamp_crc(data[position : position + head_bytes]) != stamp_crc:
        return ""
    return f"kind {kind}" if version == FRAME_VERSION else f"version {version}"


def verify_stamp(header: FrameHeader, head: bytes) -> None:
    """Check the log's checksum over a head read back; raises `ChecksumError`.

    Requires: `head` is the first `header.head_bytes` bytes of the frame.
    """
    if _stamp_crc(head) != header.stamp_crc:
        raise ChecksumError(
            "the frame's stamp does not fit its checksum", offset=_STAMP_CRC_POSITION
        )


def verify_body(header: FrameHeader, frame: bytes | memoryview) -> None:
    """Check the sender's checksum over a whole frame; raises `ChecksumError`.

    Requires: `len(frame) == header.frame_bytes`. The fill of a padding frame is not covered.
    """
    after = len(frame) if header.kind is FrameKind.PADDING else header.head_bytes
    if crc32c_without(frame, _SENT_BYTES, after) != header.body_crc:
        raise ChecksumError("the frame's body does not fit its checksum", offset=_BODY_CRC_POSITION)


def parse_frame(data: bytes, *, frame_bytes_max: int, is_verified: bool = False) -> FrameHeader:
    """Read the header of a complete frame and verify its length and body checksum; raises `ProtocolError`.

    `is_verified` says that the body's checksum was already verified, so it is not computed again.
    """
    header = read_header(data)
    if header.frame_bytes > frame_bytes_max:
        raise ProtocolError(
            f"frame length {header.frame_bytes} is over the limit of {frame_bytes_max}", offset=8
        )
    if header.frame_bytes != len(data):
        raise ProtocolError(
            f"frame length {header.frame_bytes} but {len(data)} bytes are there", offset=8
        )
    if not is_verified:
        verify_body(header, data)
    return header


def _stamp_crc(head: bytes) -> int:
    return crc32c(head[PHYSICAL_OFFSET_POSITION:], crc32c(head[:_STAMP_CRC_POSITION]))


def aligned(length_bytes: int) -> int:
    """Round up to the next multiple at which a frame may end."""
    return length_bytes + -length_bytes % FRAME_ALIGNMENT_BYTES
