"""Finds frames of a log by offset and by time, without reading earlier ones.

The stamp of a frame holds its offset and its time under a checksum, and times never go back within
a log. So a time is found by binary search: first among the segments, by the first frame of each,
then inside one segment, by looking for the next whole stamp after any byte. If the segment has a
summary, the summary narrows the range first: it gives the times of some frames.

The limit of the method: a body that contains the stamp of a frame for exactly the offset where it
ends up would be taken for a frame. That does not happen by chance. A sender who forges it gets a
starting point inside their own message, and everything read from there on is verified as always.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final, NamedTuple

from qmq_broker.errors import CorruptionError
from qmq_broker.storage.logs.frame_scan import ScanSource, claims_after
from qmq_broker.storage.logs.kinds import LOG_LIMITS
from qmq_broker.storage.logs.segments import SEGMENT_HEAD_BYTES, Segments
from qmq_broker.storage.logs.summary import SegmentSummary, SummaryOf, no_summary
from qmq_client.wire.errors import ProtocolError
from qmq_client.wire.frame import (
    FRAME_ALIGNMENT_BYTES,
    FRAME_HEADER_BYTES,
    FrameHeader,
    MessageFrame,
    parse_message_frame,
    read_header,
    verify_stamp,
)

#: A shorter range is read frame by frame: each step of the binary search reads a block.
WALKED_BYTES: Final = 64 * 1024


class LogRange(NamedTuple):
    """A part of a log, half open; both ends are at frame boundaries."""

    first_offset: int
    next_offset: int

    @property
    def length(self) -> int:
        """Its bytes; 0 for a range that ends before it begins."""
        return max(0, self.next_offset - self.first_offset)


def offset_at(
    segments: Segments,
    time_ms: int,
    within: LogRange,
    summary_of: SummaryOf = no_summary,
) -> int:
    """The offset of the first frame stored at `time_ms` or later.

    `within.next_offset` if there is none. `summary_of` gives the summary of the segment that begins
    at an offset; without one, more of the log is read. Raises `CorruptionError`.
    """
    bases = [
        base
        for base in segments.bases_from(within.first_offset)
        if base + SEGMENT_HEAD_BYTES < within.next_offset
    ]
    low, high = 0, len(bases)
    while low < high:  # the first segment that begins at or after the time
        middle = (low + high) // 2
        if _stored_at_ms(segments, bases[middle] + SEGMENT_HEAD_BYTES) < time_ms:
            low = middle + 1
        else:
            high = middle
    end = bases[low] + SEGMENT_HEAD_BYTES if low < len(bases) else within.next_offset
    if not low:
        return max(within.first_offset, end) if bases else end
    first_offset = max(within.first_offset, bases[low - 1] + SEGMENT_HEAD_BYTES)
    next_offset = min(within.next_offset, bases[low - 1] + segments.segment_bytes)
    part = LogRange(first_offset, next_offset)
    summary = summary_of(bases[low - 1])
    if summary is not None:
        part = _between_marks(segments, time_ms, part, summary)
    found = _halve(segments, time_ms, part)
    return found if found < next_offset else end


def frame_at_or_after(segments: Segments, within: LogRange) -> FrameHeader | None:
    """The first frame that begins in this range, which may start at any byte of the log."""
    aligned = within.first_offset + -within.first_offset % FRAME_ALIGNMENT_BYTES
    header = next(claims_after(segments, aligned, epoch=0), None)
    if header is None or header.physical_offset >= within.next_offset:
        return None
    return header


def read_message_frame(segments: ScanSource, offset: int) -> MessageFrame:
    """The message frame at `offset`, stamp and body verified; raises `CorruptionError`."""
    try:
        header = read_stamp(segments, offset)
        return parse_message_frame(segments.read(offset, header.frame_bytes), LOG_LIMITS)
    except ProtocolError as error:
        raise _corruption(segments, offset, error) from error


def read_stamp(segments: ScanSource, offset: int) -> FrameHeader:
    """The header of the frame at `offset`, its stamp verified; raises `ProtocolError`."""
    header = read_header(segments.read(offset, FRAME_HEADER_BYTES))
    verify_stamp(header, segments.read(offset, header.head_bytes))
    if header.physical_offset != offset:
        raise ProtocolError(f"frame of offset {header.physical_offset}")
    return header


def _between_marks(
    segments: Segments, time_ms: int, part: LogRange, summary: SegmentSummary
) -> LogRange:
    """The part of `part` that must be searched; both its ends are at frame boundaries."""
    after = bisect_left(summary.marks, time_ms, key=lambda mark: mark.stored_at_ms)
    first_offset, next_offset = part
    for mark in summary.marks[max(0, after - 1) : after + 1]:
        if not first_offset <= mark.offset < next_offset:
            continue
        try:
            stored_at_ms = read_stamp(segments, mark.offset).stored_at_ms
        except ProtocolError:
            continue
        if stored_at_ms < time_ms:
            first_offset = mark.offset
        else:
            next_offset = mark.offset
    return LogRange(first_offset, next_offset)


def _halve(segments: Segments, time_ms: int, within: LogRange) -> int:
    """`offset_at` inside one segment. Requires: a frame begins where the range begins."""
    low, high = within
    found = within.next_offset
    while high - low > WALKED_BYTES:
        middle = (low + high) // 2
        header = frame_at_or_after(segments, LogRange(middle, high))
        if header is not None and header.stored_at_ms < time_ms:
            low = header.physical_offset + header.frame_bytes
            continue
        high = middle
        if header is not None:
            found = header.physical_offset
    return _walk(segments, time_ms, low, found)


def _walk(segments: Segments, time_ms: int, offset: int, next_offset: int) -> int:
    while offset < next_offset:
        try:
            header = read_stamp(segments, offset)
        except ProtocolError:  # a damaged range: frames after it are found nevertheless
            later = frame_at_or_after(segments, LogRange(offset + 1, next_offset))
            if later is None:
                break
            header, offset = later, later.physical_offset
        if header.stored_at_ms >= time_ms:
            return offset
        offset += header.frame_bytes
    return next_offset


def _stored_at_ms(segments: Segments, offset: int) -> int:
    try:
        return read_stamp(segments, offset).stored_at_ms
    except ProtocolError as error:
        raise _corruption(segments, offset, error) from error


def _corruption(segments: ScanSource, offset: int, error: ProtocolError) -> CorruptionError:
    return CorruptionError(segment=segments.path(offset), offset=offset, reason=str(error))
