"""The frame: the unit of a request and of every append-only log; the same bytes on wire and disk.

::

    offset bytes field                                                              made by
    0      4     magic "QMQF"                                                       sender
    4      1     version, 1                                                         sender
    5      1     kind                                                               sender
    6      2     number of subjects, s                                              sender
    8      4     frame length with header and fill, a multiple of 8                 sender
    12     4     number of records, n                                               sender
    16     4     body CRC-32C: bytes 0 … 15 and the body                            sender
    20     4     stamp CRC-32C: bytes 0 … 19, 24 … 55 and the sequences             log
    24     8     physical offset of this frame in its log                           log
    32     8     stored at, ms since 1970 UTC; never goes back within a log         log
    40     4     epoch: one more at each opening of the log                         log
    44     4     durable gap: physical offset less what was durable when written    log
    48     8     reserved, 0
    56     8 s   first sequence of each subject's run                               log
    …            body: to the frame's end

Body of a message frame (MESSAGES, DELAYED and others): the subject table (s times: count 4, name
length 1, name), then three columns: record lengths (4 n), tag hashes (8 n), and the records
themselves, the records of one subject standing together in the order of the subject table, then
zero fill to a multiple of 8, then, in kinds of the broker's own, marks for the records (`marks.py`).
Bodies of other kinds belong to the module that writes them.

The sender makes everything but the stamp; a log appends the sender's bytes unchanged behind a
stamped head. Physical offset and epoch are guarded by the stamp's own checksum, so stale bytes in
a recycled file are never taken for new ones. A frame is wholly there or wholly absent and never
crosses a segment. Big-endian. Documented for people in `docs/format/frame.md`; the idea of one
batch as the unit of wire, log and checksum is Kafka's record batch, version 2.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Final

import msgspec

from qmq_client.wire import frame_kind as kinds
from qmq_client.wire.checksum import crc32c, crc32c_without
from qmq_client.wire.errors import (
    ChecksumError,
    ProtocolError,
    TooLargeError,
    UnknownVersionError,
)
from qmq_client.wire.limits import DEFAULT_LIMITS, SUBJECTS_PER_FRAME_MAX, Limits
from qmq_client.wire.message_id import MESSAGE_ID_BYTES
from qmq_client.wire.names import check_name, is_name, shorten
from qmq_client.wire.record import MESSAGE_ID_POSITION, RECORD_FIXED_BYTES, record_tag_hash

FRAME_MAGIC: Final = b"QMQF"
FRAME_VERSION: Final = 1
#: Frames begin and end at multiples of this, so a scanner need look at every eighth byte only.
FRAME_ALIGNMENT_BYTES: Final = 8
DURABLE_GAP_MAX: Final = 2**32 - 1

_HEADER: Final = struct.Struct(">4sBBHIIIIQQIIQ")
_SENT: Final = struct.Struct(">4sBBHII")
_STAMP: Final = struct.Struct(">QQIIQ")
_CRC: Final = struct.Struct(">I")
_SUBJECT: Final = struct.Struct(">IB")
_SENT_BYTES: Final = _SENT.size
_BODY_CRC_POSITION: Final = _SENT_BYTES
_STAMP_CRC_POSITION: Final = _BODY_CRC_POSITION + _CRC.size
PHYSICAL_OFFSET_POSITION: Final = _STAMP_CRC_POSITION + _CRC.size

FRAME_HEADER_BYTES: Final = _HEADER.size
SEQUENCE_BYTES: Final = 8

FrameKind = kinds.FrameKind
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
        """Length of what a log may change: the header and the sequences behind it."""
        return FRAME_HEADER_BYTES + SEQUENCE_BYTES * self.subject_count


class SubjectRun(msgspec.Struct, frozen=True, kw_only=True):
    """Records of one subject that stand together in a frame."""

    subject: str
    count: int
    #: Sequence of the run's first record in its consume queue; 0 until a log sets it.
    first_sequence: int


class MessageFrame(msgspec.Struct, frozen=True, kw_only=True):
    """A message frame whose shape and body checksum were verified; records stay encoded."""

    data: bytes
    header: FrameHeader
    runs: tuple[SubjectRun, ...]
    lengths: tuple[int, ...]
    #: Byte position in `data` of each record; a `range` when all records have one length.
    positions: Sequence[int]

    def record(self, index: int) -> bytes:
        """The encoded record with this index."""
        first = self.positions[index]
        return self.data[first : first + self.lengths[index]]

    @property
    def tag_hashes(self) -> tuple[int, ...]:
        """The tag hash of each record; unpacked when asked for, because an append copies the column."""
        count = len(self.lengths)
        return struct.unpack_from(f">{count}Q", self.data, self.positions[0] - 8 * count)

    def message_ids(self) -> list[bytes]:
        """The 16-byte ids of all records, in order."""
        data = self.data
        first, after = MESSAGE_ID_POSITION, MESSAGE_ID_POSITION + MESSAGE_ID_BYTES
        return [data[position + first : position + after] for position in self.positions]

    def records(self) -> Iterator[tuple[str, bytes]]:
        """Subject and encoded record of each message, in order."""
        index = 0
        for run in self.runs:
            for _ in range(run.count):
                yield run.subject, self.record(index)
                index += 1


def build_message_frame(
    records: Mapping[str, Sequence[bytes]],
    *,
    kind: FrameKind = FrameKind.MESSAGES,
    limits: Limits = DEFAULT_LIMITS,
    marks: bytes = b"",
) -> bytes:
    """A frame of encoded records, grouped by subject, with the marks that its kind asks for.

    Requires: at least one record, each made by `encode_record`. Raises `TooLargeError` when the
    frame is over `limits`, before it is built, and `InvalidNameError` for a subject's name.
    """
    in_order = [record for run in records.values() for record in run]
    if not in_order or not all(records.values()):
        raise ValueError("a frame needs at least one record for each of its subjects")
    if len(in_order) > limits.records_per_frame:
        raise _too_large("records", limits.records_per_frame, len(in_order))
    if len(records) > SUBJECTS_PER_FRAME_MAX:
        raise _too_large("subjects", SUBJECTS_PER_FRAME_MAX, len(records))
    table: list[bytes] = []
    for subject, run in records.items():
        name = check_name(subject, field="subject").encode()
        table += (_SUBJECT.pack(len(run), len(name)), name)
    count = len(in_order)
    lengths = list(map(len, in_order))
    head_bytes = FRAME_HEADER_BYTES + SEQUENCE_BYTES * len(records)
    records_end = head_bytes + sum(map(len, table)) + 12 * count + sum(lengths)
    frame_bytes = _aligned(records_end) + len(marks)
    if frame_bytes > limits.frame_bytes:
        raise _too_large("bytes", limits.frame_bytes, frame_bytes)
    body = b"".join(
        (
            *table,
            struct.pack(f">{count}I", *lengths),
            struct.pack(f">{count}Q", *map(record_tag_hash, in_order)),
            *in_order,
            bytes(_aligned(records_end) - records_end),
            marks,
        )
    )
    return build_frame(kind, body, record_count=count, subject_count=len(records))


def build_frame(
    kind: FrameKind, body: bytes, *, record_count: int = 0, subject_count: int = 0
) -> bytes:
    """A frame of any kind around `body`, filled to the alignment, not yet stamped."""
    head_bytes = FRAME_HEADER_BYTES + SEQUENCE_BYTES * subject_count
    frame_bytes = _aligned(head_bytes + len(body))
    fill = bytes(frame_bytes - head_bytes - len(body))
    sent = _SENT.pack(FRAME_MAGIC, FRAME_VERSION, kind, subject_count, frame_bytes, record_count)
    body_crc = crc32c(fill, crc32c(body, crc32c(sent)))
    head = sent + _CRC.pack(body_crc)
    return b"".join((head, bytes(head_bytes - len(head)), body, fill))


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
    """The header of a padding frame of `frame_bytes`; the zeros behind it need not be written.

    Requires: `frame_bytes` a multiple of the alignment and at least a header.
    """
    sent = _SENT.pack(FRAME_MAGIC, FRAME_VERSION, FrameKind.PADDING, 0, frame_bytes, 0)
    return b"".join(
        (sent, _CRC.pack(crc32c(sent)), bytes(FRAME_HEADER_BYTES - _STAMP_CRC_POSITION))
    )


def read_header(data: bytes, position: int = 0) -> FrameHeader:
    """The header at `position`, its fields checked for shape but no checksum.

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
        raise ProtocolError(f"frame length {frame_bytes} is not possible", offset=position + 8)
    return header


