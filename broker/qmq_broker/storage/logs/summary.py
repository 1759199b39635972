"""The content of one sealed segment of the commit log: times, subjects, and some of its frames by
time.

::

    summary/<20 digits>    MessagePack of SegmentSummary and a checksum line

Readers use it to skip whole segments, and to seek by time inside one without a binary search. The
background thread (`summaries.py`) derives it when a segment is sealed, and again if the file is
missing or damaged. It identifies the head of its segment, so that the summary of another segment in
the same place is not used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from qmq_broker.storage.files import layout
from qmq_broker.storage.files.disk_port import Disk
from qmq_broker.storage.files.small_file import read_file, replace_file, unseal
from qmq_broker.storage.logs.frame_scan import ScannedFrame
from qmq_broker.storage.logs.kinds import COMMIT_KINDS, LOG_LIMITS, QUEUED_KINDS
from qmq_broker.storage.logs.lost import lost_runs
from qmq_broker.storage.logs.segments import Segments
from qmq_client.wire.frame import FrameKind, MessageFrame, parse_message_frame
from qmq_client.wire.frame_head import MESSAGE_KINDS

#: Kinds of commit log frames with messages; sequences in delayed ones have no meaning.
_MESSAGE_KINDS: Final = COMMIT_KINDS & MESSAGE_KINDS
#: Time marks are at least this far apart.
MARK_BYTES: Final = 4 * 1024 * 1024
#: In a segment with more subjects, only their number is kept: the file must stay small.
SUBJECTS_MAX: Final = 100_000
#: Both checksums of a segment's head, which cover store, place, time and epoch.
_IDENTITY: Final = slice(16, 24)


class SubjectSpan(msgspec.Struct, frozen=True, array_like=True):
    """The messages of one subject in a segment."""

    subject: str
    #: Their number, including delayed messages, without lost ones.
    messages: int
    #: Their sequences, half open, including lost ones; both 0 if all are delayed.
    first_sequence: int
    next_sequence: int
    #: The first and the last frame with messages of the subject.
    first_offset: int
    last_offset: int


class TimeMark(msgspec.Struct, frozen=True, array_like=True):
    """The offset of a frame, and when the frame was stored."""

    offset: int
    stored_at_ms: int


class SegmentSummary(msgspec.Struct, frozen=True, array_like=True):
    """The summary of one sealed segment."""

    store_id: bytes
    #: Offsets at which it and the next one begin.
    base: int
    next_offset: int
    #: Bytes 16 to 23 of the segment.
    identity: bytes
    #: When its first and last messages were stored; 0 if there are none.
    first_stored_at_ms: int
    last_stored_at_ms: int
    frames: int
    messages: int
    #: In order: the first message frame, and the first one after each `MARK_BYTES`.
    marks: tuple[TimeMark, ...]
    subject_count: int
    #: In the order of their names; None for more than `SUBJECTS_MAX`.
    subjects: tuple[SubjectSpan, ...] | None

    def span(self, subject: str) -> SubjectSpan | None:
        """The span of a subject; None if the segment has none. Requires: `subjects` is known."""
        return next((one for one in self.subjects or () if one.subject == subject), None)


#: Returns the summary of the segment that begins at an offset, None if there is none.
SummaryOf = Callable[[int], SegmentSummary | None]


def no_summary(base: int) -> SegmentSummary | None:
    """A `SummaryOf` that has no summary of any segment."""
    return None


class Summarizer:
    """Makes the summary of one segment from its frames, given in order."""

    def __init__(self, store_id: bytes, base: int, segment_bytes: int) -> None:
        self._store_id = store_id
        self._base = base
        self._next_offset = base + segment_bytes
        self._identity = b""
        self._times = (0, 0)
        self._frames = self._messages = 0
        self._marks: list[TimeMark] = []
        self._spans: dict[str, SubjectSpan] = {}

    def add(self, frame: ScannedFrame) -> None:
        """Add the next good frame; raises `ProtocolError` if it cannot be parsed."""
        header = frame.header
        if header.kind is FrameKind.SEGMENT_HEAD:
            self._identity = frame.data[_IDENTITY]
        elif header.kind is FrameKind.LOST:
            for lost in lost_runs(frame):
                self._note(lost.subject, 0, lost.first_sequence, lost.count, frame.offset)
        elif header.kind in _MESSAGE_KINDS:
            self.add_messages(parse_message_frame(frame.data, LOG_LIMITS, is_verified=True))

    def add_messages(self, frame: MessageFrame) -> None:
        """Add the next message frame, as `add` does."""
        header = frame.header
        offset, stored_at_ms = header.physical_offset, header.stored_at_ms
        self._frames += 1
        self._messages += header.record_count
        self._times = (self._times[0] or stored_at_ms, stored_at_ms)
        if not self._marks or offset - self._marks[-1].offset >= MARK_BYTES:
            self._marks.append(TimeMark(offset, stored_at_ms))
        for run in frame.runs:
            count = run.count if header.kind in QUEUED_KINDS else 0
            self._note(run.subject, run.count, run.first_sequence, count, offset)

    def finish(self) -> SegmentSummary:
        """The finished summary."""
        spans = [self._spans[subject] for subject in sorted(self._spans)]
        first_stored_at_ms, last_stored_at_ms = self._times
        return SegmentSummary(
            store_id=self._store_id,
            base=self._base,
            next_offset=self._next_offset,
            identity=self._identity,
            first_stored_at_ms=first_stored_at_ms,
            last_stored_at_ms=last_stored_at_ms,
            frames=self._frames,
            messages=self._messages,
            marks=tuple(self._marks),
            subject_count=len(spans),
            subjects=tuple(spans) if len(spans) <= SUBJECTS_MAX else None,
        )

    def _note(self, subject: str, messages: int, first: int, count: int, offset: int) -> None:
        """Count messages, and `count` sequences from `first` on, in the frame at `offset`."""
        known = self._spans.get(subject)
        next_ = first + count
        if known is None:
            first = first if count else 0
            next_ = next_ if count else 0
            self._spans[subject] = SubjectSpan(subject, messages, first, next_, offset, offset)
            return
        self._spans[subject] = SubjectSpan(
            subject,
            known.messages + messages,
            first if count and not known.next_sequence else known.first_sequence,
            next_ if count else known.next_sequence,
            known.first_offset,
            offset,
        )


def read_summary(
    disk: Disk, segments: Segments, base: int, store_id: bytes
) -> SegmentSummary | None:
    """The summary of the segment at `base`; None if missing, damaged or of another segment."""
    data = read_file(disk, layout.summary_path(base))
    content = None if data is None else unseal(data)
    if content is None:
        return None
    try:
        found = msgspec.msgpack.decode(content, type=SegmentSummary)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    next_offset = base + segments.segment_bytes
    is_ours = (found.store_id, found.base, found.next_offset) == (store_id, base, next_offset)
    is_of_this = found.identity == segments.read(base, _IDENTITY.stop)[_IDENTITY]
    return found if is_ours and is_of_this else None


def write_summary(disk: Disk, summary: SegmentSummary) -> None:
    """Write a summary to its file; durable on return."""
    replace_file(disk, layout.summary_path(summary.base), msgspec.msgpack.encode(summary))


def remove_summaries(disk: Disk) -> int:
    """Remove all summaries; returns how many. They are rebuilt in the background."""
    names = [name for name in disk.names(layout.SUMMARIES) if layout.parse_number(name) is not None]
    for name in names:
        disk.unlink(f"{layout.SUMMARIES}/{name}")
    if names:
        disk.sync_directory(layout.SUMMARIES)
    return len(names)
