"""Looking at every frame of one segment, also behind damage: what `verify`, `dump` and backup see.

An opening reads as little as it may and stops at the first bad frame. This reads everything and goes
on behind: at the next frame whose stamp is whole and says that it belongs where it stands. What lies
between is a damaged range, or the torn tail; which of both is for the reader of the whole log to say,
as in `log_recovery.py`. Changes nothing, keeps nothing but counts and ranges in memory.
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

#: Called with each good frame that is neither head nor padding; a `ProtocolError` damages the frame.
Visit = Callable[[ScannedFrame], None]


class DamagedRange(NamedTuple):
    """Bytes of a log that are no good frames."""

    first_offset: int
    next_offset: int
    reason: str


class SequenceRun(NamedTuple):
    """Sequences of one subject that follow each other in one segment."""

    first: int
    next: int
    #: Where the frames of the first and of the last one begin.
    offset: int
    last_offset: int


@dataclass(slots=True, kw_only=True)
class SegmentSurvey:
    """What stands in one segment."""

    base: int
    #: Good frames without heads and padding, and the records or actions in them.
    frames: int = 0
    records: int = 0
    #: Messages that were lost in ranges which stand in quarantine.
    lost: int = 0
    #: Epoch of the first and of the last good frame.
    first_epoch: int = 0
    last_epoch: int = 0
    #: A kind of action that only a later version knows.
    later_kind: int | None = None
    #: Up to where the log had been synced, by what the good frames say.
    durable_claim: int = 0
    #: Where the last good frame begins; -1 when there is none.
    last_frame_offset: int = -1
    #: In order; the last one may be the rest behind the log's end.
    damaged: list[DamagedRange] = field(default_factory=list)
    runs: dict[str, list[SequenceRun]] = field(default_factory=dict)

    def add_run(self, subject: str, first: int, count: int, offset: int) -> None:
        """Note that these sequences of a subject are in the frame at `offset`."""
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
    """Look at the whole segment that begins at `base`.

    `survey` is filled when it is given, so that `visit` can write into it too.
    """
    found = SegmentSurvey(base=base) if survey is None else survey
    offset, next_base = base, base + segments.segment_bytes
    while offset < next_base:
        scan = FrameScan(segments, kinds, store_id=store_id, first_offset=offset)
        try:
            _survey_run(scan, found, kinds, next_base, visit)
        except CorruptionError as error:  # a head of another store or place: nothing here is ours
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
    """Good frames up to the first bad one, or to the segment's end."""
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
    """Where the next frame of this log begins behind the bad one; the segment's end for none."""
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
    """Every good frame of a log from the first one at or behind `offset` on, and what lies between.

    The last range is the rest behind the log's end. `offset` need not be the beginning of a frame.
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
