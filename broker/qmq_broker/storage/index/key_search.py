"""Searches messages by id, or by key and time: first in the key index, then in parts of the log without an index.

Newest first. Entries of the index are not trusted: the frame is read, verified and compared. Parts
of the log without an index (it lags, a file was damaged, old files were removed) are scanned up to
a limit; the result says how much was left out. Runs in any thread, parallel to the writer and the
indexer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from qmq_broker.errors import CorruptionError, DiskError
from qmq_broker.storage.index.index_keys import id_hash, key_hash
from qmq_broker.storage.index.key_index import INDEXED_KINDS, KeyIndex, LogBounds
from qmq_broker.storage.index.key_index_file import IndexFile
from qmq_broker.storage.logs.frame_scan import FrameScan
from qmq_broker.storage.logs.frame_seek import (
    LogRange,
    frame_at_or_after,
    offset_at,
    read_message_frame,
)
from qmq_broker.storage.logs.kinds import COMMIT_KINDS
from qmq_broker.storage.logs.segments import Segments
from qmq_broker.storage.logs.summary import SegmentSummary, SummaryOf, no_summary
from qmq_client.wire.frame import MessageFrame
from qmq_client.wire.message_id import split_message_id
from qmq_client.wire.record import record_key, record_message_id

#: Unindexed log bytes that one search scans: a few tenths of a second.
LOOKED_THROUGH_BYTES_MAX: Final = 256 * 1024 * 1024
#: Entries that one search follows: ids and keys may have been chosen to collide in one slot.
ENTRIES_MAX: Final = 100_000
#: Bytes of frames that one search reads because of the index.
FRAME_BYTES_MAX: Final = 1024 * 1024 * 1024
#: Results of one search, and their bytes.
FOUND_MAX: Final = 1_000
FOUND_BYTES_MAX: Final = 8 * 1024 * 1024


class TimeRange(NamedTuple):
    """A range of times of storing, ms since 1970 UTC; half open."""

    first_ms: int = 0
    next_ms: int = 2**63 - 1


class FoundRecord(NamedTuple):
    """One message as it is stored."""

    subject: str
    sequence: int
    #: Offset of the record in the commit log.
    physical_offset: int
    stored_at_ms: int
    record: bytes


@dataclass(slots=True)
class SearchResult:
    """The result of a search, newest first, and the parts that it left out."""

    found: list[FoundRecord] = field(default_factory=list)
    #: Whether there are more messages than requested.
    has_more: bool = False
    #: The log below this offset was indexed when the search began.
    indexed_offset: int = 0
    #: Where the log ended at that time.
    next_offset: int = 0
    #: Log bytes that neither the index nor the search covered.
    unsearched_bytes: int = 0
    #: A limit was reached, or an index file is not checked yet: messages may be missing.
    is_uncertain: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether the search was complete, up to the limit of results."""
        return not self.unsearched_bytes and not self.is_uncertain


class KeySearch:
    """Searches over one log and its index; safe for several threads."""

    def __init__(
        self,
        segments: Segments,
        index: KeyIndex,
        *,
        store_id: bytes,
        bounds: LogBounds,
        summary_of: SummaryOf = no_summary,
    ) -> None:
        self._segments = segments
        self._index = index
        self._summary_of = summary_of
        self._store_id = store_id
        self._bounds = bounds

    def by_id(
        self, message_id: bytes, count: int, sees: Callable[[str], bool] = lambda _: True
    ) -> SearchResult:
        """Every place of a message in subjects that `sees` accepts: more than one if it was sent again after
        the dedupe window, or if several subjects have one with this id.
        """
        wanted = _Wanted(
            hash_=id_hash(*split_message_id(message_id)),
            needle=message_id,
            is_it=lambda name, record: record_message_id(record) == message_id and sees(name),
        )
        return _Search(self, wanted, TimeRange(), count).run()

    def by_key(self, subject: str, key: str, times: TimeRange, count: int) -> SearchResult:
        """The messages of a subject with this key that were stored in this time.

        Requires: a valid key; the empty one is not.
        """
        assert key
        needle = key.encode()
        wanted = _Wanted(
            hash_=key_hash(subject, key),
            needle=needle,
            is_it=lambda name, record: name == subject and record_key(record) == needle,
            subject=subject,
        )
        return _Search(self, wanted, times, count).run()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    hash_: int
    #: Bytes that any frame holding a match contains.
    needle: bytes
    #: Whether a record of a subject matches.
    is_it: Callable[[str, bytes], bool]
    #: Search only records of this subject; None for any.
    subject: str | None = None


