"""Reads the message lists of schedule logs without the records before them.

Each frame has a list of its messages with its own checksum. A damaged list hides only its own
messages: callers that can continue without them pass `on_damage`. The search for the next frame
after it is bounded, because a disk may return zeros for a long range.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import accumulate
from typing import Final, NamedTuple

from qmq_broker.errors import CorruptionError, DiskError, UnknownFormatError
from qmq_broker.storage.logs.frame_scan import ScanSource, claims_in_segment
from qmq_broker.storage.logs.segments import SEGMENT_HEAD_BYTES
from qmq_broker.storage.schedule.columns import IN_SCHEDULE, Columns, Subjects
from qmq_client.wire.errors import ProtocolError
from qmq_client.wire.frame import (
    FRAME_ALIGNMENT_BYTES,
    FRAME_HEADER_BYTES,
    SEQUENCE_BYTES,
    FrameHeader,
    FrameKind,
    parse_subjects,
    read_header,
    verify_stamp,
)
from qmq_client.wire.frame_head import mark_bytes
from qmq_client.wire.limits import NAME_BYTES_MAX
from qmq_client.wire.marks import Marks, read_marks

#: How far after a damaged frame the next one is searched: many times the length of a frame.
SEARCH_BYTES_MAX: Final = 64 * 1024 * 1024
_SUBJECT_BYTES_MAX: Final = 5 + NAME_BYTES_MAX

#: Called for each unreadable list, which is then skipped.
OnDamage = Callable[[CorruptionError], object]


class _KnownFrame(NamedTuple):
    """A frame that was read before; frames never change."""

    frame_bytes: int
    last_sequence: int
    first_due_at_ms: int
    last_due_at_ms: int


def _known(header: FrameHeader, marks: Marks) -> _KnownFrame:
    last_sequence, due_at_ms = max(marks.sequences), marks.due_at_ms
    return _KnownFrame(header.frame_bytes, last_sequence, min(due_at_ms), max(due_at_ms))


def _is_wanted(frame: _KnownFrame, first_sequence: int, within: tuple[int, int] | None) -> bool:
    if frame.last_sequence < first_sequence:
        return False
    return within is None or (
        frame.first_due_at_ms <= within[1] and frame.last_due_at_ms >= within[0]
    )


class BucketLists:
    """The lists of all schedule logs; for any thread."""

    def __init__(self, part_of: Callable[[int, int], ScanSource]) -> None:
        """`part_of` reads a number of bytes of the schedule log of a bucket."""
        self._part_of = part_of
        #: Bucket → position → the known facts of a frame of its schedule log: about 200 bytes for
        #: 4,096 messages, so that most of a large bucket is not read again for each portion.
        self._known: dict[int, dict[int, _KnownFrame]] = {}
        #: Bucket → position of a damaged frame → where reading continues.
        self._after: dict[int, dict[int, int]] = {}

    def forget(self, bucket: int) -> None:
        """Read the lists of a bucket again."""
        self._known.pop(bucket, None)
        self._after.pop(bucket, None)

    def columns(
        self,
        bucket: int,
        subjects: Subjects,
        *,
        next_position: int,
        first_sequence: int,
        within: tuple[int, int] | None,
        on_damage: OnDamage | None,
    ) -> Iterator[Columns]:
        """Like `ScheduleFiles.columns`."""
        log = self._part_of(bucket, next_position)
        position = SEGMENT_HEAD_BYTES
        known = self._known.setdefault(bucket, {})
        while position < next_position:
            frame = known.get(position)
            if frame is None or _is_wanted(frame, first_sequence, within):
                try:
                    header, marks = _marks(log, bucket, position)
                    columns = _columns(log, bucket, position, header, subjects, marks)
                except (ProtocolError, DiskError, ValueError) as error:
                    damage = CorruptionError(
                        segment=log.path(bucket), offset=position, reason=str(error)
                    )
                    if on_damage is None:
                        raise damage from error
                    on_damage(damage)
                    position = self._continue_from(bucket, position, next_position)
                    continue
                if frame is None:
                    frame = known[position] = _known(header, marks)
                if _is_wanted(frame, first_sequence, within):
                    yield columns
            position += frame.frame_bytes

    def _continue_from(self, bucket: int, position: int, next_position: int) -> int:
        """The start of the frame after a damaged one; `next_position` if none is near."""
        known = self._after.setdefault(bucket, {})
        found = known.get(position)
        if found is None:
            near = self._part_of(bucket, min(next_position, position + SEARCH_BYTES_MAX))
            after = _after(near, bucket, position)
            found = known[position] = next_position if after is None else after
        return found


def _after(log: ScanSource, bucket: int, position: int) -> int | None:
    """The end of a frame whose stamp is whole, or the next frame; None if there is none."""
    with suppress(ProtocolError, DiskError):
        return position + _header(log, bucket, position).frame_bytes
    first = bucket + position + FRAME_ALIGNMENT_BYTES
    # A frame of another version is skipped here: only `verify` and `--quarantine` report it.
    with suppress(DiskError, UnknownFormatError):
        for header in claims_in_segment(log, bucket, first, epoch=0):
            return header.physical_offset - bucket
    return None


def _marks(log: ScanSource, bucket: int, position: int) -> tuple[FrameHeader, Marks]:
    header = _header(log, bucket, position)
    marks_bytes = mark_bytes(header.kind, header.record_count)
    first_mark = bucket + position + header.frame_bytes - marks_bytes
    return header, read_marks(header, log.read(first_mark, marks_bytes))


def _header(log: ScanSource, bucket: int, position: int) -> FrameHeader:
    offset = bucket + position
    header = read_header(log.read(offset, FRAME_HEADER_BYTES))
    if header.kind is not FrameKind.SCHEDULED or not header.record_count:
        raise ProtocolError(f"frame of kind {header.kind.name}")
    verify_stamp(header, log.read(offset, header.head_bytes))
    if header.physical_offset != offset:
        raise ProtocolError(f"frame of offset {header.physical_offset}")
    return header


def _columns(
    log: ScanSource,
    bucket: int,
    position: int,
    header: FrameHeader,
    subjects: Subjects,
    marks: Marks,
) -> Columns:
    count, subject_count = header.record_count, header.subject_count
    table_bytes = (SEQUENCE_BYTES + _SUBJECT_BYTES_MAX) * subject_count + 12 * count
    first_bytes = min(header.frame_bytes, FRAME_HEADER_BYTES + table_bytes)
    data = log.read(bucket + position, first_bytes)
    runs, table_position = parse_subjects(data, header)
    lengths = array("I", data[table_position : table_position + 4 * count])
    if sys.byteorder == "little":
        lengths.byteswap()
    first_place = IN_SCHEDULE | position + table_position + 12 * count
    places = array("Q", accumulate(lengths[:-1], initial=first_place))
    columns = Columns(
        bucket=bucket,
        sequences=array("Q", marks.sequences),
        sources=array("Q", marks.sources),
        due_at_ms=array("Q", marks.due_at_ms),
        places=places,
        record_bytes=lengths,
        message_ids=bytearray(marks.message_ids),
    )
    for run in runs:
        columns.subjects.extend(array("I", [subjects.number(run.subject)]) * run.count)
    return columns
