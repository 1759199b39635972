"""The sweep: one bounded pass over the due rows of one database.

It claims a batch in one transaction, publishes it outside any transaction, and settles it in
another one. Every claim has its own token and every settlement names it, so any number of watchdogs
and publishers may work on the same rows: one that was paused or slow changes nothing when it
continues. Rows are found by state and due time, by the database's clock. A row that fails gets a
later due time of its own and so never blocks others; a row whose ordering key has an earlier unsent
row elsewhere is returned untried.
"""

from __future__ import annotations

import math
import random as random_source
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field, fields
from itertools import islice
from typing import Final

from qmq_client.clock import SYSTEM_CLOCK, Clock
from qmq_client.database.errors import database_errors
from qmq_client.errors import DatabaseUnavailableError, OutboxMissingError, QmqError
from qmq_client.outbox.row import BatchOutcome, FailedRow, OutboxRow
from qmq_client.publishing.forbidden import ForbiddenSubjects
from qmq_client.publishing.ordering import OrderedBatch, accepted_pairs, order_batch
from qmq_client.publishing.publish import publish_rows
from qmq_client.retry import Backoff
from qmq_client.settings.sections import WatchdogSection
from qmq_client.transport.port import Transport
from qmq_watchdog.claiming import (
    Claim,
    Claims,
    RowRate,
    Settlement,
    Settlements,
    Threads,
    two_threads,
)
from qmq_watchdog.databases import Database

#: Rows of the first claim after a start or a failure: enough to learn the size of records and
#: whether the broker is reachable, few to hold in memory or to return.
PROBE_ROWS: Final = 100
#: Ordering keys whose followers are claimed in one step …
KEYS_FOLLOWED_MAX: Final = 500
#: … and that are remembered until then. Followers of other keys wait for their due time.
KEYS_KEPT_MAX: Final = 10_000
#: Claims grow while a batch stays below half of this and shrink above it. This bounds the memory of
#: batches, except for the first one whose records are larger than those before, which ends at
#: `CLAIM_BYTES_MAX` of the outbox. Less if the connection to the broker is too slow for it …
BATCH_BYTES_AIM: Final = 8 * 1024 * 1024
#: … down to this, which 20 kbit/s carry within the time limit of a request.
BATCH_BYTES_AIM_MIN: Final = 64 * 1024
#: After a quick request, within this share of a lease, the next one may be twice as large;
_QUICK_SHARE: Final = 0.25
#: after a slower one, only larger by this factor, because a request that is too large costs a whole time-out.
_SLOW_GROWTH: Final = 1 / 16
#: The error of a row that was claimed ahead and returned untried.
NOT_REACHED: Final = "claimed by a sweep that ended before it was sent"
#: Rows of each state are counted up to this number, so that counting stays cheap.
COUNTED_ROWS_MAX: Final = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """Bounds of a sweep; see `qmq_client.settings.sections.WatchdogSection` for the reasons."""

    batch_rows: int = WatchdogSection().batch_rows
    lease_ms: int = WatchdogSection().lease_ms
    max_attempts: int = WatchdogSection().max_attempts
    rows_max: int = WatchdogSection().sweep_rows_max
    seconds_max: float = WatchdogSection().sweep_s_max
    backoff: Backoff = field(default_factory=Backoff)

    @classmethod
    def from_config(
        cls, section: WatchdogSection, *, seconds_max: float = math.inf
    ) -> SweepOptions:
        """The options of a configuration, with at most `seconds_max`."""
        return cls(
            batch_rows=section.batch_rows,
            lease_ms=section.lease_ms,
            max_attempts=section.max_attempts,
            rows_max=section.sweep_rows_max,
            seconds_max=min(section.sweep_s_max, seconds_max),
        )


@dataclass(slots=True, kw_only=True)
class SweepCounts:
    """Counts of one sweep."""

    claimed: int = 0
    #: Accepted by the broker, even if the database did not record it; then they are sent again.
    sent: int = 0
    #: Returned, to be tried again later.
    failed: int = 0
    #: Parked for a person.
    parked: int = 0
    #: Returned untried: an earlier message of the same ordering key is still unsent.
    held: int = 0
    #: Claims that ended before they could be settled; another process has these rows now.
    lost: int = 0
    #: The broker gave no answer, or accepts nothing now.
    unreachable: bool = False
    #: The pause that it requested.
    retry_after_s: float = 0.0
    #: A bound of the sweep was reached, so due rows may be left.
    is_cut_short: bool = False
    #: When more rows may be sent, if the rate is limited.
    rate_wait_s: float = 0.0
    #: The reason why the last unsent row was not sent.
    last_error: str = ""
    #: All parked rows, including those of earlier sweeps, counted up to `COUNTED_ROWS_MAX`; None if
    #: they were not counted.
    parked_total: int | None = None
    #: The error of the database that ended the sweep.
    error: QmqError | None = None

    def add(self, outcome: BatchOutcome) -> None:
        """Count a batch that was tried."""
        self.sent += len(outcome.sent)
        self.failed += len(outcome.failed)
        self.parked += len(outcome.parked)
        self.unreachable = outcome.unreachable
        self.retry_after_s = outcome.retry_after_s
        if outcome.failed:
            self.last_error = outcome.failed[-1].error
        elif outcome.parked:
            self.last_error = outcome.parked[-1].error

    def as_fields(self) -> dict[str, str | int | float | bool | None]:
        """The counts for a log line or for JSON."""
        shown = {each.name: getattr(self, each.name) for each in fields(self)}
        shown["error"] = "" if self.error is None else str(self.error)
        return shown