class _Search:
    """One search: from the newest source to the oldest, until enough messages are found."""

    def __init__(self, over: KeySearch, wanted: _Wanted, times: TimeRange, count: int) -> None:
        self._segments = over._segments
        self._index = over._index
        self._summary_of = over._summary_of
        self._store_id = over._store_id
        self._within = over._bounds()
        self._bounds = over._bounds
        self._wanted = wanted
        self._times = times
        self._count = max(1, min(count, FOUND_MAX))
        self._room_bytes = FOUND_BYTES_MAX
        self._scan_bytes = LOOKED_THROUGH_BYTES_MAX
        self._frame_bytes = FRAME_BYTES_MAX
        self._entries = ENTRIES_MAX
        self._seen: set[int] = set()
        self._result = SearchResult(
            indexed_offset=self._index.indexed_offset, next_offset=self._within.next_offset
        )

    def run(self) -> SearchResult:
        # Frames that are indexed meanwhile are searched twice rather than not at all.
        files, gaps = self._index.cover(self._within)
        sources: list[LogRange | IndexFile] = [*files]
        sources += [part for gap in gaps for part in self._parts(gap)]
        sources.sort(key=lambda source: source.next_offset, reverse=True)
        for source in sources:
            if self._result.has_more:
                break
            frames = self._of_gap(source) if isinstance(source, LogRange) else self._of_file(source)
            for offset, frame in frames:
                self._take(offset, frame)
                if self._result.has_more:
                    break
        # A gap that was indexed meanwhile may have come after its file.
        self._result.found.sort(key=lambda one: one.physical_offset, reverse=True)
        return self._result

    def _of_file(self, file: IndexFile) -> Iterator[tuple[int, MessageFrame]]:
        first_ms, next_ms = self._times
        if file.last_stored_at_ms < first_ms or file.first_stored_at_ms >= next_ms:
            return
        if not file.is_checked:
            self._result.is_uncertain = True
        try:
            hits, looked = file.find(
                self._wanted.hash_, first_ms=first_ms, entries_max=self._entries
            )
        except (CorruptionError, DiskError) as error:
            self._index.suspect(file, str(error))
            if not self._is_gone(file.next_offset - 1):
                self._result.is_uncertain = True
            return
        self._entries -= looked
        if not self._entries:
            self._result.is_uncertain = True
        for hit in hits:
            if hit.stored_from_ms >= next_ms:
                continue
            frame = self._read(hit.offset)
            if frame is not None:
                yield hit.offset, frame

    def _parts(self, gap: LogRange) -> Iterator[LogRange]:
        """The parts of a gap that may hold a match, according to the summaries of its segments."""
        first_offset, next_offset = gap
        while first_offset < next_offset:
            base = self._segments.base_of(first_offset)
            part = LogRange(first_offset, min(next_offset, base + self._segments.segment_bytes))
            summary = self._summary_of(base)
            kept = part
            if summary is not None:
                kept = _narrow(summary, part, self._wanted.subject, *self._times) or LogRange(0, 0)
            if kept.length:
                yield kept
            first_offset = part.next_offset

    def _of_gap(self, gap: LogRange) -> Iterator[tuple[int, MessageFrame]]:
        """The frames of an unindexed part, newest first, up to the limit."""
        first_offset, next_offset = gap
        if self._times.first_ms:
            first_offset = max(first_offset, self._offset_at(self._times.first_ms, gap))
        if self._times.next_ms < TimeRange().next_ms:
            next_offset = min(next_offset, self._offset_at(self._times.next_ms, gap))
        surplus = LogRange(first_offset, next_offset).length - self._scan_bytes
        if surplus > 0:
            header = frame_at_or_after(
                self._segments, LogRange(first_offset + surplus, next_offset)
            )
            begin = next_offset if header is None else header.physical_offset
            self._result.unsearched_bytes += begin - first_offset
            first_offset = begin
        self._scan_bytes -= LogRange(first_offset, next_offset).length
        offsets = list(self._looked_through(LogRange(first_offset, next_offset)))
        for offset in reversed(offsets):
            frame = self._read(offset)
            if frame is not None:
                yield offset, frame

    def _looked_through(self, part: LogRange) -> Iterator[int]:
        """The offsets of frames that contain the bytes searched for."""
        offset = part.first_offset
        while offset < part.next_offset:
            scan = FrameScan(
                self._segments, COMMIT_KINDS, store_id=self._store_id, first_offset=offset
            )
            for frame in scan:
                if frame.offset >= part.next_offset:
                    return
                if self._wanted.needle in frame.data and frame.header.kind in INDEXED_KINDS:
                    yield frame.offset
            offset = scan.next_offset
            if offset < part.next_offset:  # a damaged range, or deleted meanwhile
                later = frame_at_or_after(self._segments, LogRange(offset + 1, part.next_offset))
                after = part.next_offset if later is None else later.physical_offset
                if not self._is_gone(offset):
                    self._result.unsearched_bytes += after - offset
                offset = after

    def _take(self, offset: int, frame: MessageFrame) -> None:
        """Add the matches of one frame, newest first."""
        self._seen.add(offset)
        stored_at_ms = frame.header.stored_at_ms
        if not self._times.first_ms <= stored_at_ms < self._times.next_ms:
            return
        if not self._within.first_offset <= offset < self._within.next_offset:
            return
        for subject, sequence, index in _backwards(frame):
            record = frame.record(index)
            if not self._wanted.is_it(subject, record):
                continue
            self._room_bytes -= len(record)
            if len(self._result.found) == self._count or (
                self._room_bytes < 0 and self._result.found
            ):
                self._result.has_more = True
                return
            place = offset + frame.positions[index]
            self._result.found.append(FoundRecord(subject, sequence, place, stored_at_ms, record))

    def _read(self, offset: int) -> MessageFrame | None:
        if offset in self._seen or self._is_gone(offset):
            return None
        if self._frame_bytes <= 0:
            self._result.is_uncertain = True
            return None
        try:
            frame = read_message_frame(self._segments, offset)
        except (CorruptionError, DiskError):
            # The frame was deleted meanwhile or is damaged, or a damaged entry led here.
            if not self._is_gone(offset):
                self._result.is_uncertain = True
            return None
        self._frame_bytes -= len(frame.data)
        return frame

    def _offset_at(self, time_ms: int, gap: LogRange) -> int:
        return offset_at(self._segments, time_ms, gap, self._summary_of)

    def _is_gone(self, offset: int) -> bool:
        return offset < self._bounds().first_offset


