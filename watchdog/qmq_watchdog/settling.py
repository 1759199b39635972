"""Settlements of one sweep: a batch is written down while the next one goes to the broker.

At most one is under way beside the sweep, and only while a claim is ahead (`claiming.py`), so a
sweep with little to do needs neither a thread nor a second connection for it. Its result, or its
error, is reported when it is waited for: before the next one begins, and at the end of the sweep.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from qmq_client.outbox.committed.store import OutboxStore
from qmq_client.outbox.row import BatchOutcome, OutboxRow
from qmq_watchdog.beside import Beside


@dataclass(frozen=True, slots=True, kw_only=True)
class Settlement:
    """The outcome of a batch."""

    token: bytes
    #: The rows that were claimed; none if the lease has ended, because they may be somebody else's.
    rows: Sequence[OutboxRow]
    #: Of the rows that were tried.
    outcome: BatchOutcome
    #: Of the rows that were held back.
    held: BatchOutcome


class Settlements:
    """Settlements on one database. One thread at a time; one settlement runs beside it."""

    def __init__(
        self, store: Callable[[], OutboxStore], beside: Beside, *, keep_sent_ms: int | None
    ) -> None:
        self._store = store
        self._beside = beside
        self._keep_sent_ms = keep_sent_ms
        self._under_way: Future[int] | None = None

    def settle(self, settlement: Settlement) -> int:
        """Write it down now; returns how many of the rows tried were somebody else's by then."""
        store, outcome = self._store(), settlement.outcome
        settled = store.settle(
            outcome,
            token=settlement.token,
            keep_ms=self._keep_sent_ms,
            claimed=settlement.rows,
        )
        store.settle(settlement.held, token=settlement.token)
        return len(outcome.sent) + len(outcome.failed) + len(outcome.parked) - settled

    def begin(self, settlement: Settlement) -> None:
        """Write it down beside this thread. Requires: none is under way."""
        self._under_way = self._beside.submit(self.settle, settlement)

    def wait(self) -> int:
        """Wait for the one under way; returns what `settle` returns, 0 if there is none."""
        under_way, self._under_way = self._under_way, None
        return 0 if under_way is None else under_way.result()
