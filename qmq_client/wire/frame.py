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
themselves, grouped by subject in the order of the subject table, then zero fill to a multiple of 8,
then, in kinds that only the broker makes, marks for the records (`marks.py`). The module that
writes frames of another kind defines their body.

The sender makes all fields except the stamp; a log appends the sender's bytes unchanged after a
stamped head. Physical offset and epoch are guarded by the stamp's own checksum, so stale bytes in a
recycled file are never mistaken for new ones. A frame is present or absent as a whole and never
crosses a segment. Big-endian. Documented for people in `docs/format/frame.md`; the idea of one
batch as the unit of wire, log and checksum is Kafka's record batch, version 2.

Other modules import names about frames only from here: `frame_head.py` makes and reads the head of any
frame, this module the body of messages, whose records stay encoded. `parse_message_frame` accepts
untrusted bytes and checks every length before it is used.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Final, NamedTuple

import msgspec

from qmq_client.wire.errors import ProtocolError, TooLargeError
from qmq_client.wire.frame_head import (
    DURABLE_GAP_MAX,
    FRAME_ALIGNMENT_BYTES,
    FRAME_HEADER_BYTES,
    FRAME_MAGIC,
    FRAME_VERSION,
    MESSAGE_KINDS,
    PHYSICAL_OFFSET_POSITION,
    SEQUENCE_BYTES,
    FrameHeader,
    FrameKind,
    aligned,
    build_frame,
    build_padding,
    mark_bytes,
    parse_frame,
    read_header,
    stamp_frame,
    unknown_format,
    verify_body,
    verify_stamp,
)
from qmq_client.wire.limits import DEFAULT_LIMITS, SUBJECTS_PER_FRAME_MAX, Limits
from qmq_client.wire.message_id import MESSAGE_ID_BYTES
from qmq_client.wire.names import check_name, is_name
from qmq_client.wire.record import MESSAGE_ID_POSITION, RECORD_FIXED_BYTES, record_tag_hashes
from qmq_client.wire.shown import shorten

_SUBJECT: Final = struct.Struct(">IB")
_SEQUENCE: Final = struct.Struct(">Q")


