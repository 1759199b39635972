"""The store: the interface to all files of one broker.

A data directory belongs to one `Store` of one process. `append` and `commit` make messages durable
and then visible, while other threads read queues and records. The actions of consumers have a
separate log. The files are described in `files/layout.py` and `docs/format/`.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from qmq_broker.errors import ClosedError, DiskError, NoRoomError, PoisonedError
from qmq_broker.options import StoreOptions
from qmq_broker.storage.commit_log import CommitLog, Placed
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.background import Work
from qmq_broker.storage.files.checkpoint import CheckpointFiles
from qmq_broker.storage.files.disk_port import Disk, DiskLock
from qmq_broker.storage.files.format_file import Format, open_format
from qmq_broker.storage.files.keepers import Keeper, keep_room_for_keepers
from qmq_broker.storage.files.letters import LetterFiles
from qmq_broker.storage.files.sharing import refuse_shared
from qmq_broker.storage.files.snapshots import CheckGroups
from qmq_broker.storage.index.key_index import KeyIndex
from qmq_broker.storage.index.key_search import KeySearch
from qmq_broker.storage.keepers import LogOffsets
from qmq_broker.storage.logs.action_log import ActionLog
from qmq_broker.storage.logs.frame_seek import LogRange, offset_at
from qmq_broker.storage.logs.log_settings import log_settings
from qmq_broker.storage.logs.segmented_log import SegmentedLog
from qmq_broker.storage.logs.spares import SpareMaker
from qmq_broker.storage.logs.summaries import Summaries
from qmq_broker.storage.queues.consume_queue import ConsumeQueue
from qmq_broker.storage.recovery import Recovered, Recovery, RecoveryReport
from qmq_broker.storage.retention import Retention
from qmq_broker.storage.saving import Saved, Saver
from qmq_broker.storage.schedule.cancelled import NOTHING_WITHDRAWN, Cancelled, WithdrawnIds
from qmq_broker.storage.schedule.states import DelayedState
from qmq_client.clock import Clock
from qmq_client.group.queue import Place
from qmq_client.wire.deliveries import Records
from qmq_client.wire.frame import MessageFrame

__all__ = ["Placed", "RecoveryReport", "Store"]

_log = logging.getLogger(__name__)
#: Bits of the token of deliveries: below 2^53, so that every JSON reader gets it exactly.
_TOKEN_BITS: Final = 52
#: Gives all tokens the same length.
_TOKEN_BIT: Final = 1 << _TOKEN_BITS


class Store:
    """One data directory, open.

    Methods that write to the commit log or move its beginning belong to the writer thread: `append`, `commit`,
    `step` or both, `cancel`, `note_time`, `give_up_below`, `remove_subject`, `keep`, `end_keeper`, `close`.
    `queue`, `subjects` and `read_records` may be called from any thread, and `actions` belongs to a
    separate thread. After a `PoisonedError` only `close` may be called, then restart.
    """

    def __init__(
        self,
        disk: Disk,
        clock: Clock,
        options: StoreOptions,
        lock: DiskLock,
        format_: Format,
        *,
        checkpoints: CheckpointFiles,
        recovered: Recovered,
    ) -> None:
        """For `open` only."""
        #: Its files, also for readers outside the store.
        self.disk = disk
        self._options = options
        #: Identifies the store; a backup of it has the same.
        self.store_id = format_.store_id
        self._lock, self._checkpoints = lock, checkpoints
        self._queues, self._window, self._ids = recovered.queues, recovered.window, recovered.ids
        self._poison: str | None = None
        self._is_closed = False
        #: Increased by one at each opening; stamped on every frame.
        self.epoch = recovered.checkpoint.epoch
        #: Identifies this opening; with a pull sequence, one delivery. Random, because copies of a
        #: directory that are both opened share store id and epoch.
        self.hand_out_token = _TOKEN_BIT | secrets.randbits(_TOKEN_BITS)
        self.recovery = recovered.report
        store_id, segments, bounds = self.store_id, recovered.commit_segments, self._log_range
        log, action_log = _logs(recovered, clock, options, store_id)
        #: The delayed messages.
        self.schedule = recovered.schedule
        self._commit_log = CommitLog(log, recovered.queues, recovered.window, self.schedule)
        self._commit_segments = segments
        #: The archives that retention waits for.
        self.keepers = keepers = recovered.keepers
        snapshots, kept = recovered.snapshots, keepers.given_up_actions
        #: The changes of all groups.
        self.actions = ActionLog(
            action_log, recovered.action_segments, store_id, snapshots, kept=kept
        )
        parts = Saved.of(recovered, log, action_log)
        self._saver = Saver(clock, options, parts, checkpoints, recovered.checkpoint)
        #: Log lines of work that must be tried again.
        self.refusals = self._saver.refusals
        #: The retention of the commit log.
        self.retention = Retention(
            disk, options, parts, self._saver, retained=recovered.retained, keepers=keepers
        )
        #: The index of ids and keys. One thread steps it; without steps, searches still work.
        self.index = KeyIndex(disk, segments, options, store_id=store_id, bounds=bounds)
        #: The summaries of sealed segments; stepped by the thread of the index.
        self.summaries = Summaries(disk, segments, store_id=store_id, bounds=bounds)
        #: Dead letters that are not in memory.
        self.letters = LetterFiles(disk, options.reserve_bytes)
        #: Makes spare segments ahead of need; stepped by the thread of the index.
        self.spare_maker = SpareMaker(disk, log, options)
        #: Finds messages by id or key, from any thread.
        self.search = KeySearch(
            segments, self.index, store_id=store_id, bounds=bounds, summary_of=self.summaries.find
        )

    @classmethod
    def open(
        cls, disk: Disk, clock: Clock, options: StoreOptions, *, check_groups: CheckGroups = len
    ) -> Store:
        """Take the data directory: lock, format, recovery, new epoch.

        `check_groups` raises an error for a snapshot that the service cannot read. Raises
        `LockedError`, `SharedFilesError` and `UnknownFormatError` with nothing touched,
        `CorruptionError` with only derived files changed.
        """
        lock = disk.lock(layout.LOCK, f"pid {os.getpid()}")
        checkpoints: CheckpointFiles | None = None
        recovery: Recovery | None = None
        try:
            refuse_shared(disk)
            format_ = open_format(disk, options)
            checkpoints = CheckpointFiles(disk, format_.store_id)
            recovery = Recovery(disk, clock, options, format_, check_groups)
            recovered = recovery.run(checkpoints)
            return cls(
                disk, clock, options, lock, format_, checkpoints=checkpoints, recovered=recovered
            )
        except BaseException:
            if recovery is not None:
                recovery.close()
            if checkpoints is not None:
                checkpoints.close()
            lock.release()
            raise

    @property
    def frame_bytes_max(self) -> int:
        """The longest frame that this data directory can hold."""
        return self._commit_log.log.frame_bytes_max

    @property
    def durable_offset(self) -> int:
        """The commit log below this offset survives a power cut."""
        return self._commit_log.log.durable_offset

    @property
    def written_offset(self) -> int:
        """The commit log below this offset was written to the operating system."""
        return self._commit_log.log.written_offset

    @property
    def last_stored_at_ms(self) -> int:
        """The stamp of the last frame; stamps never go back. For any thread."""
        return self._commit_log.log.last_stored_at_ms

    def append(self, frames: Sequence[MessageFrame]) -> list[Placed]:
        """Write the new messages of these frames in one gathering write.

        Neither durable nor visible on return: no request may be answered before `commit`. A frame with
        a message id that is already stored with other content gets `Placed.conflict` and is not
        stored; the others are. Raises `NoRoomError` with nothing written, or `PoisonedError`.
        """
        self._check()
        return self._commit_log.append(frames)

    def commit(self) -> None:
        """Make all appended frames durable, then visible, with one sync; raises `PoisonedError`."""
        self._check()
        self._commit_log.log.sync()
        self._check_place()
        self._make_visible()

    def commit_and_step(self) -> None:
        """`commit` and `step`, for commits that no answer waits for."""
        self.commit()
        self._step()

    def cancel(
        self, wanted: Sequence[Cancelled], withdrawn: WithdrawnIds = NOTHING_WITHDRAWN
    ) -> list[DelayedState | None]:
        """Cancel the pending messages of `wanted`; durable on return. See `CommitLog.cancel`."""
        self._check()
        self._check_place()
        states = self._commit_log.cancel(wanted, withdrawn)
        self.commit_and_step()
        return states

    def note_time(self) -> None:
        """Advance the log's own time without sends, so that finished buckets can be removed."""
        self._check()
        self._check_place()
        self._commit_log.note_time()
        self.commit_and_step()

    def step(self) -> bool:
        """Continue saving files for the next start; returns whether a checkpoint was due.

        Call it after each commit and when idle.

        Requires: all appends are synced.
        """
        self._check()
        self._check_place()
        return self._step()

    def _step(self) -> bool:
        with self._poisoning("retention"):
            self.retention.step()
        with self._poisoning("checkpoint"):
            return self._saver.step()

    def work_in_background(self, start: Callable[[Work], None]) -> None:
        """Run disk work that no answer waits for by `start` instead of in the writer."""
        self.schedule.background.start = self.retention.background.start = start

    @property
    def first_offset(self) -> int:
        """The beginning of the commit log; earlier segments were deleted."""
        return self.retention.first_offset

    def offset_at(self, time_ms: int) -> int:
        """The offset of the first frame stored at `time_ms` or later. For any thread.

        The durable end of the log if there is none yet. Raises `CorruptionError`.
        """
        return offset_at(self._commit_segments, time_ms, self._log_range(), self.summaries.find)

    def expired_offset(self, now_ms: int) -> int:
        """The offset below which the commit log may be deleted if no group needs it; see `Retention`."""
        return self.retention.expired_offset(now_ms)

    def give_up_below(self, offset: int) -> int:
        """Delete segments of the commit log below `offset`; returns the deleted bytes.

        Never deletes what a restart needs. If the work runs parallel to the writer, this starts it
        and `step` continues it. Raises `PoisonedError`. See `Retention`.
        """
        self._check()
        self._check_place()
        with self._poisoning("retention"):
            return self.retention.give_up_below(offset)

    def remove_subject(self, subject: str) -> bool:
        """Forget a subject whose messages are all deleted; returns whether they are.

        Durable on return. Requires: the subject exists, and durably has no group. Raises
        `NoRoomError` with nothing changed.
        """
        self._check()
        self._check_place()
        self.actions.sync()
        return self.queue(subject) is not None and self.retention.remove_subject(subject)

    def keep(self, name: str, reported: LogOffsets, at_ms: int) -> Keeper:
        """Make retention wait for this keeper beyond its reported offsets; see `Keepers.keep`."""
        self._check()
        self._check_place()
        durable = LogOffsets(self.durable_offset, self.actions.log.durable_offset)
        kept = self.keepers.keep(name, reported, at_ms, first=self._beginning, durable=durable)
        keep_room_for_keepers(self.disk)
        return kept

    def end_keeper(self, name: str) -> Keeper | None:
        """Stop waiting for this keeper; durable on return.

        Returns its last state, or None if there was none.
        """
        self._check()
        self._check_place()
        ended = self.keepers.end(name)
        keep_room_for_keepers(self.disk)
        return ended

    def subjects(self) -> list[str]:
        """Subjects with visible messages, sorted."""
        return self._queues.subjects()

    def queue(self, subject: str) -> ConsumeQueue | None:
        """The consume queue of a subject; None until it has a visible message."""
        return self._queues.visible(subject)

    def read_together(self, entries: Sequence[Place], *, subject: str) -> Records:
        """The records of these entries of one subject, each verified.

        The subject is part of a record's checksum. Raises `CorruptionError`.
        """
        return self._commit_log.reader.read(entries, subject)

    def read_records(self, entries: Sequence[Place], *, subject: str) -> list[bytes]:
        """The same, one by one, for callers that need single records."""
        return list(self.read_together(entries, subject=subject))

    def free_bytes(self) -> int:
        """Space on the disk that may still be used."""
        return self.disk.free_bytes()

    @property
    def segments(self) -> int:
        """How many files the commit log has. For any thread."""
        return len(self._commit_log.log.bases())

    @property
    def remembered_ids(self) -> int:
        """How many message ids are remembered to recognize repeats. For any thread."""
        return self._window.ids

    def close(self) -> None:
        """Stop cleanly: sync, flush, mark, unlock. Safe to call twice.

        A poisoned store is only unlocked; the next start examines its content.
        """
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if not self._is_poisoned():
                self._stop_clean()
        finally:
            self.actions.forget_snapshot()
            logs = (self.actions.log, self._commit_log.log)
            for part in (
                self.retention,
                *logs,
                self._queues,
                self._ids,
                self.index,
                self.schedule,
                self.spare_maker,
                self._checkpoints,
            ):
                part.close()
            self._lock.release()

    def _stop_clean(self) -> None:
        self._check_place()
        self._commit_log.log.sync()
        self._make_visible()
        self.actions.sync()
        self.index.finish()
        self.retention.finish()
        self.letters.clear()
        self._saver.stop_clean(self.disk)

    def _make_visible(self) -> None:
        self._queues.make_visible()
        log = self._commit_log.log
        self.schedule.make_visible(log.durable_offset, log.last_stored_at_ms)

    def _log_range(self) -> LogRange:
        return LogRange(self.first_offset, self.durable_offset)

    def _beginning(self) -> LogOffsets:
        return LogOffsets(self.retention.coming_offset, self.actions.first_offset)

    def _check(self) -> None:
        if self._is_closed:
            raise ClosedError("the store is closed")
        if self._poison is not None:
            raise PoisonedError(self._poison)

    def _check_place(self) -> None:
        """Raise if the directory was moved or replaced, so that the next process would not find the written data."""
        try:
            self._lock.check()
        except DiskError as error:
            raise self._poisoned("a lost data directory", error) from error

    def _is_poisoned(self) -> bool:
        logs = (self._commit_log.log, self.actions.log)
        return self._poison is not None or any(log.poison is not None for log in logs)

    @contextmanager
    def _poisoning(self, what: str) -> Iterator[None]:
        try:
            yield
        except (DiskError, NoRoomError) as error:
            raise self._poisoned(f"a failed {what}", error) from error

    def _poisoned(self, what: str, error: Exception) -> PoisonedError:
        self._poison = f"nothing is written since {what}: {error}. Restart the broker."
        return PoisonedError(self._poison)


def _logs(
    recovered: Recovered, clock: Clock, options: StoreOptions, store_id: bytes
) -> tuple[SegmentedLog, SegmentedLog]:
    settings, action_settings = log_settings(options, store_id, recovered.checkpoint.epoch)
    return (
        SegmentedLog(recovered.commit_segments, clock, settings, recovered.commit_finding),
        SegmentedLog(recovered.action_segments, clock, action_settings, recovered.action_finding),
    )
