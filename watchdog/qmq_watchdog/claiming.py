"""Claims of one sweep: the next batch is taken from the database while this one goes to the broker.

At most one claim is ahead, and only of a sweep that gets on well: a full batch was sent before. Its
lease runs from its own begin. One that is not wanted any more, because the sweep has ended, is given
back by `Sweep`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass

from qmq_client.clock import Clock
from qmq_client.ids import new_token
from qmq_client.outbox.database.claiming import CLAIM_BYTES_MAX
from qmq_client.outbox.relay.store import OutboxStore
from qmq_client.outbox.row import OutboxRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Rows that this watchdog owns until the lease ends."""

    token: bytes
    rows: list[OutboxRow]
    #: As many as were asked for, or as large as may be: there may be more.
    is_full: bool
    lease_end_s: float


def one_thread() -> Executor:
    """A thread beside the sweep's own, for the claim ahead."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="qmq-claim")


class Claims:
    """Claims on one database. One thread at a time; it uses another one for itself."""

    def __init__(
        self,
        store: Callable[[], OutboxStore],
        clock: Clock,
        *,
        lease_ms: int,
        beside: Callable[[], Executor] = one_thread,
    ) -> None:
        """`beside` makes what runs the claim ahead; it is shut down at the end of each sweep."""
        self._store = store
        self._clock = clock
        self._lease_ms = lease_ms
        self._beside = beside
        self._thread: Executor | None = None
        self._ahead: Future[Claim] | None = None

    @property
    def is_ahead(self) -> bool:
        """Whether the next claim has been begun."""
        return self._ahead is not None

    def take(self, limit: int) -> Claim:
        """The claim that was begun ahead, or a new one of up to `limit` rows."""
        ahead, self._ahead = self._ahead, None
        return self._claim(limit) if ahead is None else ahead.result()

    def take_followers(self, keys: Sequence[str], limit: int) -> Claim | None:
        """Rows behind those of these ordering keys that were just sent; None when there are none.

        Also None while a claim is ahead: that one comes first.
        """
        if not keys or self._ahead is not None:
            return None
        claim = self._claim(limit, keys)
        return claim if claim.rows else None

    def look_ahead(self, limit: int) -> None:
        """Begin the next claim, beside whatever this thread does meanwhile."""
        if self._thread is None:
            self._thread = self._beside()
        self._ahead = self._thread.submit(self._claim, limit)

    def end(self) -> Claim | None:
        """End of a sweep: the claim that nobody will take any more; its errors are dropped.

        Waits for a claim under way: its statements end by themselves.
        """
        thread, self._thread = self._thread, None
        ahead, self._ahead = self._ahead, None
        if thread is not None:
            thread.shutdown(wait=True)
            self._store().rest()
        if ahead is None or ahead.exception() is not None:
            return None
        return ahead.result()

    def _claim(self, limit: int, keys: Sequence[str] = ()) -> Claim:
        token = new_token()
        lease_end_s = self._clock.monotonic_s() + self._lease_ms / 1000
        rows = self._store().claim(token=token, limit=limit, lease_ms=self._lease_ms, keys=keys)
        is_full = len(rows) == limit or sum(len(row.record) for row in rows) >= CLAIM_BYTES_MAX
        return Claim(token=token, rows=rows, is_full=is_full, lease_end_s=lease_end_s)
