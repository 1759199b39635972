"""Recovery: opens a data directory, also after a crash or a power cut.

::

    lock ─▶ FORMAT ─▶ checkpoint, CLEAN ─▶ examine both logs ─▶ derive queues and window
                       nothing is changed up to here; faults are refused
         ─▶ remove CLEAN ─▶ mend both logs ─▶ new epoch, durable ─▶ open for writing

A crash in between is harmless: the next start finds the same end, and at worst an epoch number is
skipped. "Derive" fills the consume queues, the dedupe window and the schedule, from where their
files and journals end, or from the beginning of the log.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from qmq_broker.errors import CorruptionError
from qmq_broker.options import StoreOptions
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.checkpoint import (
    START,
    Checkpoint,
    CheckpointFiles,
    LogPoint,
    read_witness,
)
from qmq_broker.storage.files.disk_port import Disk
from qmq_broker.storage.files.format_file import Format
from qmq_broker.storage.files.retained import Retained, read_retained
from qmq_broker.storage.files.small_file import read_file, replace_file, unseal
from qmq_broker.storage.files.snapshots import CheckGroups, SnapshotFiles
from qmq_broker.storage.ids.journal import IdJournal
from qmq_broker.storage.ids.runs import SubjectIds, is_remembered, runs_of_each, scanned_ids
from qmq_broker.storage.ids.window import DedupeWindow
from qmq_broker.storage.keepers import Keepers, LogOffsets
from qmq_broker.storage.logs.action_log import ACTION_KINDS, frame_actions
from qmq_broker.storage.logs.frame_scan import FrameScan, ScannedFrame
from qmq_broker.storage.logs.kinds import COMMIT_KINDS
from qmq_broker.storage.logs.log_recovery import LogFinding, examine, mend
from qmq_broker.storage.logs.segments import Segments
from qmq_broker.storage.queues.consume_queues import UNFLUSHED_BYTES_MAX, ConsumeQueues
from qmq_broker.storage.schedule.cancelled import read_withdrawn
from qmq_broker.storage.schedule.copy import UNCOPIED_MAX, ScheduleCopier
from qmq_broker.storage.schedule.opening import clear_strays
from qmq_broker.storage.schedule.opening import load as load_schedule
from qmq_broker.storage.schedule.schedule import Schedule
from qmq_broker.storage.staging import stage_delayed, stage_scanned
from qmq_client.clock import Clock
from qmq_client.wire.errors import ProtocolError
from qmq_client.wire.frame import FrameKind

_log = logging.getLogger(__name__)
#: A synchronized clock may be set back by this much.
AHEAD_MS_MAX: Final = 60_000
_DIRECTORIES: Final = (
    layout.COMMIT_LOG,
    layout.ACTION_LOG,
    layout.CONSUME_QUEUES,
    layout.INDEX,
    layout.SUMMARIES,
    layout.IDS,
    layout.ENTRIES,
    layout.SCHEDULE,
    layout.DISPATCH,
    layout.STATE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryReport:
    """The report about an opening of the store."""

    #: Whether the last stop was clean.
    clean: bool
    #: Frames and records of the commit log that were read to find its end.
    frames: int
    records: int
    scanned_bytes: int
    #: Bytes cut after the accepted ones, of both logs.
    torn_bytes: int
    #: Accepted bytes that were written again in place, of both logs.
    rewritten_bytes: int
    #: Whether the consume queues were rebuilt from the beginning of the log.
    is_rebuilt: bool
    duration_ms: int


class CleanStop(msgspec.Struct, frozen=True, kw_only=True):
    """Content of CLEAN: the last checkpoint that was written."""

    generation: int
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """A data directory that is ready for writing."""

    #: With the epoch of this opening.
    checkpoint: Checkpoint
    commit_segments: Segments
    commit_finding: LogFinding
    action_segments: Segments
    action_finding: LogFinding
    queues: ConsumeQueues
    window: DedupeWindow
    ids: IdJournal
    schedule: Schedule
    retained: Retained
    keepers: Keepers
    snapshots: SnapshotFiles
    report: RecoveryReport


class Recovery:
    """One opening. Requires: the lock is held and the format is right."""

    def __init__(
        self,
        disk: Disk,
        clock: Clock,
        options: StoreOptions,
        format_: Format,
        check_groups: CheckGroups = len,
    ) -> None:
        self._check_groups = check_groups
        self._disk = disk
        self._clock = clock
        self._store_id = format_.store_id
        self._spares_max = options.spare_segments
        self._retained = read_retained(disk, format_.store_id)
        self._keepers = Keepers(disk, options, format_.store_id)
        self._snapshots = SnapshotFiles(disk, format_.store_id)
        self._commit = Segments(disk, layout.COMMIT_LOG, format_.segment_bytes)
        self._actions = Segments(disk, layout.ACTION_LOG, format_.action_segment_bytes)
        self._queues = ConsumeQueues(disk, options, format_.store_id)
        self._window = DedupeWindow(ids_max=options.dedupe_ids, age_ms=options.dedupe_ms)
        self._ids = IdJournal(disk, format_.store_id, self._window)
        self._schedule = Schedule(disk, options, format_.store_id, self._commit)

    def run(self, checkpoints: CheckpointFiles) -> Recovered:
        """Examine, derive, repair, raise the epoch.

        Raises `CorruptionError` with nothing changed, except perhaps derived files, and
        `UnknownFormatError` with nothing changed.
        """
        began_s = self._clock.monotonic_s()
        last = checkpoints.read()
        clean = _is_clean(self._disk, last)
        commit, actions = self._examine(last)
        is_loaded = self._queues.load(commit.next_offset, self._retained)
        first_offset = self._retained.first_offset
        self._ids.load(max(last.window_offset if last else 0, first_offset), commit.next_offset)
        has_schedule = load_schedule(
            self._schedule, first_offset=first_offset, next_offset=commit.next_offset
        )
        copier = ScheduleCopier(self._schedule, epoch=max(last.epoch if last else 0, commit.epoch))
        self._make_names_durable()
        if has_schedule:
            clear_strays(self._schedule)
        self._derive(commit, copier, has_schedule=has_schedule)
        self._mend(commit, actions)
        self._ids.start()
        self._queues.start_journal(next_offset=commit.next_offset)
        checkpoint = self._next_checkpoint(last, commit, actions)
        _raise_epoch(checkpoints, last, checkpoint)
        if has_schedule:
            copier.adopt_options()
        else:
            copier.copy_all()  # from now on nothing after the journal's end may be lost
        report = RecoveryReport(
            clean=clean,
            frames=commit.frames,
            records=commit.records,
            scanned_bytes=commit.scanned_bytes,
            torn_bytes=commit.torn_bytes + actions.torn_bytes,
            rewritten_bytes=_unsynced_bytes(commit) + _unsynced_bytes(actions),
            is_rebuilt=not is_loaded and commit.next_offset > first_offset,
            duration_ms=round((self._clock.monotonic_s() - began_s) * 1000),
        )
        return self._recovered(checkpoint, commit, actions, report)

    def close(self) -> None:
        """Close all files after a failure."""
        self._commit.close()
        self._actions.close()
        self._queues.close()
        self._ids.close()
        self._schedule.close()

    def _recovered(
        self,
        checkpoint: Checkpoint,
        commit: LogFinding,
        actions: LogFinding,
        report: RecoveryReport,
    ) -> Recovered:
        return Recovered(
            checkpoint=checkpoint,
            commit_segments=self._commit,
            commit_finding=commit,
            action_segments=self._actions,
            action_finding=actions,
            queues=self._queues,
            window=self._window,
            ids=self._ids,
            schedule=self._schedule,
            retained=self._retained,
            keepers=self._keepers,
            snapshots=self._snapshots,
            report=report,
        )

    def _examine(self, last: Checkpoint | None) -> tuple[LogFinding, LogFinding]:
        commit = examine(
            self._commit,
            COMMIT_KINDS,
            store_id=self._store_id,
            point=last.commit_log if last else _start_at(self._retained.first_offset),
            first_offset=self._retained.first_offset,
        )
        # All actions that will be replayed: damage there must be found before any change.
        newest = self._snapshots.newest
        snapshot_offset = 0 if newest is None else newest.snapshot.offset
        content = None if newest is None else newest.content
        if content is not None:
            self._check_groups(content)
        first_offset = self._actions.base_of(snapshot_offset)
        actions = examine(
            self._actions,
            ACTION_KINDS,
            store_id=self._store_id,
            point=replace(last.action_log if last else START, last_frame_offset=first_offset),
            first_offset=first_offset,
            check=lambda frame: frame_actions(self._actions, frame),
        )
        said = f"the snapshot of the groups ends at {snapshot_offset}"
        witnessed_offset, _ = read_witness(self._disk, self._store_id)
        if witnessed_offset > snapshot_offset:
            said = f"{layout.ACTIONS_WITNESS} says synced up to offset {witnessed_offset}"
        if actions.next_offset < max(snapshot_offset, witnessed_offset):
            raise CorruptionError(
                segment=self._actions.path(actions.next_offset),
                offset=actions.next_offset,
                reason=f"the log ends here, but {said}",
            )
        return commit, actions

    def _make_names_durable(self) -> None:
        # When the last process was killed, this kernel may know names, such as FORMAT, that are not
        # on the disk. They are made durable before other files depend on them.
        self._disk.sync_directory(layout.ROOT)
        for directory in _DIRECTORIES:
            self._disk.make_directory(directory)
        # The same for the records of deleted segments, because segments are removed according to them.
        self._disk.sync_directory(layout.STATE)

    def _derive(self, commit: LogFinding, copier: ScheduleCopier, *, has_schedule: bool) -> None:
        """Fill queues, window and schedule from frames that are not in their files."""
        queues, schedule = self._queues, self._schedule
        known_offset, window_offset = queues.known_offset, self._ids.next_offset
        copied_offset = max(schedule.copied_offset, queues.copied_offset if has_schedule else 0)
        first_offset = min(window_offset, known_offset, copied_offset, commit.next_offset)
        scan = FrameScan(
            self._commit, COMMIT_KINDS, store_id=self._store_id, first_offset=first_offset
        )
        for frame in self._good_frames(scan, commit.next_offset):
            ids = self._staged(frame, is_new=frame.offset >= known_offset)
            if queues.unflushed_bytes > 2 * UNFLUSHED_BYTES_MAX:
                queues.flush_entries()
            if frame.offset >= copied_offset:
                self._derive_delayed(frame, scan.next_offset)
                # Unsynced frames may still be lost, so no file may depend on them.
                if schedule.uncopied >= UNCOPIED_MAX and scan.next_offset <= commit.durable_offset:
                    copier.copy_all()
            if ids is not None and frame.offset >= window_offset:
                self._window.add(ids, offset=frame.offset, stored_at_ms=frame.header.stored_at_ms)
        schedule.make_visible(commit.next_offset, commit.last_stored_at_ms)

    def _derive_delayed(self, frame: ScannedFrame, next_offset: int) -> None:
        try:
            stage_delayed(self._schedule, frame)
        except ProtocolError as error:
            raise self._corruption(frame.offset, str(error)) from error
        self._schedule.make_visible(next_offset, frame.header.stored_at_ms)

    def _staged(self, frame: ScannedFrame, *, is_new: bool) -> SubjectIds | None:
        """Stage one frame; returns the ids by which repeats of its messages are recognized."""
        try:
            if frame.header.kind is FrameKind.CANCELLED:
                withdrawn = read_withdrawn(frame.data)
                return runs_of_each(withdrawn) if withdrawn else None
            if is_new:
                stored = stage_scanned(self._queues, frame)
                self._queues.make_visible()
                return None if stored is None else stored.ids
            if is_remembered(frame.header, frame.data):
                return scanned_ids(frame.header, frame.data)
        except ProtocolError as error:
            raise self._corruption(frame.offset, str(error)) from error
        return None

    def _good_frames(self, scan: FrameScan, next_offset: int) -> Iterator[ScannedFrame]:
        if scan.next_offset == next_offset:
            return
        yield from scan
        if scan.next_offset < next_offset:
            raise self._corruption(scan.next_offset, scan.reason)

    def _mend(self, commit: LogFinding, actions: LogFinding) -> None:
        if layout.CLEAN in self._disk.names(layout.ROOT):
            self._disk.unlink(layout.CLEAN)
        self._disk.sync_directory(layout.ROOT)
        self._note_clock(commit.last_stored_at_ms)
        self._keepers.limit(LogOffsets(commit.next_offset, actions.next_offset))
        for segments, finding in ((self._commit, commit), (self._actions, actions)):
            if finding.torn_bytes:
                _log.warning(
                    "torn tail cut: log=%s offset=%d bytes=%d reason=%s",
                    segments.directory,
                    finding.next_offset,
                    finding.torn_bytes,
                    finding.torn_reason,
                )
            if segments is self._commit:
                first_offset, spares_max = self._retained.first_offset, self._spares_max
            else:
                kept_offset = self._keepers.needed.actions
                first_offset, spares_max = min(self._snapshots.first_offset, kept_offset), 0
            mend(segments, finding, first_offset=first_offset, spares_max=spares_max)
        self._queues.remove_given_up()

    def _note_clock(self, last_stored_at_ms: int) -> None:
        ahead_ms = last_stored_at_ms - self._clock.now_ms()
        if ahead_ms > AHEAD_MS_MAX:
            _log.warning(
                "the log is ahead of the clock: ahead_ms=%d; the clock is wrong now, or was when the "
                "last message was stored. Until the clock reaches the log's time, new messages are "
                "stored with that time, and retention deletes none by age",
                ahead_ms,
            )

    def _next_checkpoint(
        self, last: Checkpoint | None, commit: LogFinding, actions: LogFinding
    ) -> Checkpoint:
        window_offset = self._window.first_offset
        return Checkpoint(
            generation=last.generation + 1 if last else 1,
            epoch=max(last.epoch if last else 0, commit.epoch, actions.epoch) + 1,
            commit_log=_point(commit),
            action_log=_point(actions),
            window_offset=commit.next_offset if window_offset is None else window_offset,
        )

    def _corruption(self, offset: int, reason: str) -> CorruptionError:
        return CorruptionError(segment=self._commit.path(offset), offset=offset, reason=reason)


def _raise_epoch(files: CheckpointFiles, last: Checkpoint | None, checkpoint: Checkpoint) -> None:
    files.prepare()
    if last is not None:
        # A killed process may have left this slot unsynced, and the other slot is written next.
        files.write(last)
    files.write(checkpoint)


def write_clean_stop(disk: Disk, checkpoint: Checkpoint) -> None:
    """Write the mark of a clean stop. Requires: nothing is written afterwards."""
    stop = CleanStop(generation=checkpoint.generation, epoch=checkpoint.epoch)
    replace_file(disk, layout.CLEAN, msgspec.json.encode(stop))


def _is_clean(disk: Disk, last: Checkpoint | None) -> bool:
    data = read_file(disk, layout.CLEAN)
    content = None if data is None else unseal(data)
    if content is None or last is None:
        return False
    try:
        stop = msgspec.json.decode(content, type=CleanStop)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False
    return (stop.generation, stop.epoch) == (last.generation, last.epoch)


def _start_at(first_offset: int) -> LogPoint:
    return replace(START, durable_offset=first_offset, last_frame_offset=first_offset)


def _point(finding: LogFinding) -> LogPoint:
    return LogPoint(
        durable_offset=finding.next_offset,
        last_frame_offset=finding.last_frame_offset,
        last_stored_at_ms=finding.last_stored_at_ms,
    )


def _unsynced_bytes(finding: LogFinding) -> int:
    return finding.next_offset - finding.durable_offset
