"""The saver: derived files that an open store writes, so that the next start reads little.

::

    after each commit    some consume queues and delayed messages into their files, in bounded portions;
                         ids, once thousands wait
    at a checkpoint      ids and entries into their journals, then the durable ends of the logs
    at a clean stop      all data that can be written quickly, then CLEAN

All of these files are derived or hints. A full disk postpones them, and a start rebuilds missing ones from the logs.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

from qmq_broker.errors import NoRoomError
from qmq_broker.options import StoreOptions
from qmq_broker.storage.files.checkpoint import Checkpoint, CheckpointFiles
from qmq_broker.storage.files.disk_port import Disk
from qmq_broker.storage.ids.journal import IdJournal
from qmq_broker.storage.ids.window import DedupeWindow
from qmq_broker.storage.logs.segmented_log import SegmentedLog
from qmq_broker.storage.queues.consume_queues import UNFLUSHED_BYTES_MAX, ConsumeQueues
from qmq_broker.storage.recovery import Recovered, write_clean_stop
from qmq_broker.storage.refusals import Refusals
from qmq_broker.storage.schedule.copy import ScheduleCopier
from qmq_broker.storage.schedule.schedule import Schedule
from qmq_client.clock import Clock

_log = logging.getLogger(__name__)
#: How long delayed messages are copied between two commits; messages that become due meanwhile are late by this time.
COPY_SLICE_S: Final = 0.005
#: With more queues than this, a clean stop leaves their entries in the journal: it must not take
#: minutes.
QUEUES_AT_STOP_MAX: Final = 256
#: With more buckets than this to be written, it leaves delayed messages to the commit log, for the same reason.
BUCKETS_AT_STOP_MAX: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """The parts of a store that are saved."""

    commit_log: SegmentedLog
    action_log: SegmentedLog
    queues: ConsumeQueues
    window: DedupeWindow
    ids: IdJournal
    schedule: Schedule
    copier: ScheduleCopier

    @classmethod
    def of(cls, recovered: Recovered, commit_log: SegmentedLog, action_log: SegmentedLog) -> Saved:
        """The parts of a data directory that was just opened."""
        return cls(
            commit_log=commit_log,
            action_log=action_log,
            queues=recovered.queues,
            window=recovered.window,
            ids=recovered.ids,
            schedule=recovered.schedule,
            copier=ScheduleCopier(recovered.schedule, epoch=recovered.checkpoint.epoch),
        )


class Saver:
    """Saves one store, in its writer's thread.

    Every method raises `DiskError` when the disk fails; nothing may be written after that.
    """

    def __init__(
        self,
        clock: Clock,
        options: StoreOptions,
        parts: Saved,
        checkpoints: CheckpointFiles,
        last: Checkpoint,
    ) -> None:
        self._clock = clock
        self._options = options
        self._parts = parts
        self._checkpoints = checkpoints
        #: Log lines of refused work on this store.
        self.refusals = Refusals(clock)
        #: The last checkpoint that was written.
        self.last = last
        self._written_s = clock.monotonic_s()
        #: Entries and delayed messages below this offset must be saved soon. For any thread.
        self.wanted_offset = 0
        #: Whether ids that are expired by the clock are forgotten although nothing is stored. For any thread.
        self.is_forgetting = False

    def step(self) -> bool:
        """Continue with the work under way; returns whether a checkpoint was due and written.

        Requires: all appends to the commit log are synced and visible.
        """
        self._save_some()
        if self.is_forgetting:
            self._forget_ids()
        if self.wanted_offset > self._parts.queues.indexed_offset:
            self._begin_flush()
        log = self._parts.commit_log
        behind_bytes = log.durable_offset - self.last.commit_log.durable_offset
        actions_offset = self._parts.action_log.durable_offset
        if not behind_bytes and actions_offset == self.last.action_log.durable_offset:
            return False
        age_ms = (self._clock.monotonic_s() - self._written_s) * 1000
        if behind_bytes < self._options.checkpoint_bytes and age_ms < self._options.checkpoint_ms:
            return False
        self._write_journals()
        self._begin_flush()
        self.write_checkpoint()
        return True

    def make_way(self, offset: int) -> None:
        """Save all entries and delayed messages below `offset` soon, so that the commit log can begin there."""
        self.wanted_offset = self._parts.copier.wanted_offset = offset

    def stop_clean(self, disk: Disk) -> None:
        """Save all data, or as much as keeps the next start short, and write the mark of the clean stop.

        Requires: both logs are synced, nothing is written after.

        On a full disk, the rest is left to the next start. Raises `NoRoomError` if there is no room
        even for the mark: the next start then treats the stop as a crash.
        """
        parts, durable_offset = self._parts, self._parts.commit_log.durable_offset
        try:
            if parts.copier.buckets_left <= BUCKETS_AT_STOP_MAX:
                parts.copier.copy_all()
            else:
                parts.copier.leave()
            self._write_journals()  # before the flush: no gap for the older table
            is_behind = parts.queues.indexed_offset != durable_offset
            if is_behind and parts.queues.unflushed_count <= QUEUES_AT_STOP_MAX:
                parts.queues.flush(durable_offset)
        except NoRoomError as error:
            parts.queues.give_up_flush()
            _log.warning("queues and schedule not saved: reason=%s", error)
        self.write_checkpoint()
        write_clean_stop(disk, self.last)

    def write_checkpoint(self) -> None:
        """Write the durable ends of the logs; durable on return."""
        commit_point = self._parts.commit_log.durable_point
        window_offset = self._parts.window.first_offset
        checkpoint = Checkpoint(
            generation=self.last.generation + 1,
            epoch=self.last.epoch,
            commit_log=commit_point,
            action_log=self._parts.action_log.durable_point,
            window_offset=commit_point.durable_offset if window_offset is None else window_offset,
        )
        self._checkpoints.write(checkpoint)
        self.last = checkpoint
        self._written_s = self._clock.monotonic_s()

    def _forget_ids(self) -> None:
        """Forget ids by the clock; durable before a forgotten id can be stored again."""
        window = self._parts.window
        first_offset = window.first_offset
        window.forget(self._clock.now_ms())
        if window.first_offset != first_offset:
            self.write_checkpoint()

    def _save_some(self) -> None:
        parts = self._parts
        try:
            parts.queues.flush_some()
            if parts.ids.is_chunk_due:
                parts.ids.write_some(parts.commit_log.durable_offset)
            until_s = self._clock.monotonic_s() + COPY_SLICE_S
            parts.copier.step(lambda: self._clock.monotonic_s() < until_s)
        except NoRoomError as error:
            # The entries stay in memory and are derived: another checkpoint tries again.
            parts.queues.give_up_flush()
            self.refusals.note("queues_and_schedule", error)

    def _write_journals(self) -> None:
        parts, durable_offset = self._parts, self._parts.commit_log.durable_offset
        try:
            parts.queues.write_journal(durable_offset, parts.copier.quiet_offset)
            while not parts.ids.write_some(durable_offset):
                pass
        except NoRoomError as error:
            self.refusals.note("journals", error)

    def _begin_flush(self) -> None:
        queues, durable_offset = self._parts.queues, self._parts.commit_log.durable_offset
        if queues.is_flushing:
            return
        is_far = durable_offset - queues.indexed_offset >= self._options.queue_flush_bytes
        is_far = is_far or self.wanted_offset > queues.indexed_offset
        if is_far or queues.unflushed_bytes >= UNFLUSHED_BYTES_MAX:
            queues.begin_flush(durable_offset)
