"""Quarantine: damaged ranges of both logs are reported, copied, and skipped from then on, by explicit option.

Damage before the durable end stops a start, because only an operator may decide to lose accepted
messages. `quarantine_damage` carries out that decision. Every frame is read; each damaged range of
the commit log

1. is copied to `quarantine/`, with a report of the sequences lost in it, both durable;
2. is covered in place by frames of kind LOST (`lost.py`), so that the log is valid again.

Nothing valid is cut, and no sequence is reused: lost sequences keep their places and are skipped.
Between 1 and 2 the checkpoint is moved back to a frame where a scan may begin, and the files with
the old places (consume queues, key index, summaries) are removed, to be rebuilt. If this is
interrupted, the next start with the option begins again; a start without it stops as before, or
finds the logs valid.

`quarantine_schedule.py` does the same for the files of delayed messages. Not for: `FORMAT`, which
never changes and is in every backup, and `state/retained`; damage to those still stops a start.

In the action log the groups return to their state before the damage. Their state is a snapshot plus the actions
after it, and no action can be applied without those before it: an ack after a lost delivery would
skip messages that were never delivered. So the log from the first damaged byte on is discarded,
including good frames after it. The groups return to their state at that point, and messages settled
since are delivered again. No message is lost.

A group created in the discarded part is forgotten: the next pull creates it again. If both
snapshots are damaged and the log does not reach back to its beginning, all groups are forgotten.

Damage below the snapshot is covered and changes nothing: the groups are known without it. But the
older snapshot must not be continued with the covered range, so the newest one is first written over
it. If the damage reaches from below the snapshot to above it, a frame must begin at the snapshot,
because a start reads from there.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from qmq_broker.errors import CorruptionError
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.checkpoint import Checkpoint, CheckpointFiles
from qmq_broker.storage.files.disk_port import Disk
from qmq_broker.storage.files.faults import Fault, Level
from qmq_broker.storage.files.format_file import Format, read_format
from qmq_broker.storage.files.journal import remove_journal
from qmq_broker.storage.files.sharing import refuse_shared
from qmq_broker.storage.files.snapshots import CheckGroups, GroupsContent, SnapshotFiles
from qmq_broker.storage.logs.lost import LostRun
from qmq_broker.storage.logs.summary import remove_summaries
from qmq_broker.storage.queues.queue_table import remove_queue_tables
from qmq_broker.storage.upkeep.inspect_files import SmallFiles, inspect_files
from qmq_broker.storage.upkeep.inspect_log import DamagedRange
from qmq_broker.storage.upkeep.quarantine_report import (
    LogQuarantine,
    QuarantineReport,
    by_segment,
    lost_delayed,
    read_reports,
    touches_delayed,
)
from qmq_broker.storage.upkeep.quarantine_schedule import ScheduleQuarantine
from qmq_broker.storage.upkeep.rebuild import remove_index
from qmq_broker.storage.upkeep.verify import judge_action_log, judge_commit_log
from qmq_broker.storage.upkeep.verify_journals import inspect_journals, known_next
from qmq_broker.storage.upkeep.verify_log import LogVerdict
from qmq_client.clock import Clock


def quarantine_damage(
    disk: Disk, clock: Clock, *, check_groups: CheckGroups = len
) -> list[QuarantineReport]:
    """Discard the damaged ranges of both logs; durable on return. Returns no reports if there are none.

    Reads both logs completely. Raises, with nothing changed, `LockedError`, `SharedFilesError`,
    `CorruptionError` if the damage cannot be discarded, and `UnknownFormatError`.
    """
    lock = disk.lock(layout.LOCK, f"pid {os.getpid()} (quarantine)")
    try:
        refuse_shared(disk)
        format_ = read_format(disk)
        if format_ is None:
            return []  # a new directory, or one that the start will refuse
        files = inspect_files(disk, format_, check_groups)
        _refuse([fault for fault in files.faults if fault.level is Level.DAMAGED])
        verdict = judge_commit_log(disk, format_, files)
        actions = judge_action_log(disk, format_, files)
        _refuse([*verdict.unexplained, *actions.unexplained])
        with ExitStack() as stack:
            messages = _Quarantine(disk, clock, format_, files, verdict)
            stack.callback(messages.close)
            messages.prepare()
            of_actions = ActionQuarantine(disk, clock, format_, files, actions)
            stack.callback(of_actions.close)
            delayed = ScheduleQuarantine(
                disk,
                clock,
                format_,
                first_offset=files.retained.first_offset,
                next_offset=verdict.next_offset,
            )
            stack.callback(delayed.close)
            delayed.prepare(messages.holes_of_delayed())
            reports = delayed.run()
            reports += messages.run() if verdict.damaged else []
            return reports + (of_actions.run() if actions.damaged else [])
    finally:
        lock.release()


class _Quarantine(LogQuarantine):
    """One run over a log with damaged ranges (holes)."""

    def __init__(
        self, disk: Disk, clock: Clock, format_: Format, files: SmallFiles, verdict: LogVerdict
    ) -> None:
        super().__init__(disk, clock, format_, files, layout.COMMIT_LOG)
        self._verdict = verdict
        self._lost_runs: dict[DamagedRange, list[LostRun]] = {}
        self._frames: list[list[bytes]] = []

    def prepare(self) -> None:
        """Prepare the frames that fill the holes, so that an impossible request changes nothing."""
        holes = self._verdict.damaged
        self._lost_runs = self._lost(holes)
        self._frames = [self._cover.frames(hole, self._lost_runs[hole]) for hole in holes]

    def holes_of_delayed(self) -> list[DamagedRange]:
        """The holes that may concern delayed messages, including earlier quarantined ranges."""
        earlier = [
            DamagedRange(report.first_offset, report.next_offset, report.reason)
            for report in read_reports(self._disk)
            if report.log == layout.COMMIT_LOG and report.touches_delayed
        ]
        now = [hole for hole in self._verdict.damaged if touches_delayed(self._segments, hole)]
        return earlier + now

    def run(self) -> list[QuarantineReport]:
        """Report, copy and cover the ranges; durable on return. Requires: `prepare`."""
        holes = self._verdict.damaged
        stamps = self._stamps(holes, self._verdict)
        copied_offset = self._files.copied_offset
        reports = [
            self._report(
                hole,
                [hole],
                self._lost_runs[hole],
                lost_delayed(self._segments, hole, copied_offset),
                touches_delayed=touches_delayed(self._segments, hole),
            )
            for hole in holes
        ]
        self._take_back_checkpoint(holes)
        self._give_up_derived()
        for hole, frames, (epoch, stored_at_ms) in zip(holes, self._frames, stamps, strict=True):
            self._cover.cover(hole, frames, epoch=epoch, stored_at_ms=stored_at_ms)
        return reports

    def _lost(self, holes: Sequence[DamagedRange]) -> dict[DamagedRange, list[LostRun]]:
        """The sequences lost in each hole; if they may be in several holes, the longest one gets them."""
        lost: dict[DamagedRange, list[LostRun]] = {hole: [] for hole in holes}
        for one in self._verdict.lost:
            within = [h for h in holes if one.after_offset < h.first_offset < one.before_offset]
            _add(lost, within, LostRun(one.subject, one.first, one.next - one.first))
        for subject, next_sequence in self._known_next().items():
            found = self._verdict.next_sequences.get(subject, 0)
            after_offset = self._verdict.last_offsets.get(subject, -1)
            later = [hole for hole in holes if hole.first_offset > after_offset]
            if next_sequence > found and later:
                _add(lost, later, LostRun(subject, found, next_sequence - found))
        return lost

    def _known_next(self) -> dict[str, int]:
        """The end of each subject's sequences, according to the queues and to interrupted runs."""
        journals = inspect_journals(self._disk, self._format.store_id, self._files)
        known = known_next(self._files, journals)
        for report in read_reports(self._disk):
            for run in report.lost if report.store_id == self._format.store_id.hex() else ():
                next_sequence = run.first_sequence + run.count
                known[run.subject] = max(known.get(run.subject, 0), next_sequence)
        return known

    def _take_back_checkpoint(self, holes: Sequence[DamagedRange]) -> None:
        """Move the checkpoint so that the next scan begins at a frame that will be good."""
        last = self._files.checkpoint
        if last is None:
            return
        point = last.commit_log
        hole = next(
            (h for h in holes if h.first_offset <= point.last_frame_offset < h.next_offset), None
        )
        if hole is None:
            return
        # The dedupe window cannot begin in the hole either: ids after it are derived again.
        base = self._segments.base_of(hole.first_offset)
        files = CheckpointFiles(self._disk, self._format.store_id)
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
        # The schedule's table stays: its files are complete even if the log is damaged.
        remove_queue_tables(self._disk)
        remove_index(self._disk)
        remove_summaries(self._disk)
        for journal in (layout.IDS, layout.ENTRIES):  # so that lost messages may be sent again
            remove_journal(self._disk, journal)


