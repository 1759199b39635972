"""Syncs the action log at an interval, and writes its snapshots, off the loop thread.

Pulls and settlements are answered once they are written, before they are synced: a power cut takes
at most one interval of them, and their messages are delivered again. A thin thread around `step`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from qmq_broker.clock import Clock
from qmq_broker.errors import NoRoomError
from qmq_broker.service.delivery.journal import Journal
from qmq_broker.service.measures import Histogram
from qmq_broker.storage.store import Store


class ActionSync:
    """The thread that syncs. Stop is idempotent and syncs a last time."""

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
        self._snapshot: tuple[int, Callable[[], bytes]] | None = None

    @property
    def has_snapshot(self) -> bool:
        """Whether a snapshot waits to be written."""
        return self._snapshot is not None

    def keep(self, offset: int, content: Callable[[], bytes]) -> None:
        """Write this snapshot with the next step. Call in the loop thread."""
        self._snapshot = (offset, content)

    def step(self) -> int:
        """Sync if anything was written since the last sync; returns how many syncs that took."""
        if (snapshot := self._snapshot) is not None:
            self._keep_snapshot(*snapshot)
            self._snapshot = None
        if not self._journal.is_unsynced:
            return 0
        # Cleared first: what is written during the sync is left to the next one.
        self._journal.is_unsynced = False
        began_s = self._clock.monotonic_s()
        self._store.actions.sync()
        self._sync_s.note(self._clock.monotonic_s() - began_s)
        return 1

    def _keep_snapshot(self, offset: int, content: Callable[[], bytes]) -> None:
        try:
            self._store.actions.write_snapshot(offset, content())
        except NoRoomError as error:
            self._store.refusals.note("snapshot_of_groups", error)

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
