"""Chores driven by time: retention, idle broadcast consumers, snapshots of the groups.

Decided in the loop thread, where the groups live, and done elsewhere: segments by the writer,
snapshots by the thread that syncs the action log. Files of delayed messages go by the log's own
time; while nobody sends, the writer is asked to advance it. A segment of the commit log may go if
it is older than the retention, or the log too long, and if every group has got past it on every
subject and every keeper has it. `force_retention` lifts the second condition; what a group or a
keeper loses by that is counted.
"""

from __future__ import annotations

from typing import Final

from qmq_broker.errors import CorruptionError, NoRoomError
from qmq_broker.options import StoreOptions
from qmq_broker.service.action_sync import ActionSync
from qmq_broker.service.delivery.delivery import Delivery
from qmq_broker.service.keeping import Keeping
from qmq_broker.service.limits import ServiceLimits
from qmq_broker.service.writer import CommitWriter
from qmq_broker.storage.store import Store

#: Nothing changes fast enough to be checked more often.
INTERVAL_MS: Final = 1_000


class Housekeeping:
    """The chores of one broker; belongs to the loop thread."""

    def __init__(
        self,
        store: Store,
        delivery: Delivery,
        writer: CommitWriter,
        action_sync: ActionSync,
        keeping: Keeping,
        *,
        options: StoreOptions,
        limits: ServiceLimits,
    ) -> None:
        self._store = store
        self._delivery = delivery
        self._writer = writer
        self._action_sync = action_sync
        self._keeping = keeping
        self._options = options
        self._limits = limits
        self._next_ms = 0
        #: Whether the writer was asked to advance the log's own time.
        self._is_marking = False

    def step(self, now_ms: int) -> bool:
        """Check whether anything is due, once per `INTERVAL_MS`; returns whether it checked."""
        if now_ms < self._next_ms:
            return False
        self._next_ms = now_ms + INTERVAL_MS
        self._store.refusals.look()
        self._end_idle(now_ms)
        self._note_groups(now_ms)
        self._make_room(now_ms)
        self._keeping.tell_losses()
        if self._store.schedule.waits_for_time(now_ms) and not self._is_marking:
            self._is_marking = True
            self._writer.run_soon(self._note_time)
        return True

    def _end_idle(self, now_ms: int) -> None:
        try:
            self._delivery.registry.end_idle(now_ms)
        except NoRoomError as error:  # the rest may make some
            self._store.refusals.note("ends_of_idle_groups", error)

    def _note_groups(self, now_ms: int) -> None:
        actions = self._store.actions
        new_bytes = actions.log.written_offset - actions.snapshot_offset
        if new_bytes >= self._options.snapshot_bytes and not self._action_sync.has_snapshot:
            self._action_sync.keep(*self._delivery.snapshot(now_ms))

    def _make_room(self, now_ms: int) -> None:
        try:
            self._retain(now_ms)
        except CorruptionError as error:  # of a queue: a restart makes it again, the rest goes on
            self._store.refusals.note("retention", error)

    def _retain(self, now_ms: int) -> None:
        retention = self._store.retention
        retention.look_for_old_ids(now_ms)
        offset = self._store.expired_offset(now_ms)
        if retention.asked_offset or offset <= retention.first_offset:
            return
        if not self._options.force_retention:
            dead_since_ms = now_ms - self._limits.dead_letter_ms
            needed = self._delivery.needed_log
            if not retention.gives_up(needed.holder_offset(dead_since_ms)):
                return
            offset = min(offset, needed.first_offset(dead_since_ms))
        if retention.ask(offset):
            self._writer.run_soon(lambda: self._give_up(offset))

    def _note_time(self) -> None:
        """In the writer's thread."""
        self._is_marking = False
        self._store.note_time()

    def _give_up(self, offset: int) -> None:
        """In the writer's thread."""
        try:
            # A power cut must not undo what lets the segment go, such as a message set aside.
            self._store.actions.sync()
            self._store.give_up_below(offset)
        finally:
            self._store.retention.asked_offset = 0
