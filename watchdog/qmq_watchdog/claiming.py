"""Claims and settlements of one sweep that run while a batch is sent to the broker.

Both run on two threads with two connections, the most that a sweep uses: meanwhile the sweep itself
does not use the database.

Claims: up to two batches are claimed ahead, and only in a sweep that has sent a full batch. A claim
is first work for the server, then for this process, which reads the rows: with two claims, the
server works on one while the other is read. They begin one broker request apart: if they began
together they would take alternate rows, and consecutive rows are quicker to change. Each lease runs
from the beginning of its claim, so the second claim waits for two batches within it: if batches
take long, only one claim is ahead. At its end the sweep returns the remaining claims.

Settlements: at most one at a time, and only while a claim is ahead, so a sweep with little to do needs
no thread and no second connection for it. Its error is raised at the wait for it: before the next
one begins, and at the end of the sweep.

Rows per second are limited here too, for each database: after a pause at most the rows of one
second are sent at once. At the start only one row is, because the sends of a previous watchdog are
unknown.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, ParamSpec, TypeVar

from qmq_client.clock import Clock
from qmq_client.ids import new_token
from qmq_client.outbox.committed.store import OutboxStore
from qmq_client.outbox.database.claiming import CLAIM_BYTES_MAX
from qmq_client.outbox.row import BatchOutcome, OutboxRow

#: The largest burst, and the amount to wait for, in seconds of the rate.
_BURST_S = 1.0
_WAIT_S = 0.25


class RowRate:
    """A token bucket of rows, without a clock. One thread at a time."""

    def __init__(self, rows_per_s: int, now_s: float) -> None:
        self._rows_per_s = rows_per_s
        self._rows = 1.0
        self._filled_s = now_s

    @property
    def is_limited(self) -> bool:
        """Whether there is a rate at all."""
        return self._rows_per_s > 0

    def allowed(self, now_s: float) -> int | None:
        """How many rows may be taken now; None for any number."""
        if not self.is_limited:
            return None
        added = (now_s - self._filled_s) * self._rows_per_s
        self._rows = min(self._rows + added, max(1.0, self._rows_per_s * _BURST_S))
        self._filled_s = now_s
        return max(0, int(self._rows))

    def take(self, rows: int) -> None:
        """Take this many rows from the bucket."""
        self._rows -= rows

    def wait_s(self) -> float:
        """How long to wait for the next rows, if none are allowed now."""
        if not self.is_limited:
            return 0.0
        wanted = max(1.0, self._rows_per_s * _WAIT_S)
        return max(0.0, (wanted - self._rows) / self._rows_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settlement:
    """The outcome of a batch."""

    token: bytes
    #: The rows that were claimed; none if the lease has ended, because another process may own them.
    rows: Sequence[OutboxRow]
    #: Outcomes of the rows that were tried.
    outcome: BatchOutcome
    #: Outcomes of the rows that were held back.
    held: BatchOutcome


class Settlements:
    """Settlements on one database. One thread at a time; one settlement runs next to it."""

    def __init__(
        self, store: Callable[[], OutboxStore], threads: Threads, *, keep_sent_ms: int | None
    ) -> None:
        self._store = store
        self._threads = threads
        self._keep_sent_ms = keep_sent_ms
        self._under_way: Future[int] | None = None

    def settle(self, settlement: Settlement) -> int:
        """Settle now; returns how many of the tried rows another process owned by then."""
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
        """Settle parallel to this thread. Requires: no settlement is under way."""
        self._under_way = self._threads.submit(self.settle, settlement)

    def wait(self) -> int:
        """Wait for the settlement under way; returns the result of `settle`, 0 if there is none."""
        under_way, self._under_way = self._under_way, None
        return 0 if under_way is None else under_way.result()


THREADS: Final = 2

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def two_threads() -> Executor:
    """Threads that are created when needed."""
    return ThreadPoolExecutor(max_workers=THREADS, thread_name_prefix="qmq-sweep")


class Threads:
    """The threads of one sweep, from its first use of them to its end. One thread submits."""

    def __init__(self, make: Callable[[], Executor] = two_threads) -> None:
        self._make = make
        self._executor: Executor | None = None

    def submit(
        self, work: Callable[_Given, _Result], *given: _Given.args, **options: _Given.kwargs
    ) -> Future[_Result]:
        """Run this function as soon as a thread is free, in the order of the calls."""
        if self._executor is None:
            self._executor = self._make()
        return self._executor.submit(work, *given, **options)

    def end(self) -> bool:
        """End of a sweep: wait for all work and end the threads; returns whether there were any."""
        executor, self._executor = self._executor, None
        if executor is None:
            return False
        executor.shutdown(wait=True)
        return True


#: Most claims ahead: their rows must fit in memory and be sent within their leases.
CLAIMS_AHEAD_MAX: Final = 2
#: Share of the lease: a second claim is ahead only while a batch takes less than this, because it
#: waits for two batches.
QUICK_SHARE: Final = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Rows that this watchdog owns until the lease ends."""

    token: bytes
    rows: list[OutboxRow]
    #: Whether the claim reached its limit, so that there may be more rows.
    is_full: bool
    lease_end_s: float


class Claims:
    """Claims on one database. One thread at a time; claims ahead run next to it."""

    def __init__(
        self, store: Callable[[], OutboxStore], clock: Clock, threads: Threads, *, lease_ms: int
    ) -> None:
        self._store = store
        self._clock = clock
        self._threads = threads
        self._lease_ms = lease_ms
        #: Claims ahead, the next one first, each with its largest number of rows.
        self._ahead: deque[tuple[Future[Claim], int]] = deque()

    @property
    def is_ahead(self) -> bool:
        """Whether the next claim has begun."""
        return bool(self._ahead)

    @property
    def rows_ahead_max(self) -> int:
        """The largest number of rows of the claims ahead."""
        return sum(limit for _, limit in self._ahead)

    def take(self, limit: int) -> Claim:
        """The first claim begun ahead, or a new one of up to `limit` rows."""
        if not self._ahead:
            return self._claim(limit)
        ahead, _ = self._ahead.popleft()
        return ahead.result()

    def take_followers(self, keys: Sequence[str], limit: int) -> Claim | None:
        """Claim rows that follow the sent ones of these ordering keys; None if there are none."""
        if not keys:
            return None
        claim = self._claim(limit, keys)
        return claim if claim.rows else None

    def look_ahead(self, limit: int, *, batch_s: float) -> None:
        """Begin one more claim parallel to this thread, unless enough are ahead.

        `batch_s` is how long the last batch took to send.
        """
        is_quick = batch_s * 1000 < self._lease_ms * QUICK_SHARE
        if limit > 0 and len(self._ahead) < (CLAIMS_AHEAD_MAX if is_quick else 1):
            self._ahead.append((self._threads.submit(self._claim, limit), limit))

    def end(self) -> list[Claim]:
        """End a sweep: returns the claims that will not be sent; their errors are dropped.

        Waits for claims under way: their statements end by themselves.
        """
        ended = [ahead for ahead, _ in self._ahead]
        self._ahead.clear()
        return [ahead.result() for ahead in ended if ahead.exception() is None]

    def _claim(self, limit: int, keys: Sequence[str] = ()) -> Claim:
        token = new_token()
        lease_end_s = self._clock.monotonic_s() + self._lease_ms / 1000
        rows = self._store().claim(token=token, limit=limit, lease_ms=self._lease_ms, keys=keys)
        is_full = len(rows) == limit or sum(len(row.record) for row in rows) >= CLAIM_BYTES_MAX
        return Claim(token=token, rows=rows, is_full=is_full, lease_end_s=lease_end_s)