def _add(
    lost: dict[DamagedRange, list[LostRun]], holes: Sequence[DamagedRange], run: LostRun
) -> None:
    lost[max(holes, key=lambda hole: hole.next_offset - hole.first_offset)].append(run)


def _refuse(faults: Sequence[Fault]) -> None:
    if faults:
        fault = faults[0]
        raise CorruptionError(
            segment=fault.file,
            offset=fault.offset or 0,
            reason=f"{fault.what}; --quarantine does not help: it only discards ranges of logs",
        )


class ActionQuarantine(LogQuarantine):
    """One run over an action log with holes. Must be closed."""

    def __init__(
        self, disk: Disk, clock: Clock, format_: Format, files: SmallFiles, verdict: LogVerdict
    ) -> None:
        """Decides; changes nothing."""
        super().__init__(disk, clock, format_, files, layout.ACTION_LOG)
        snapshot_offset = files.action_first_offset
        self._end = verdict.next_offset
        self._snapshots = SnapshotFiles(disk, format_.store_id)
        below = [hole for hole in verdict.damaged if hole.next_offset <= snapshot_offset]
        #: Whether the older snapshot would be continued with a covered range.
        self._is_older_unfit = any(
            hole.next_offset > self._snapshots.first_offset for hole in below
        )
        #: The whole discarded range, including good frames after the damage.
        self._ranges = below.copy()
        later = [hole for hole in verdict.damaged if hole.next_offset > snapshot_offset]
        #: Neither a snapshot nor the log has the beginning of the groups.
        self._is_unknown = bool(later) and not snapshot_offset and self._begins_later()
        if later:
            first = later[0].first_offset
            if self._is_unknown:
                first = self._segments.base_of(self._end)
            self._ranges.append(DamagedRange(first, self._end, later[0].reason))
        self._parts = [
            (part, self._cover.frames(part, []))
            for whole in self._ranges
            for piece in _cut_at(snapshot_offset, whole)
            for part in by_segment(self._segments, piece.first_offset, piece.next_offset)
        ]
        self._stamped = self._stamps([part for part, _ in self._parts], verdict)

    def run(self) -> list[QuarantineReport]:
        """Report, keep, cover; durable on return."""
        reports = [self._report_of(whole) for whole in self._ranges]
        newest = self._snapshots.newest
        if self._is_older_unfit and newest is not None:
            groups = newest.content or GroupsContent(b"")
            self._snapshots.write(newest.snapshot.offset, groups)  # over the older one
        # The damage last: until then the log stops any start, so none continues after it.
        for (part, frames), stamp in reversed([*zip(self._parts, self._stamped, strict=True)]):
            epoch, stored_at_ms = stamp
            self._cover.cover(part, frames, epoch=epoch, stored_at_ms=stored_at_ms)
        if self._is_unknown:
            for _ in layout.SNAPSHOTS:
                self._snapshots.write(self._end, GroupsContent(b""))
        return reports

    def _begins_later(self) -> bool:
        return not self._segments.has(0)

    def _report_of(self, whole: DamagedRange) -> QuarantineReport:
        parts = [
            part
            for part, _ in self._parts
            if whole.first_offset <= part.first_offset < whole.next_offset
        ]
        return self._report(whole, parts, [])


def _cut_at(offset: int, whole: DamagedRange) -> list[DamagedRange]:
    """Split a range at this offset if that is inside it."""
    if not whole.first_offset < offset < whole.next_offset:
        return [whole]
    return [whole._replace(next_offset=offset), whole._replace(first_offset=offset)]
