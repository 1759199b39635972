"""Reads every frame of a segment, even after damage: the basis of `verify`, `dump` and backup.

A start reads as little as possible and stops at the first bad frame. This module reads the whole
segment and continues after a bad frame, at the next frame with a valid stamp for its place. The
range in between is damaged, or the torn tail; the reader of the whole log decides which, as in
`log_recovery.py`. Changes nothing, and keeps only counts and ranges in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from qmq_broker.errors import CorruptionError
from qmq_broker.storage.logs.frame_scan import FrameScan, ScannedFrame, claims_in_segment
from qmq_broker.storage.logs.segments import Segments
from qmq_client.wire.errors import ProtocolError
from qmq_client.wire.frame import FRAME_ALIGNMENT_BYTES, FrameKind

#: Called with each good frame except heads and padding; if it raises a `ProtocolError`, the frame counts as damaged.
Visit = Callable[[ScannedFrame], None]


class DamagedRange(NamedTuple):
    """A range of a log without good frames."""

    first_offset: int
    next_offset: int
    reason: str


class SequenceRun(NamedTuple):
    """Consecutive sequences of one subject in one segment."""

    first: int
    next: int
    #: Offsets of the frames with the first and the last of them.
    offset: int
    last_offset: int


@dataclass(slots=True, kw_only=True)
class SegmentSurvey:
    """The content of one segment."""

    base: int
    #: Good frames without heads and padding, and the records or actions in them.
    frames: int = 0
    records: int = 0
    #: Messages lost in ranges that are in quarantine.
    lost: int = 0
    #: Epoch of the first and of the last good frame.
    first_epoch: int = 0
    last_epoch: int = 0
    #: Offset up to which the log had been synced, according to the good frames.
    durable_claim: int = 0
    #: Offset of the last good frame; -1 if there is none.
    last_frame_offset: int = -1
    #: Damaged ranges in order; the last one may be the rest after the end of the log.
    damaged: list[DamagedRange] = field(default_factory=list)
    runs: dict[str, list[SequenceRun]] = field(default_factory=dict)

    def add_run(self, subject: str, first: int, count: int, offset: int) -> None:
        """Record that these sequences of a subject are in the frame at `offset`."""
        runs = self.runs.setdefault(subject, [])
        if runs and runs[-1].next == first:
            runs[-1] = runs[-1]._replace(next=first + count, last_offset=offset)
        else:
            runs.append(SequenceRun(first, first + count, offset, offset))


def survey_segment(
    segments: Segments,
    base: int,
    kinds: frozenset[FrameKind],
    *,
    store_id: bytes,
    visit: Visit,
    survey: SegmentSurvey | None = None,
) -> SegmentSurvey:
    """Read the whole segment that begins at `base`.

    Fills `survey` if it is given, so that `visit` can write to it too.
    """
    found = SegmentSurvey(base=base) if survey is None else survey
    offset, next_base = base, base + segments.segment_bytes
    while offset < next_base:
        scan = FrameScan(segments, kinds, store_id=store_id, first_offset=offset)
        try:
            _survey_run(scan, found, kinds, next_base, visit)
        except (
            CorruptionError
        ) as error:  # a head of another store or place: the segment does not belong to this log
            found.damaged.append(DamagedRange(offset, next_base, error.reason))
            return found
        if scan.next_offset >= next_base:
            return found
        offset = _next_good(segments, base, scan, found.last_epoch)
        found.damaged.append(DamagedRange(scan.next_offset, offset, scan.reason))
    return found


def _survey_run(
    scan: FrameScan,
    found: SegmentSurvey,
    kinds: frozenset[FrameKind],
    next_base: int,
    visit: Visit,
) -> None:
    """Good frames up to the first bad one, or to the end of the segment."""
    for frame in scan:
        header = frame.header
        try:
            if header.kind is FrameKind.LOST:
                visit(frame)
            elif header.kind in kinds:
                visit(frame)
                found.frames += 1
                found.records += header.record_count
        except ProtocolError as error:
            reason = f"its checksums fit, but: {error}"
            found.damaged.append(DamagedRange(frame.offset, scan.next_offset, reason))
        if found.last_frame_offset < 0:
            found.first_epoch = header.epoch
        found.last_epoch = header.epoch
        found.last_frame_offset = frame.offset
        if scan.next_offset >= next_base:
            break
    found.durable_claim = max(found.durable_claim, scan.durable_claim)


def _next_good(segments: Segments, base: int, scan: FrameScan, epoch: int) -> int:
    """The offset of the next good frame after the bad one; the segment's end if there is none."""
    offset = max(scan.search_offset, scan.next_offset + FRAME_ALIGNMENT_BYTES)
    return _first_claim(segments, base, offset, epoch)


def _first_claim(segments: Segments, base: int, offset: int, epoch: int) -> int:
    next_base = base + segments.segment_bytes
    if offset < next_base:
        for header in claims_in_segment(segments, base, offset, epoch=epoch):
            return header.physical_offset
    return next_base


def walk(
    segments: Segments, kinds: frozenset[FrameKind], *, store_id: bytes, offset: int
) -> Iterator[ScannedFrame | DamagedRange]:
    """Every good frame of a log, from the first one at or after `offset` on, and the ranges in
    between.

    The last range is the rest after the end of the log. `offset` need not be the beginning of a
    frame.
    """
    for base in segments.bases_from(offset):
        first, next_base = max(base, offset), base + segments.segment_bytes
        if first > base:
            first += -first % FRAME_ALIGNMENT_BYTES
            first = _first_claim(segments, base, first, 0)
        while first < next_base:
            scan = FrameScan(segments, kinds, store_id=store_id, first_offset=first)
            try:
                for frame in scan:
                    yield frame
                    if scan.next_offset >= next_base:
                        break
            except CorruptionError as error:
                yield DamagedRange(first, next_base, error.reason)
                break
            if scan.next_offset >= next_base:
                break
            first = _next_good(segments, base, scan, scan.last.epoch if scan.last else 0)
            yield DamagedRange(scan.next_offset, first, scan.reason)
