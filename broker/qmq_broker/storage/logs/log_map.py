"""The parts of a commit log that must be read for a subject or a time, found from the files alone.

For readers next to the broker and for backups: takes no lock, asks no writer, changes nothing; a
disk that is `is_read_only` is enough. Sealed segments are judged by their summaries if there are
any, otherwise by the times in their heads. Whatever is not known is included, so that nothing is
missed. The part after the last checkpoint is always included: it grows, and the reader stops at
the first frame that is not whole.
"""

from __future__ import annotations

from dataclasses import dataclass

from qmq_broker.errors import StoreError
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.checkpoint import CheckpointFiles
from qmq_broker.storage.files.disk_port import Disk
from qmq_broker.storage.files.format_file import Format, read_format
from qmq_broker.storage.files.retained import read_retained
from qmq_broker.storage.logs.frame_seek import LogRange
from qmq_broker.storage.logs.segments import SEGMENT_HEAD_BYTES, Segments
from qmq_broker.storage.logs.summary import SegmentSummary, read_summary

#: Later than any message.
_END_MS = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentPart:
    """A part of one segment that may hold what is wanted; frames begin at `first_offset`."""

    path: str
    #: Where the segment begins in the log: the position of a byte in the file is its offset minus
    #: this.
    base: int
    first_offset: int
    #: The last frame of interest begins before this offset.
    next_offset: int
    #: Whether the whole segment is durable and never changes again.
    is_sealed: bool
    #: None if there is none: then only times are known.
    summary: SegmentSummary | None


class LogMap:
    """One look at a data directory, or a backup. Close it."""

    def __init__(self, disk: Disk) -> None:
        """Raises `StoreError` if this is no data directory, `CorruptionError` for a damaged one."""
        format_ = read_format(disk)
        if format_ is None:
            raise StoreError("this is not a data directory: FORMAT is missing")
        self._disk = disk
        self._format: Format = format_
        self._first_offset = read_retained(disk, format_.store_id).first_offset
        checkpoint = CheckpointFiles(disk, format_.store_id).read()
        #: Everything below this was synced when the last checkpoint was written.
        self.durable_offset = checkpoint.commit_log.durable_offset if checkpoint else 0
        self._segments = Segments(disk, layout.COMMIT_LOG, format_.segment_bytes)

    def close(self) -> None:
        """Close all files. Safe to call twice."""
        self._segments.close()

    def parts(
        self, *, subject: str | None = None, first_ms: int = 0, next_ms: int = _END_MS
    ) -> list[SegmentPart]:
        """What must be read for messages of `subject` stored from `first_ms` until before
        `next_ms`.

        In the order of the log. Nothing outside of it holds such a message.
        """
        bases = [base for base in self._segments.bases if base >= self._first_offset]
        found: list[SegmentPart] = []
        for base, following in zip(bases, [*bases[1:], None], strict=True):
            # A segment got its last message when the next one was begun; 0 means unknown.
            ended_at_ms = 0 if following is None else self._segments.made_at_ms(following)
            is_over = 0 < ended_at_ms < first_ms
            if is_over or self._segments.made_at_ms(base) >= next_ms:
                continue
            part = self._part(base, subject, first_ms, next_ms)
            if part is not None:
                found.append(part)
        return found

    def _part(
        self, base: int, subject: str | None, first_ms: int, next_ms: int
    ) -> SegmentPart | None:
        next_base = base + self._format.segment_bytes
        is_sealed = next_base <= self.durable_offset
        summary = None
        within = LogRange(base + SEGMENT_HEAD_BYTES, next_base)
        if is_sealed:
            summary = read_summary(self._disk, self._segments, base, self._format.store_id)
        if summary is not None:
            narrowed = narrow(summary, within, subject, first_ms, next_ms)
            if narrowed is None:
                return None
            within = narrowed
        return SegmentPart(
            path=self._segments.path(base),
            base=base,
            first_offset=within.first_offset,
            next_offset=within.next_offset,
            is_sealed=is_sealed,
            summary=summary,
        )


def narrow(
    summary: SegmentSummary,
    within: LogRange,
    subject: str | None,
    first_ms: int = 0,
    next_ms: int = _END_MS,
) -> LogRange | None:
    """The part of `within`, itself a part of this segment, that may hold a message; None if nothing
    may.

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