def _backwards(frame: MessageFrame) -> Iterator[tuple[str, int, int]]:
    """Subject, sequence and index of each record of a frame, last to first."""
    after = len(frame.positions)
    for run in reversed(frame.runs):
        first = after - run.count
        for index in range(after - 1, first - 1, -1):
            yield run.subject, run.first_sequence + index - first, index
        after = first


def _narrow(
    summary: SegmentSummary,
    within: LogRange,
    subject: str | None,
    first_ms: int,
    next_ms: int,
) -> LogRange | None:
    """The part of `within`, itself a part of this segment, that may hold a message; None if there is none.

    Begins at a frame if `within` does.
    """
    if not summary.messages or summary.last_stored_at_ms < first_ms:
        return None
    if summary.first_stored_at_ms >= next_ms:
        return None
    first_offset, next_offset = within
    for mark in summary.marks:
        if mark.stored_at_ms < first_ms:
            first_offset = max(first_offset, mark.offset)
        elif mark.stored_at_ms >= next_ms:
            next_offset = min(next_offset, mark.offset)
            break
    if subject is not None and summary.subjects is not None:
        span = summary.span(subject)
        if span is None:
            return None
        first_offset = max(first_offset, span.first_offset)
        next_offset = min(next_offset, span.last_offset + 1)
    return LogRange(first_offset, next_offset) if first_offset < next_offset else None
