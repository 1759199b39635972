"""Periodic maintenance: retention, idle broadcast consumers, syncs of the action log, snapshots.

The loop thread, which owns the groups, decides; the writer deletes segments, and the thread that
syncs the action log writes snapshots. Files of delayed messages are deleted by the log's own time;
without sends, the writer is asked to advance it. A segment of the commit log may be deleted if it
is older than the retention, or the log is too long, and if the cursor of every group is beyond it
and every keeper has it. `force_retention` lifts the second condition; the losses of groups and
keepers are counted.

`ActionSync` syncs the action log at an interval, and writes its snapshots, in a thread of its own.
Pulls and settlements are answered once they are written, before they are synced: a power cut takes
at most one interval of them, and their messages are delivered again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from qmq_broker.errors import CorruptionError, NoRoomError
from qmq_broker.options import StoreOptions
from qmq_broker.service.delivery.delivery import Delivery
from qmq_broker.service.delivery.journal import Journal
from qmq_broker.service.keeping import Keeping
from qmq_broker.service.limits import ServiceLimits
from qmq_broker.service.metrics import Histogram
from qmq_broker.service.writer import CommitWriter
from qmq_broker.storage.files.snapshots import GroupsContent
from qmq_broker.storage.store import Store
from qmq_client.clock import Clock
from qmq_client.group.dead_letters import Page


class _StopError(Exception):
    """The thread must end before its snapshot is written."""


class ActionSync:
    """The thread that syncs the action log. Stop is idempotent and syncs a last time."""

    def __init__(
        self,
        store: Store,
        journal: Journal,
        clock: Clock,
        *,
        interval_ms: int,
        sync_s: Histogram,
        post: Callable[[Callable[[], None]], object],
        on_poisoned: Callable[[str], None],
    ) -> None:
        """`sync_s` records how long syncs took."""
        self._store = store
        self._journal = journal
        self._clock = clock
        self._sync_s = sync_s
        self._interval_s = interval_ms / 1000
        self._post = post
        self._on_poisoned = on_poisoned
        self._stopped = threading.Event()
        self._snapshot: tuple[int, Callable[[], GroupsContent]] | None = None

    @property
    def has_snapshot(self) -> bool:
        """Whether a snapshot waits to be written."""
        return self._snapshot is not None

    def keep(self, offset: int, content: Callable[[], GroupsContent]) -> None:
        """Write this snapshot with the next step. Call in the loop thread."""
        self._snapshot = (offset, content)

    def step(self) -> int:
        """Sync if anything was written since the last sync; returns how many syncs that took."""
        if (snapshot := self._snapshot) is not None:
            self._keep_snapshot(*snapshot)
            self._snapshot = None
        return self._sync()

    def _sync(self) -> int:
        if not self._journal.is_unsynced:
            return 0
        # Cleared first: actions written during the sync are left to the next one.
        self._journal.is_unsynced = False
        began_s = self._clock.monotonic_s()
        self._store.actions.sync()
        self._sync_s.note(self._clock.monotonic_s() - began_s)
        return 1

    def _keep_snapshot(self, offset: int, content: Callable[[], GroupsContent]) -> None:
        try:
            made = content()
            pages = self._synced_between(made.pages)
            self._store.actions.write_snapshot(offset, made._replace(pages=pages))
        except NoRoomError as error:
            self._store.refusals.note("snapshot_of_groups", error)
        except _StopError:  # the next start replays more
            pass

    def _synced_between(self, pages: Iterable[Page]) -> Iterator[Page]:
        """Yield these pages, with a sync at each interval: a long snapshot must delay neither syncs nor a stop."""
        synced_s = self._clock.monotonic_s()
        for page in pages:
            if self._stopped.is_set():
                raise _StopError
            if self._clock.monotonic_s() - synced_s >= self._interval_s:
                self._sync()
                synced_s = self._clock.monotonic_s()
            yield page

    def run(self) -> None:
        """Sync at the interval until `stop`, then once more."""
        is_last = False
        while not is_last:
            is_last = self._stopped.wait(self._interval_s)
            try:
                self.step()
            except Exception as error:  # the top of this thread's loop
                reason = f"action log sync: {type(error).__name__}: {error}"
                self._post(lambda: self._on_poisoned(reason))  # noqa: B023  # the loop ends here
                return

    def stop(self) -> None:
        """Let `run` end. Safe to call twice."""
        self._stopped.set()


#: A snapshot is due when the new actions reach this part of its length.
_SNAPSHOT_PART: Final = 8
#: Nothing changes fast enough to be checked more often.
INTERVAL_MS: Final = 1_000


class Housekeeping:
    """The periodic maintenance of one broker; belongs to the loop thread."""

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
        """Check whether maintenance is due, once per `INTERVAL_MS`; returns whether it checked."""
        if now_ms < self._next_ms:
            return False
        self._next_ms = now_ms + INTERVAL_MS
        self._store.refusals.look()
        self._end_idle(now_ms)
        self._note_groups(now_ms)
        self._make_room(now_ms)
        self._keeping.log_losses()
        if self._store.schedule.waits_for_time(now_ms) and not self._is_marking:
            self._is_marking = True
            self._writer.run_soon(self._note_time)
        return True

    def _end_idle(self, now_ms: int) -> None:
        try:
            self._delivery.registry.end_idle(now_ms)
        except NoRoomError as error:  # the other tasks may free some
            self._store.refusals.note("ends_of_idle_groups", error)

    def _note_groups(self, now_ms: int) -> None:
        actions = self._store.actions
        new_bytes = actions.log.written_offset - actions.snapshot_offset
        # A long snapshot costs more to write than a part of its length to replay.
        due_bytes = max(self._options.snapshot_bytes, actions.snapshot_bytes // _SNAPSHOT_PART)
        if new_bytes < due_bytes or self._action_sync.has_snapshot:
            return
        letters_bytes = self._delivery.budget.dead_letters_bytes
        # The reserve must stay free, or as much as a short snapshot takes.
        needed_bytes = letters_bytes + min(letters_bytes, self._options.reserve_bytes)
        free_bytes = self._store.disk.free_bytes()
        if free_bytes < needed_bytes:
            reason = (
                f"{free_bytes} bytes are free; {needed_bytes} are needed. Make room on the disk."
            )
            self._store.refusals.note("snapshot_of_groups", reason)
            return
        self._action_sync.keep(*self._delivery.snapshot(now_ms))

    def _make_room(self, now_ms: int) -> None:
        try:
            self._retain(now_ms)
        except (
            CorruptionError
        ) as error:  # a file of a queue: a restart rebuilds it, the other work continues
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
            # A power cut must not undo the actions that allow the deletion, such as a long retry.
            self._store.actions.sync()
            self._store.give_up_below(offset)
        finally:
            self._store.retention.asked_offset = 0