def verify_stamp(header: FrameHeader, head: bytes) -> None:
    """Check the log's checksum over a head read back; raises `ChecksumError`.

    Requires: `head` is the first `header.head_bytes` bytes of the frame.
    """
    stamp_crc = crc32c(head[PHYSICAL_OFFSET_POSITION:], crc32c(head[:_STAMP_CRC_POSITION]))
    if stamp_crc != header.stamp_crc:
        raise ChecksumError("frame stamp checksum", offset=_STAMP_CRC_POSITION)


def verify_body(header: FrameHeader, frame: bytes) -> None:
    """Check the sender's checksum over a whole frame; raises `ChecksumError`.

    Requires: `len(frame) == header.frame_bytes`. The fill of a padding frame is not covered.
    """
    after = len(frame) if header.kind is FrameKind.PADDING else header.head_bytes
    if crc32c_without(frame, _SENT_BYTES, after) != header.body_crc:
        raise ChecksumError("frame body checksum", offset=_BODY_CRC_POSITION)


def parse_frame(data: bytes, *, frame_bytes_max: int, is_verified: bool = False) -> FrameHeader:
    """Header of a whole frame whose length and body checksum are right; raises `ProtocolError`.

    `is_verified` says that the body's checksum is known to be right: it is not made again.
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


def parse_message_frame(
    data: bytes, limits: Limits = DEFAULT_LIMITS, *, is_verified: bool = False
) -> MessageFrame:
    """A whole message frame, its checksum, tables and lengths verified; records stay encoded.

    `is_verified` is that of `parse_frame`. Raises `ProtocolError` and nothing else. No length is used before it was checked.
    """
    header = parse_frame(data, frame_bytes_max=limits.frame_bytes, is_verified=is_verified)
    if header.kind not in kinds.MESSAGE_KINDS:
        raise ProtocolError(f"a frame of kind {header.kind.name} holds no messages", offset=5)
    count = header.record_count
    if not 1 <= count <= limits.records_per_frame:
        raise ProtocolError(f"{count} records; allowed: 1 to {limits.records_per_frame}", offset=12)
    runs, position = parse_subjects(data, header)
    if position + 12 * count > len(data):
        raise ProtocolError("frame ends inside its record table", offset=position)
    lengths, positions, next_position = _places(data, position, count)
    first_mark = len(data) - kinds.mark_bytes(header.kind, count)
    fill_bytes = first_mark - next_position
    if not 0 <= fill_bytes < FRAME_ALIGNMENT_BYTES or any(data[next_position:first_mark]):
        raise ProtocolError("record lengths do not add up to the frame", offset=position)
    sizes = lengths[:1] if isinstance(positions, range) else lengths
    is_long = len(data) > limits.record_bytes and max(sizes) > limits.record_bytes
    if is_long or min(sizes) < RECORD_FIXED_BYTES:
        raise ProtocolError(
            f"record length outside {RECORD_FIXED_BYTES} to {limits.record_bytes}", offset=position
        )
    return MessageFrame(
        data=data,
        header=header,
        runs=runs,
        lengths=lengths,
        positions=positions,
    )


def _places(data: bytes, first: int, count: int) -> tuple[tuple[int, ...], Sequence[int], int]:
    """Lengths and positions of records by the columns from `first` on, and the position behind them."""
    first_position, column = first + 12 * count, data[first : first + 4 * count]
    if column == column[:4] * count:
        length = int.from_bytes(column[:4])
        after = first_position + count * length
        # A range cannot step by nothing; such a frame is refused for the length of its records.
        return (length,) * count, range(first_position, after, length or 1), after
    lengths: tuple[int, ...] = struct.unpack(f">{count}I", column)
    *positions, after = accumulate(lengths, initial=first_position)
    return lengths, tuple(positions), after


def parse_subjects(data: bytes, header: FrameHeader) -> tuple[tuple[SubjectRun, ...], int]:
    """The runs of a message frame, and the position behind its subject table.

    `data` may end anywhere behind that table. Raises `ProtocolError`.
    """
    subject_count = header.subject_count
    if not 1 <= subject_count <= SUBJECTS_PER_FRAME_MAX:
        raise ProtocolError(f"{subject_count} subjects in a message frame", offset=6)
    sequences = struct.unpack_from(f">{subject_count}Q", data, FRAME_HEADER_BYTES)
    runs: dict[str, SubjectRun] = {}
    position, records = header.head_bytes, 0
    for first_sequence in sequences:
        if position + _SUBJECT.size > len(data):
            raise ProtocolError("frame ends inside its subject table", offset=position)
        count, name_bytes = _SUBJECT.unpack_from(data, position)
        position += _SUBJECT.size
        name = data[position : position + name_bytes].decode("latin-1")
        if not count or len(name) != name_bytes or not is_name(name) or name in runs:
            raise ProtocolError(f"subject {shorten(name)} of {count} records", offset=position)
        runs[name] = SubjectRun(subject=name, count=count, first_sequence=first_sequence)
        position += name_bytes
        records += count
    if records != header.record_count:
        raise ProtocolError("subject counts do not add up to the records", offset=12)
    return tuple(runs.values()), position


def _aligned(length_bytes: int) -> int:
    return length_bytes + -length_bytes % FRAME_ALIGNMENT_BYTES


def _too_large(field: str, limit: int, value: int) -> TooLargeError:
    return TooLargeError(
        field=f"frame {field}", limit=str(limit), value=str(value), remedy="Send several frames."
    )
