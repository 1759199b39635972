"""The part of a verification that runs segment by segment, possibly in several processes.

Verifies both checksums of every frame of one segment and, on request, that of each record, and
compares the resulting entries with the files of the consume queues. Tasks and outcomes can be sent
to another process: CRC-32C in C does not let other threads run, so processes share the work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import msgspec

from qmq_broker.errors import CorruptionError, UnknownFormatError
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.disk_port import Disk
from qmq_broker.storage.files.faults import Fault, damaged, rebuilt
from qmq_broker.storage.files.format_file import Format
from qmq_broker.storage.logs.action_log import ACTION_KINDS
from qmq_broker.storage.logs.actions import decode_actions
from qmq_broker.storage.logs.frame_scan import ScannedFrame
from qmq_broker.storage.logs.kinds import COMMIT_KINDS, LOG_LIMITS, QUEUED_KINDS
from qmq_broker.storage.logs.lost import lost_entries, lost_runs
from qmq_broker.storage.logs.segments import Segments
from qmq_broker.storage.logs.summary import Summarizer, read_summary
from qmq_broker.storage.queues.packing import pack_entries
from qmq_broker.storage.queues.queue_files import ENTRY_BYTES, QueueFiles
from qmq_broker.storage.schedule.cancelled import read_cancelled, read_withdrawn
from qmq_broker.storage.upkeep.inspect_log import SegmentSurvey, survey_segment
from qmq_client.wire.errors import ProtocolError
from qmq_client.wire.frame import FRAME_HEADER_BYTES, FrameKind, MessageFrame, parse_message_frame
from qmq_client.wire.record import FLAGS_POSITION, KNOWN_FLAGS, verify_record
from qmq_client.wire.requests import sized_part

#: Entries of one subject collected before they are compared with its files.
_GATHERED_BYTES: Final = 256 * 1024
_OPEN_FILES: Final = 64
#: Faults of one kind in one segment that are reported individually.
FAULTS_MAX: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentTask:
    """The segment to check, and the known extent of the queues."""

    format: Format
    log: str
    base: int
    #: Subject → its first existing sequence, and the end of the entries in its files.
    queues: dict[str, tuple[int, int]]
    #: Whether each record's own checksum is verified too.
    is_deep: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentOutcome:
    """The results for one segment."""

    survey: SegmentSurvey
    faults: list[Fault] = field(default_factory=list)


def verify_segment(disk: Disk, task: SegmentTask) -> SegmentOutcome:
    """Check one segment. Changes nothing."""
    is_commit = task.log == layout.COMMIT_LOG
    segment_bytes = task.format.segment_bytes if is_commit else task.format.action_segment_bytes
    segments = Segments(disk, task.log, segment_bytes, only=task.base)
    outcome = SegmentOutcome(survey=SegmentSurvey(base=task.base))
    check = _Messages(disk, task, outcome) if is_commit else None
    try:
        survey_segment(
            segments,
            task.base,
            COMMIT_KINDS if is_commit else ACTION_KINDS,
            store_id=task.format.store_id,
            visit=check.visit if check else _visit_actions,
            survey=outcome.survey,
        )
        if check:
            check.finish(segments)
    finally:
        segments.close()
        if check:
            check.close()
    return outcome


def log_frame(scanned: ScannedFrame) -> MessageFrame:
    """A message frame that a scan has verified, as values; raises `ProtocolError`."""
    return parse_message_frame(scanned.data, LOG_LIMITS, is_verified=True)


def check_flags(record: bytes) -> None:
    """Raise `UnknownFormatError` for a record that only a later version can read."""
    flags = record[FLAGS_POSITION]
    if flags not in KNOWN_FLAGS:
        raise UnknownFormatError(
            setting="a record", found=f"one with flags {flags:#04x}", known="flags of version 1"
        )


def _visit_actions(frame: ScannedFrame) -> None:
    if frame.header.kind is FrameKind.ACTIONS:
        decode_actions(sized_part(frame.data, FRAME_HEADER_BYTES))


class _Messages:
    """Sequences, entries and records of the message frames of one segment."""

    def __init__(self, disk: Disk, task: SegmentTask, outcome: SegmentOutcome) -> None:
        self._disk = disk
        self._task = task
        self._summarizer = Summarizer(task.format.store_id, task.base, task.format.segment_bytes)
        self._outcome = outcome
        self._files = QueueFiles(
            disk, entries_per_file=task.format.queue_entries_per_file, open_files=_OPEN_FILES
        )
        #: Subject → first sequence and packed entries that are not compared yet.
        self._gathered: dict[str, tuple[int, bytearray]] = {}
        self._bad_subjects: set[str] = set()

    def visit(self, scanned: ScannedFrame) -> None:
        if scanned.header.kind is FrameKind.LOST:
            self._summarizer.add(scanned)
            for lost in lost_runs(scanned):
                self._outcome.survey.add_run(
                    lost.subject, lost.first_sequence, lost.count, scanned.offset
                )
                self._outcome.survey.lost += lost.count
                packed = lost_entries(scanned.offset, lost.count)
                self._gather(lost.subject, lost.first_sequence, packed)
            return
        if scanned.header.kind is FrameKind.CANCELLED:
            read_cancelled(scanned.data)
            read_withdrawn(scanned.data)
            return
        frame = log_frame(scanned)
        self._summarizer.add_messages(frame)
        if self._task.is_deep:
            self._verify_records(scanned.offset, frame)
        if scanned.header.kind not in QUEUED_KINDS:
            return
        entries = pack_entries(frame, scanned.offset) if self._task.queues else bytearray()
        position = 0
        for run in frame.runs:
            self._outcome.survey.add_run(run.subject, run.first_sequence, run.count, scanned.offset)
            if entries:
                next_position = position + run.count * ENTRY_BYTES
                self._gather(run.subject, run.first_sequence, entries[position:next_position])
                position = next_position

    def finish(self, segments: Segments) -> None:
        for subject in list(self._gathered):
            self._compare(subject)
        if not self._outcome.survey.damaged:
            self._check_summary(segments)

    def close(self) -> None:
        self._files.close()

    def _check_summary(self, segments: Segments) -> None:
        base, store_id = self._task.base, self._task.format.store_id
        path = layout.summary_path(base)
        if path.rpartition("/")[2] not in self._disk.names(layout.SUMMARIES):
            return
        found = read_summary(self._disk, segments, base, store_id)
        if found is None:
            self._report(rebuilt(path, "not a valid summary of this segment"))
        elif msgspec.structs.replace(found, identity=b"") != self._summarizer.finish():
            fault = rebuilt(path, "does not match the segment")
            remedy = "Stop the broker and run `qmq store rebuild` with `all` on this directory."
            self._report(msgspec.structs.replace(fault, remedy=remedy))

    def _verify_records(self, offset: int, frame: MessageFrame) -> None:
        for index, (subject, record) in enumerate(frame.records()):
            try:
                verify_record(subject, record)
                check_flags(record)
            except ProtocolError as error:
                self._report(
                    damaged(
                        layout.segment_path(self._task.log, self._task.base),
                        f"record {index} of this frame: {error}",
                        meaning="The frame is unaltered; its sender computed a wrong checksum.",
                        offset=offset + frame.positions[index],
                    )
                )

    def _gather(self, subject: str, first_sequence: int, entries: bytes | bytearray) -> None:
        if subject not in self._task.queues or subject in self._bad_subjects:
            return
        first, gathered = self._gathered.get(subject, (first_sequence, bytearray()))
        if first + len(gathered) // ENTRY_BYTES != first_sequence:
            self._compare(subject)
            first, gathered = first_sequence, bytearray()
        gathered += entries
        self._gathered[subject] = first, gathered
        if len(gathered) >= _GATHERED_BYTES:
            self._compare(subject)

    def _compare(self, subject: str) -> None:
        first, gathered = self._gathered.pop(subject)
        first_there, next_there = self._task.queues[subject]
        begin = max(first, first_there)
        after = min(first + len(gathered) // ENTRY_BYTES, next_there)
        if begin >= after:
            return
        expected = bytes(gathered[(begin - first) * ENTRY_BYTES : (after - first) * ENTRY_BYTES])
        try:
            found = self._files.read(subject, begin, after)
        except CorruptionError as error:
            self._report_queue(subject, rebuilt(error.segment, error.reason))
            return
        if found != expected:
            sequence = begin + _first_difference(found, expected) // ENTRY_BYTES
            file_bytes = self._task.format.queue_entries_per_file * ENTRY_BYTES
            offset = sequence * ENTRY_BYTES
            path = layout.queue_path(subject, offset - offset % file_bytes)
            what = f"the entry of sequence {sequence} of {subject} does not match the commit log"
            self._report_queue(subject, rebuilt(path, what, offset=offset))

    def _report_queue(self, subject: str, fault: Fault) -> None:
        """One fault of a queue is enough: all queues are rebuilt."""
        self._bad_subjects.add(subject)
        self._report(fault)

    def _report(self, fault: Fault) -> None:
        if len(self._outcome.faults) < FAULTS_MAX:
            self._outcome.faults.append(fault)


def _first_difference(one: bytes, other: bytes) -> int:
    for position in range(0, len(other), ENTRY_BYTES):
        next_position = position + ENTRY_BYTES
        if one[position:next_position] != other[position:next_position]:
            return position
    return len(other)


#: Runs the tasks, one after the other or in several processes.
Run = Callable[[list[SegmentTask]], list[SegmentOutcome]]
