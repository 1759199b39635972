"""Claims of one sweep: the next batches are claimed while the present one goes to the broker.

Up to two claims are ahead, and only in a sweep that does well, that is, one that has sent a full
batch. A claim is first work for the server, then for this process, which reads the rows: with two,
the server works on one while the other is read. They begin one broker request apart: begun together
they would take alternate rows, and rows in one piece are quicker to change.

Each lease runs from the beginning of its claim, so the second waits for two batches within it: if
batches take long, only one claim is ahead. When the sweep has ended, `Sweep` gives back the claims
that are left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

from qmq_client.clock import Clock
from qmq_client.ids import new_token
from qmq_client.outbox.committed.store import OutboxStore
from qmq_client.outbox.database.claiming import CLAIM_BYTES_MAX
from qmq_client.outbox.row import OutboxRow
from qmq_watchdog.beside import Beside

#: What is claimed ahead must find room in memory, and be sent within its lease.
CLAIMS_AHEAD_MAX: Final = 2
#: Share of the lease: a second claim is ahead while a batch takes less, because it waits for two.
QUICK_SHARE: Final = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Rows that this watchdog owns until the lease ends."""

    token: bytes
    rows: list[OutboxRow]
    #: As many rows as were asked for, or as large as allowed: there may be more.
    is_full: bool
    lease_end_s: float


class Claims:
    """Claims on one database. One thread at a time; claims ahead run beside it."""

    def __init__(
        self, store: Callable[[], OutboxStore], clock: Clock, beside: Beside, *, lease_ms: int
    ) -> None:
        self._store = store
        self._clock = clock
        self._beside = beside
        self._lease_ms = lease_ms
        #: The next one first, each with the rows it may bring.
        self._ahead: deque[tuple[Future[Claim], int]] = deque()

    @property
    def is_ahead(self) -> bool:
        """Whether the next claim has begun."""
        return bool(self._ahead)

    @property
    def rows_ahead_max(self) -> int:
        """How many rows the claims ahead may bring."""
        return sum(limit for _, limit in self._ahead)

    def take(self, limit: int) -> Claim:
        """The first claim begun ahead, or a new one of up to `limit` rows."""
        if not self._ahead:
            return self._claim(limit)
        ahead, _ = self._ahead.popleft()
        return ahead.result()

    def take_followers(self, keys: Sequence[str], limit: int) -> Claim | None:
        """Rows behind those sent with these ordering keys; None if there are none."""
        if not keys:
            return None
        claim = self._claim(limit, keys)
        return claim if claim.rows else None

    def look_ahead(self, limit: int, *, batch_s: float) -> None:
        """Begin one more claim beside this thread, unless enough are ahead.

        `batch_s` is how long the last batch took to send.
        """
        is_quick = batch_s * 1000 < self._lease_ms * QUICK_SHARE
        if limit > 0 and len(self._ahead) < (CLAIMS_AHEAD_MAX if is_quick else 1):
            self._ahead.append((self._beside.submit(self._claim, limit), limit))

    def end(self) -> list[Claim]:
        """End of a sweep: the claims that nobody will take any more; their errors are dropped.

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