class SubjectRun(msgspec.Struct, frozen=True, kw_only=True):
    """Adjacent records of one subject in a frame."""

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
    #: Byte position in `data` of each record; a `range` if all records have the same length.
    positions: Sequence[int]

    def record(self, index: int) -> bytes:
        """The encoded record with this index."""
        first = self.positions[index]
        return self.data[first : first + self.lengths[index]]

    @property
    def tag_hashes(self) -> tuple[int, ...]:
        """The tag hash of each record; unpacked on demand, because an append copies the column."""
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
    """A frame of encoded records, grouped by subject, with the marks of its kind.

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
    frame_bytes = aligned(records_end) + len(marks)
    if frame_bytes > limits.frame_bytes:
        raise _too_large("bytes", limits.frame_bytes, frame_bytes)
    # Joined first: many short parts take longer than copying them.
    body = b"".join(
        (
            *table,
            struct.pack(f">{count}I", *lengths),
            struct.pack(f">{count}Q", *record_tag_hashes(in_order)),
            *in_order,
            bytes(aligned(records_end) - records_end),
            marks,
        )
    )
    return build_frame(kind, body, record_count=count, subject_count=len(records))


def parse_message_frame(
    data: bytes, limits: Limits = DEFAULT_LIMITS, *, is_verified: bool = False
) -> MessageFrame:
    """Parse a complete message frame and verify its checksum, tables and lengths; records stay encoded.

    `is_verified` as in `parse_frame`. Raises only `ProtocolError`. Every length is checked before it is used.
    """
    header = parse_frame(data, frame_bytes_max=limits.frame_bytes, is_verified=is_verified)
    if header.kind not in MESSAGE_KINDS:
        raise ProtocolError(f"a frame of kind {header.kind.name} holds no messages", offset=5)
    count = header.record_count
    if not 1 <= count <= limits.records_per_frame:
        raise ProtocolError(
            f"frame has {count} records; allowed: 1 to {limits.records_per_frame}", offset=12
        )
    runs, position = parse_subjects(data, header)
    first_record = position + 12 * count
    if first_record > len(data):
        raise ProtocolError("frame ends inside its record table", offset=position)
    lengths, positions, shortest, longest, after = _places(data, position, count)
    first_mark = len(data) - mark_bytes(header.kind, count)
    if not 0 <= first_mark - after < FRAME_ALIGNMENT_BYTES or any(data[after:first_mark]):
        raise ProtocolError("record lengths do not add up to the frame", offset=position)
    if shortest < RECORD_FIXED_BYTES or longest > limits.record_bytes:
        raise ProtocolError(
            f"a record is {shortest if shortest < RECORD_FIXED_BYTES else longest} bytes long; "
            f"allowed: {RECORD_FIXED_BYTES} to {limits.record_bytes}",
            offset=position,
        )
    return MessageFrame(
        data=data,
        header=header,
        runs=runs,
        lengths=lengths,
        positions=positions,
    )


class _Places(NamedTuple):
    """The places of contiguous records."""

    lengths: tuple[int, ...]
    positions: Sequence[int]
    shortest: int
    longest: int
    #: Position after the last of them.
    after: int


def _places(data: bytes, first: int, count: int) -> _Places:
    """The places of records, from the columns at `first`."""
    first_position, column = first + 12 * count, data[first : first + 4 * count]
    if column == column[:4] * count:
        return _even_places(first_position, count, int.from_bytes(column[:4]))
    lengths: tuple[int, ...] = struct.unpack(f">{count}I", column)
    *positions, after = accumulate(lengths, initial=first_position)
    return _Places(lengths, tuple(positions), min(lengths), max(lengths), after)


@lru_cache(maxsize=64)
def _even_places(first_position: int, count: int, length: int) -> _Places:
    """The places of records of one length: the same in all frames of one shape."""
    after = first_position + count * length
    # A range cannot have step 0; such a frame is refused because of the length of its records.
    positions = range(first_position, after, length or 1)
    return _Places((length,) * count, positions, length, length, after)


def parse_subjects(data: bytes, header: FrameHeader) -> tuple[tuple[SubjectRun, ...], int]:
    """The runs of a message frame, and the position after its subject table.

    `data` may end anywhere after that table. Raises `ProtocolError`.
    """
    subject_count = header.subject_count
    if not 1 <= subject_count <= SUBJECTS_PER_FRAME_MAX:
        raise ProtocolError(
            f"frame has {subject_count} subjects; allowed: 1 to {SUBJECTS_PER_FRAME_MAX}", offset=6
        )
    first = position = header.head_bytes
    try:
        for _ in range(subject_count):
            position += _SUBJECT.size + data[position + _SUBJECT.size - 1]
    except IndexError:
        raise ProtocolError("frame ends inside its subject table", offset=position) from None
    sequences, table = data[FRAME_HEADER_BYTES:first], data[first:position]
    # Fast path: a frame that is not stored yet has no sequences, and often a known subject table.
    is_new = not any(sequences)
    runs = (_known_runs if is_new else _read_runs)(table, sequences)
    if sum([run.count for run in runs]) != header.record_count:
        raise ProtocolError("subject counts do not add up to the records", offset=12)
    return runs, position


def _read_runs(table: bytes, sequences: bytes) -> tuple[SubjectRun, ...]:
    """The runs of a subject table that may end inside its last name; raises `ProtocolError`."""
    runs: dict[str, SubjectRun] = {}
    position = 0
    for (first_sequence,) in _SEQUENCE.iter_unpack(sequences):
        count, name_bytes = _SUBJECT.unpack_from(table, position)
        position += _SUBJECT.size
        name = table[position : position + name_bytes].decode("latin-1")
        if not count or len(name) != name_bytes or not is_name(name) or name in runs:
            raise ProtocolError(
                f"subject {shorten(name)} of {count} records is not a name, has no records, or occurs twice",
                offset=FRAME_HEADER_BYTES + len(sequences) + position,
            )
        runs[name] = SubjectRun(subject=name, count=count, first_sequence=first_sequence)
        position += name_bytes
    return tuple(runs.values())


#: The same with a cache for repeated tables.
_known_runs: Final = lru_cache(maxsize=256)(_read_runs)


def _too_large(field: str, limit: int, value: int) -> TooLargeError:
    return TooLargeError(
        field=f"frame {field}", limit=str(limit), value=str(value), remedy="Send several frames."
    )


__all__ = [
    "DURABLE_GAP_MAX",
    "FRAME_ALIGNMENT_BYTES",
    "FRAME_HEADER_BYTES",
    "FRAME_MAGIC",
    "FRAME_VERSION",
    "PHYSICAL_OFFSET_POSITION",
    "SEQUENCE_BYTES",
    "FrameHeader",
    "FrameKind",
    "MessageFrame",
    "SubjectRun",
    "build_frame",
    "build_message_frame",
    "build_padding",
    "parse_frame",
    "parse_message_frame",
    "parse_subjects",
    "read_header",
    "stamp_frame",
    "unknown_format",
    "verify_body",
    "verify_stamp",
]