class Sweep:
    """Runs the sweeps of one database. One thread at a time."""

    def __init__(
        self,
        database: Database,
        transport: Transport,
        options: SweepOptions | None = None,
        *,
        clock: Clock = SYSTEM_CLOCK,
        random: Callable[[], float] = random_source.random,
        executor: Callable[[], Executor] = two_threads,
    ) -> None:
        """`executor` creates, for each sweep, the executor of parallel claims and settlements."""
        self.database = database
        self._transport = transport
        self._options = SweepOptions() if options is None else options
        self._clock = clock
        self._random = random
        self._is_checked = False
        self._forbidden = ForbiddenSubjects()
        self._rate = RowRate(database.rows_per_s, clock.monotonic_s())
        self._limit_rows = min(PROBE_ROWS, self._options.batch_rows)
        self._aim_bytes = BATCH_BYTES_AIM
        #: How long the last batch took to send.
        self._batch_s = math.inf
        #: Ordering keys of rows just sent: the rows after them need not wait for their due time.
        self._keys: dict[str, None] = {}
        self._threads = Threads(executor)
        self._claims = Claims(
            lambda: self.database.store, clock, self._threads, lease_ms=self._options.lease_ms
        )
        self._settlements = Settlements(
            lambda: self.database.store, self._threads, keep_sent_ms=database.keep_sent_ms
        )

    @property
    def name(self) -> str:
        """The database's."""
        return self.database.name

    @property
    def server(self) -> str:
        """The database's."""
        return self.database.server

    def step(
        self,
        is_stopped: Callable[[], bool] = lambda: False,
        counts: SweepCounts | None = None,
    ) -> SweepCounts:
        """Send due rows until none is left, a limit is reached, or `is_stopped` returns True.

        Does not raise if a database or broker is unreachable; `counts`, given or new, records it.
        """
        counts = SweepCounts() if counts is None else counts
        end_s = self._clock.monotonic_s() + self._options.seconds_max
        try:
            with database_errors(self.database.name):
                self._check_once()
                try:
                    while self._batch(counts):
                        if (
                            counts.claimed >= self._options.rows_max
                            or self._clock.monotonic_s() >= end_s
                            or is_stopped()
                        ):
                            counts.is_cut_short = True
                            break
                finally:
                    counts.lost += self._settlements.wait()
        except (DatabaseUnavailableError, OutboxMissingError) as error:
            counts.error = error
        finally:
            self._return_ahead(counts)
        if counts.error is not None:
            # The next attempt uses a new connection, which is checked before use: this one may lead
            # to a server that has become a replica.
            self.database.close()
            self._is_checked = False
        if counts.error is not None or counts.unreachable:
            self._limit_rows = min(PROBE_ROWS, self._limit_rows)
        return counts

    def count_parked(self, counts: SweepCounts) -> None:
        """Count all parked rows, up to a bound."""
        try:
            with database_errors(self.database.name):
                found = self.database.store.counts(rows_max=COUNTED_ROWS_MAX)
                counts.parked_total = found.parked
        except (DatabaseUnavailableError, OutboxMissingError) as error:
            counts.error = counts.error or error

    def _batch(self, counts: SweepCounts) -> bool:
        """Run one batch; returns whether to try another."""
        limit = self._rows_allowed(counts)
        if limit < 1:
            return False
        keys = self._keys_to_follow()
        claim = self._claims.take_followers(keys, limit) or self._claims.take(limit)
        rows = claim.rows
        if not rows:
            return self._claims.is_ahead or bool(self._keys)
        counts.claimed += len(rows)
        self._rate.take(len(rows))
        started_s = self._clock.monotonic_s()
        if started_s >= claim.lease_end_s:
            # This process was paused for so long that the rows may belong to another by now: leave them.
            counts.lost += len(rows)
            return True
        self._adapt(rows)
        if counts.sent and claim.is_full and not self._rate.is_limited and not keys:
            self._look_ahead(counts)
        outcome = self._send(claim, counts, started_s)
        is_more = claim.is_full or self._claims.is_ahead or bool(self._keys)
        return is_more and not outcome.unreachable

    def _keys_to_follow(self) -> list[str]:
        """Keys whose followers are claimed next; none while a claim is ahead, which is used first."""
        if self._claims.is_ahead:
            return []
        keys = list(islice(self._keys, KEYS_FOLLOWED_MAX))
        for key in keys:
            del self._keys[key]
        return keys

    def _rows_allowed(self, counts: SweepCounts) -> int:
        """How many rows the next claim may have, by its size, this sweep's limit and the rate."""
        limit = min(self._limit_rows, self._options.rows_max - counts.claimed)
        allowed = self._rate.allowed(self._clock.monotonic_s())
        if allowed is None:
            return limit
        if allowed < 1:
            counts.is_cut_short, counts.rate_wait_s = True, self._rate.wait_s()
        return min(limit, allowed)

    def _send(self, claim: Claim, counts: SweepCounts, started_s: float) -> BatchOutcome:
        """Publish the rows that are ready, and settle all of them."""
        is_keyed = any(row.ordering_key is not None for row in claim.rows)
        ordered = self._order(claim.rows, counts) if is_keyed else OrderedBatch(ready=claim.rows)
        outcome = publish_rows(
            ordered.ready,
            transport=self._transport,
            backoff=self._options.backoff,
            max_attempts=self._options.max_attempts,
            random=self._random,
            forbidden=self._forbidden,
        )
        counts.add(outcome)
        sent_s = self._clock.monotonic_s()
        self._batch_s = sent_s - started_s
        self._adapt_to_line(ordered.ready, outcome)
        if self._claims.is_ahead and claim.is_full and not is_keyed and not outcome.unreachable:
            self._look_ahead(counts)
        self._settle(
            Settlement(
                token=claim.token,
                rows=claim.rows if sent_s < claim.lease_end_s else (),
                outcome=outcome,
                held=ordered.returned(),
            ),
            counts,
        )
        counts.held += len(ordered.held)
        if len(self._keys) < KEYS_KEPT_MAX:
            accepted = accepted_pairs(ordered.ready, outcome.sent)
            self._keys |= dict.fromkeys(key for _, key in sorted(accepted))
        return outcome

    def _look_ahead(self, counts: SweepCounts) -> None:
        """Begin a claim parallel to this batch, within the limit of the sweep."""
        rows_left = self._options.rows_max - counts.claimed - self._claims.rows_ahead_max
        self._claims.look_ahead(min(self._limit_rows, rows_left), batch_s=self._batch_s)

    def _order(self, rows: Sequence[OutboxRow], counts: SweepCounts) -> OrderedBatch:
        """Divide rows by the order of their keys."""
        counts.lost += self._settlements.wait()  # the state of earlier rows must be final
        if self._claims.is_ahead:
            return self._threads.submit(order_batch, rows, self.database.store).result()
        return order_batch(rows, self.database.store)

    def _return_ahead(self, counts: SweepCounts) -> None:
        """Return rows claimed ahead that this sweep will not send: they are due again soon."""
        claims = self._claims.end()
        if self._threads.end():
            self.database.store.rest()
        delay_ms = self._options.backoff.delay_ms(1, self._random()) if counts.unreachable else 0
        for claim in claims:
            back = tuple(
                FailedRow(
                    message_id=row.message_id,
                    delay_ms=delay_ms,
                    error=counts.last_error if counts.unreachable else NOT_REACHED,
                    is_attempt=False,
                )
                for row in claim.rows
            )
            # If this fails too, they fall due at the end of their lease.
            with suppress(DatabaseUnavailableError, OutboxMissingError), database_errors(self.name):
                self.database.store.settle(BatchOutcome(failed=back), token=claim.token)

    def _settle(self, settlement: Settlement, counts: SweepCounts) -> None:
        """Record the outcome of the batch, parallel to the next one if threads are in use."""
        counts.lost += self._settlements.wait()
        if self._claims.is_ahead:
            self._settlements.begin(settlement)
        else:
            counts.lost += self._settlements.settle(settlement)

    def _check_once(self) -> None:
        if not self._is_checked:
            self.database.store.check_schema(role=self.database.role, asks_rights=True)
            self._is_checked = True

    def _adapt(self, rows: Sequence[OutboxRow]) -> None:
        """Choose the size of the next claim by the size of this one."""
        batch_bytes = _bytes_of(rows)
        if batch_bytes > self._aim_bytes:
            self._limit_rows = max(1, len(rows) * self._aim_bytes // batch_bytes)
        elif batch_bytes <= self._aim_bytes // 2 and len(rows) == self._limit_rows:
            self._limit_rows = min(self._options.batch_rows, self._limit_rows * 2)

    def _adapt_to_line(self, rows: Sequence[OutboxRow], outcome: BatchOutcome) -> None:
        """Also choose it by the success of this one.

        A batch that is too large for the connection is never answered, even if it is sent again.
        """
        lease_share = self._batch_s * 1000 / self._options.lease_ms
        aim_bytes = self._aim_bytes
        if outcome.unreachable and rows and lease_share >= 1:
            aim_bytes = min(aim_bytes, _bytes_of(rows)) // 2
            self._limit_rows = max(1, len(rows) // 2)
        elif outcome.sent:
            aim_bytes += int(aim_bytes * (1 if lease_share < _QUICK_SHARE else _SLOW_GROWTH))
        self._aim_bytes = max(BATCH_BYTES_AIM_MIN, min(BATCH_BYTES_AIM, aim_bytes))


def _bytes_of(rows: Sequence[OutboxRow]) -> int:
    return sum(len(row.record) for row in rows)
