"""Giving up damaged ranges of the commit log, by explicit option: reported, kept, and passed over.

Damage before the durable end stops a start, because nobody but a person may say that accepted messages
are lost. `quarantine_damage` is that person's word. Every frame of the log is read; each damaged range

1. is copied to `quarantine/`, with a report of the sequences that are lost in it, both durable;
2. is covered where it stands by frames of kind LOST (`lost.py`), so that the log is whole again.

Nothing valid is cut and no sequence is given anew: the lost ones keep places that are passed over.
Between 1 and 2 the checkpoint is taken back to where a scan may begin, and the files that know the old
places, consume queues and key index, are given up to be made again. Interrupted anywhere it is begun
again by the next start with the option; one without it halts as before, or finds the log whole.

Not for: the action log, `FORMAT`, `state/retained`; their damage still stops a start.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import msgspec

from qmq_broker.clock import Clock
from qmq_broker.errors import CorruptionError
from qmq_broker.storage import layout
from qmq_broker.storage.backup_copy import is_there
from qmq_broker.storage.checkpoint import Checkpoint, CheckpointFiles
from qmq_broker.storage.disk import Disk
from qmq_broker.storage.faults import Fault, Level
from qmq_broker.storage.format_file import Format, read_format
from qmq_broker.storage.frame_scan import SCAN_BLOCK_BYTES
from qmq_broker.storage.inspect_files import SmallFiles, inspect_files
from qmq_broker.storage.inspect_log import DamagedRange
from qmq_broker.storage.lost import LostRun, lost_frames
from qmq_broker.storage.rebuild import remove_index
from qmq_broker.storage.segments import SEGMENT_HEAD_BYTES, Segments, build_segment_head
from qmq_broker.storage.small_file import read_file, replace_file, unseal
from qmq_broker.storage.summary import remove_summaries
from qmq_broker.storage.verify import judge_commit_log
from qmq_broker.storage.verify_log import LogVerdict
from qmq_client.wire.errors import ProtocolError
from qmq_client.wire.frame import (
    FRAME_HEADER_BYTES,
    read_header,
    stamp_frame,
)

_SUFFIX: Final = ".json"


class QuarantineReport(msgspec.Struct, frozen=True, kw_only=True):
    """Content of a report: one range that was given up."""

    store_id: str
    at_ms: int
    first_offset: int
    next_offset: int
    reason: str
    lost: tuple[LostRun, ...]


def quarantine_damage(disk: Disk, clock: Clock) -> list[QuarantineReport]:
    """Give up what is damaged in the commit log; durable on return. Empty when nothing is.

    Reads all of the log. Raises `LockedError`, and `CorruptionError` with nothing changed when what is
    damaged cannot be given up.
    """
    lock = disk.lock(layout.LOCK, f"pid {os.getpid()} (quarantine)")
    try:
        format_ = read_format(disk)
        if format_ is None:
            return []  # a new directory, or one that the opening refuses
        files = inspect_files(disk, format_, len)
        _refuse([fault for fault in files.faults if fault.level is Level.DAMAGED])
        verdict = judge_commit_log(disk, format_, files)
        _refuse(verdict.unexplained)
        if not verdict.damaged:
            return []
        return _Quarantine(disk, clock, format_, files, verdict).run()
    finally:
        lock.release()


def read_reports(disk: Disk) -> list[QuarantineReport]:
    """All ranges that were given up, in order; a report that is not whole is passed over."""
    reports = []
    for name in disk.names(layout.QUARANTINE):
        data = read_file(disk, f"{layout.QUARANTINE}/{name}") if name.endswith(_SUFFIX) else None
        content = None if data is None else unseal(data)
        if content is not None:
            reports.append(msgspec.json.decode(content, type=QuarantineReport))
    return reports


class _Quarantine:
    """One run over a log that has holes."""

    def __init__(
        self, disk: Disk, clock: Clock, format_: Format, files: SmallFiles, verdict: LogVerdict
    ) -> None:
        self._disk = disk
        self._clock = clock
        self._format = format_
        self._files = files
        self._verdict = verdict
        self._segments = Segments(disk, layout.COMMIT_LOG, format_.segment_bytes)

    def run(self) -> list[QuarantineReport]:
        try:
            holes = self._verdict.damaged
            lost = self._lost(holes)
            stamps = self._stamps(holes)
            # Made before anything is written, so that what cannot be done changes nothing.
            frames = [self._frames(hole, lost[hole]) for hole in holes]
            reports = self._report(holes, lost)
            self._take_back_checkpoint(holes)
            self._give_up_derived()
            for hole, made, stamp in zip(holes, frames, stamps, strict=True):
                self._cover(hole, made, *stamp)
            return reports
        finally:
            self._segments.close()

    def _lost(self, holes: Sequence[DamagedRange]) -> dict[DamagedRange, list[LostRun]]:
        """What is lost in each hole; what may be in several stands with the longest."""
        lost: dict[DamagedRange, list[LostRun]] = {hole: [] for hole in holes}
        for one in self._verdict.lost:
            within = [h for h in holes if one.after_offset < h.first_offset < one.before_offset]
            _add(lost, within, LostRun(one.subject, one.first, one.next - one.first))
        for subject, next_sequence in self._known_next().items():
            found = self._verdict.next_sequences.get(subject, 0)
            after_offset = self._verdict.last_offsets.get(subject, -1)
            behind = [hole for hole in holes if hole.first_offset > after_offset]
            if next_sequence > found and behind:
                _add(lost, behind, LostRun(subject, found, next_sequence - found))
        return lost

    def _known_next(self) -> dict[str, int]:
        """Behind the last sequence of each subject, by the queues and by runs that were interrupted."""
        table = self._files.table
        known = {state.subject: state.next_sequence for state in (table.queues if table else ())}
        for report in read_reports(self._disk):
            for run in report.lost if report.store_id == self._format.store_id.hex() else ():
                next_sequence = run.first_sequence + run.count
                known[run.subject] = max(known.get(run.subject, 0), next_sequence)
        return known

    def _stamps(self, holes: Sequence[DamagedRange]) -> list[tuple[int, int]]:
        """Epoch and time for each hole: those of the frame behind it, so that neither goes back."""
        last = self._files.checkpoint
        epoch = max(self._verdict.epoch, last.epoch if last else 0)
        stored_at_ms = last.commit_log.last_stored_at_ms if last else self._clock.now_ms()
        stamps: list[tuple[int, int]] = []
        first_offsets = {hole.first_offset for hole in holes}
        for hole in reversed(holes):
            is_good = hole.next_offset not in first_offsets
            if is_good and hole.next_offset < self._verdict.next_offset:
                header = read_header(self._segments.read(hole.next_offset, FRAME_HEADER_BYTES))
                epoch, stored_at_ms = header.epoch, header.stored_at_ms
            stamps.append((epoch, stored_at_ms))
        return stamps[::-1]

    def _frames(self, hole: DamagedRange, lost: list[LostRun]) -> list[bytes]:
        """What will stand in the hole, behind the head when it begins a segment."""
        is_first = hole.first_offset == self._segments.base_of(hole.first_offset)
        head_bytes = SEGMENT_HEAD_BYTES if is_first else 0
        range_bytes = hole.next_offset - hole.first_offset - head_bytes
        try:
            if not range_bytes and not lost:
                return []
            return lost_frames(range_bytes, lost)
        except (ValueError, ProtocolError) as error:
            raise CorruptionError(
                segment=self._segments.path(hole.first_offset),
                offset=hole.first_offset,
                reason=f"{hole.reason}; it cannot be given up: {error}",
            ) from error

    def _report(
        self, holes: Sequence[DamagedRange], lost: dict[DamagedRange, list[LostRun]]
    ) -> list[QuarantineReport]:
        self._disk.make_directory(layout.QUARANTINE)
        self._disk.sync_directory(layout.ROOT)
        reports = []
        for hole in holes:
            report = QuarantineReport(
                store_id=self._format.store_id.hex(),
                at_ms=self._clock.now_ms(),
                first_offset=hole.first_offset,
                next_offset=hole.next_offset,
                reason=hole.reason,
                lost=tuple(lost[hole]),
            )
            path = layout.quarantine_path(hole.first_offset, hole.next_offset, "json")
            if not is_there(self._disk, path):
                # Written once: a run that was interrupted may have covered a part of the range.
                self._keep(hole)
                replace_file(self._disk, path, msgspec.json.encode(report))
            reports.append(report)
        return reports

    def _keep(self, hole: DamagedRange) -> None:
        path = layout.quarantine_path(hole.first_offset, hole.next_offset, "raw")
        file = self._disk.open(path, is_new=True)
        try:
            file.truncate(0)
            for offset in range(hole.first_offset, hole.next_offset, SCAN_BLOCK_BYTES):
                count = min(SCAN_BLOCK_BYTES, hole.next_offset - offset)
                file.write(offset - hole.first_offset, [self._segments.read(offset, count)])
            file.sync()
        finally:
            file.close()

    def _take_back_checkpoint(self, holes: Sequence[DamagedRange]) -> None:
        """Let the next scan begin at a frame that will be good."""
        last = self._files.checkpoint
        if last is None:
            return
        point = last.commit_log
        hole = next(
            (h for h in holes if h.first_offset <= point.last_frame_offset < h.next_offset), None
        )
        if hole is None:
            return
        # The window of ids cannot begin in the hole either; its ids are made again from behind it.
        base = self._segments.base_of(hole.first_offset)
        files = CheckpointFiles(self._disk)
        try:
            files.prepare()
            files.write(last)  # a killed process may have left it unsynced
            for generation in (last.generation + 1, last.generation + 2):
                files.write(self._taken_back(last, base, generation))
        finally:
            files.close()

    def _taken_back(self, last: Checkpoint, base: int, generation: int) -> Checkpoint:
        point = replace(last.commit_log, last_frame_offset=base)
        return replace(last, generation=generation, commit_log=point)

    def _give_up_derived(self) -> None:
        if is_there(self._disk, layout.QUEUE_TABLE):
            self._disk.unlink(layout.QUEUE_TABLE)
            self._disk.sync_directory(layout.STATE)
        remove_index(self._disk)
        remove_summaries(self._disk)

    def _cover(
        self, hole: DamagedRange, frames: list[bytes], epoch: int, stored_at_ms: int
    ) -> None:
        segments = self._segments
        base = segments.base_of(hole.first_offset)
        offset = hole.first_offset
        head = b""
        if offset == base:
            # Whether old frames stand behind is not known any more: then they are looked out for.
            head = build_segment_head(self._format.store_id, base, stored_at_ms, is_recycled=True)
            head = _stamped(head, base, epoch, stored_at_ms)
            if not segments.has(base):
                segments.make(base, len(head), head)
        file = segments.file(base)
        if head:
            file.write(0, [head])
            offset += len(head)
        for frame in frames:
            file.write(offset - base, [_stamped(frame, offset, epoch, stored_at_ms)])
            offset += len(frame)
        file.sync()


def _add(
    lost: dict[DamagedRange, list[LostRun]], holes: Sequence[DamagedRange], run: LostRun
) -> None:
    lost[max(holes, key=lambda hole: hole.next_offset - hole.first_offset)].append(run)


def _stamped(frame: bytes, offset: int, epoch: int, stored_at_ms: int) -> bytes:
    head = stamp_frame(
        frame,
        physical_offset=offset,
        stored_at_ms=stored_at_ms,
        epoch=epoch,
        durable_offset=0,
    )
    return head + frame[len(head) :]


def _refuse(faults: Sequence[Fault]) -> None:
    if faults:
        fault = faults[0]
        raise CorruptionError(
            segment=fault.file, offset=fault.offset or 0, reason=f"{fault.what}; not a hole"
        )
