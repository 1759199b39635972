"""The sweeps of one database, the waits between them, its retention, and its totals.

The next sweep follows at once while rows are left, after the poll interval if nothing was due,
after the longer idle interval if nothing was due for a minute, and at growing intervals during an
outage. `sweep.py` decides about rows, `workers.py` about threads.

Retention deletes expired rows that were kept for an audit, and expired ids of the inbox, in a bounded
number of small transactions at a time. Any number of watchdogs may do this together; at worst one of them
deletes nothing. So no leader is elected for it.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from qmq_client.clock import SYSTEM_CLOCK, Clock
from qmq_client.database.errors import database_errors
from qmq_client.errors import DatabaseUnavailableError, OutboxMissingError
from qmq_client.inbox.dialect import inbox_dialect
from qmq_client.outbox.database.deadlock import repeat_when_undone
from qmq_client.outbox.row import OutboxCounts
from qmq_watchdog.databases import ConnectionBudget, Database
from qmq_watchdog.events import log_event
from qmq_watchdog.options import DaemonOptions
from qmq_watchdog.outage import BROKER_UNREACHABLE, FAULT, BrokerGate, Outage, kind_of
from qmq_watchdog.sweep import COUNTED_ROWS_MAX, Sweep, SweepCounts

ROWS_PER_TRANSACTION: Final = 500
#: Most transactions of one kind in one pass; the rest waits for the next pass.
_TRANSACTIONS_MAX: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class MaintenanceCounts:
    """Counts of deleted rows."""

    sent_purged: int = 0
    inbox_purged: int = 0
    #: Whether more may be left.
    is_cut_short: bool = False


def maintain(
    database: Database, is_stopped: Callable[[], bool] = lambda: False
) -> MaintenanceCounts:
    """Delete what has expired in this database; SQLAlchemy's errors pass through."""

    def purge_sent() -> int:
        return database.store.purge_sent(limit=ROWS_PER_TRANSACTION)

    # Always checked: the setting may have been removed while rows were already kept
    sent = list(_batches(purge_sent, is_stopped))
    ids: list[int] = []
    if database.keep_inbox_ms is not None:
        ids = list(_batches(lambda: _purge_inbox(database), is_stopped))
    return MaintenanceCounts(
        sent_purged=sum(sent),
        inbox_purged=sum(ids),
        is_cut_short=any(each[-1:] == [ROWS_PER_TRANSACTION] for each in (sent, ids)),
    )


def _batches(batch: Callable[[], int], is_stopped: Callable[[], bool]) -> Iterator[int]:
    for _ in range(_TRANSACTIONS_MAX):
        count = repeat_when_undone(
            batch
        )  # a consumer may be inserting the same ids at the same time
        yield count
        if count < ROWS_PER_TRANSACTION or is_stopped():
            return


def _purge_inbox(database: Database) -> int:
    """One transaction: the oldest ids of all consumer groups."""
    older_than_ms = database.keep_inbox_ms
    assert older_than_ms is not None, "asked by the caller"
    inbox = inbox_dialect(database.engine, database.inbox)
    return database.store.write(
        lambda connection: inbox.purge(
            connection, None, older_than_ms=older_than_ms, limit=ROWS_PER_TRANSACTION
        )
    )


#: A poll wait is shortened at random by up to this share, so that several watchdogs do not sweep in step.
_POLL_JITTER: Final = 0.2
#: The clocks of the database and of this process may drift apart by this much while the broker is unreachable.
_CLOCKS_APART_S: Final = 1.0


@dataclass(slots=True, kw_only=True)
class Totals:
    """The totals of one database's sweeps; the metrics read them while they change."""

    claimed: int = 0
    sent: int = 0
    failed: int = 0
    parked: int = 0
    held: int = 0
    lost: int = 0
    sweeps: int = 0
    seconds: float = 0.0
    #: Failures by kind; the kinds are few and fixed.
    errors: Counter[str] = field(default_factory=Counter)
    #: Monotonic time of the last sweep that the database did not interrupt; None before the first.
    well_at_s: float | None = None
    #: Monotonic time and result of the last sample.
    sampled_at_s: float | None = None
    oldest_unsent_ms: int | None = None
    rows: OutboxCounts | None = None

    def add(self, counts: SweepCounts) -> None:
        """Count one sweep."""
        self.claimed += counts.claimed
        self.sent += counts.sent
        self.failed += counts.failed
        self.parked += counts.parked
        self.held += counts.held
        self.lost += counts.lost
        self.sweeps += 1

    def oldest_unsent_s(self, now_s: float) -> float:
        """Age of the oldest unsent row at the last sample, plus the time since; 0 if none."""
        if self.oldest_unsent_ms is None or self.sampled_at_s is None:
            return 0.0
        return self.oldest_unsent_ms / 1000 + now_s - self.sampled_at_s


class SweepJob:
    """The sweeps of one database and the waits between them. One thread at a time."""

    def __init__(
        self,
        sweep: Sweep,
        options: DaemonOptions,
        random: Callable[[], float],
        *,
        clock: Clock = SYSTEM_CLOCK,
        gate: BrokerGate | None = None,
        budget: ConnectionBudget | None = None,
    ) -> None:
        self.name = sweep.database.name
        self.server = sweep.database.server
        self.database = sweep.database
        self._sweep = sweep
        self._options = options
        self._random = random
        self._clock = clock
        self._gate = gate
        self._budget = budget
        self._outage = Outage(options.backoff, random)
        self._failed_at_s = -math.inf
        #: Whether another process has sent the rows that this job could not send.
        self._was_overtaken = False
        self._busy_at_s = self._maintained_at_s = clock.monotonic_s()
        #: Wait before the next sweep.
        self.delay_s = 0.0
        #: Whether the database carried out the last requests.
        self.is_well = True
        self.totals = Totals()

    @property
    def is_in_trouble(self) -> bool:
        """Whether the last sweep failed, so that the next one waits longer."""
        return self._outage.failures > 0

    @property
    def trouble(self) -> str:
        """The kind of the current failure; empty without one."""
        return self._outage.kind

    def step(self, is_stopped: Callable[[], bool]) -> SweepCounts:
        """One sweep; afterwards `delay_s` says when the next one is wanted."""
        wait_s = 0.0 if self._gate is None else self._gate.wait_s()
        counts = SweepCounts()
        if wait_s == 0 or self._is_sample_due() or self._is_maintenance_due():
            self._visit(counts, is_stopped, is_to_sweep=wait_s == 0)
        self.is_well = counts.error is None
        if counts.error is not None:
            self._fail(counts, kind_of(counts.error))
        elif wait_s > 0:  # the lateness of messages is reported even while none can be sent
            self.delay_s = min(wait_s, self._options.sample_s or wait_s)
        elif counts.unreachable:
            self._fail(counts, BROKER_UNREACHABLE)
        else:
            self._succeed(counts)
        return counts

    def on_fault(self) -> None:
        """A sweep ended with an unforeseen error; try again, but slowly."""
        self.is_well = False
        failure = self._outage.on_failure(FAULT)
        self.totals.errors[FAULT] += 1
        self.delay_s = failure.delay_s

    def close(self) -> None:
        """Close the connections. Requires: no step is under way."""
        self.database.close()
        if self._budget is not None:
            self._budget.forget(self.database)

    def _visit(
        self, counts: SweepCounts, is_stopped: Callable[[], bool], *, is_to_sweep: bool
    ) -> None:
        """Do the work that needs the database's connections."""
        try:
            with self.database.lock:
                if self._budget is not None:
                    self._budget.take(self.database)
                if is_to_sweep:
                    self._do_sweep(counts, is_stopped)
                if counts.error is None:
                    self._look_after(counts, is_stopped)
        finally:
            if self._budget is not None:
                self._budget.give_back(self.database, was_busy=counts.claimed > 0)

    def _do_sweep(self, counts: SweepCounts, is_stopped: Callable[[], bool]) -> None:
        started_s = self._clock.monotonic_s()
        # The job that probes the broker tells the others after its first batch whether they may continue.
        is_trial = self._gate is not None and self._gate.is_shut
        try:
            self._sweep.step(lambda: is_trial or is_stopped(), counts)
        finally:
            self._report_to_gate(counts)
        self.totals.add(counts)
        self.totals.seconds += self._clock.monotonic_s() - started_s

    def _is_maintenance_due(self) -> bool:
        return self._clock.monotonic_s() - self._maintained_at_s >= self._options.maintenance_s

    def _is_sample_due(self) -> bool:
        every_s, at_s = self._options.sample_s, self.totals.sampled_at_s
        return every_s > 0 and (at_s is None or self._clock.monotonic_s() - at_s >= every_s)

    def _report_to_gate(self, counts: SweepCounts) -> None:
        if self._gate is None:
            return
        if counts.unreachable:
            self._gate.on_failure(at_least_s=counts.retry_after_s)
        elif counts.sent or counts.failed or counts.parked:
            self._gate.on_success()
        else:
            self._gate.on_nothing()

    def _look_after(self, counts: SweepCounts, is_stopped: Callable[[], bool]) -> None:
        """Work that is due less often than a sweep: retention, and the sample for the metrics."""
        now_s = self._clock.monotonic_s()
        self.totals.well_at_s = now_s
        if counts.claimed:
            self._busy_at_s = now_s
        try:
            with database_errors(self.name):
                if self.trouble == BROKER_UNREACHABLE and not counts.claimed:
                    self._was_overtaken = self._has_nothing_from_before(now_s)
                if self._is_sample_due():
                    self._sample(now_s)
                if self._is_maintenance_due() and not is_stopped():
                    self._maintain(now_s, is_stopped)
        except (DatabaseUnavailableError, OutboxMissingError) as error:
            counts.error = error

    def _has_nothing_from_before(self, now_s: float) -> bool:
        """Whether every unsent row is younger than the last failure."""
        age_ms = self.database.store.oldest_unsent_age_ms()
        failed_s = now_s - self._failed_at_s
        return age_ms is None or age_ms / 1000 + _CLOCKS_APART_S < failed_s

    def _sample(self, now_s: float) -> None:
        store = self.database.store
        self.totals.oldest_unsent_ms = store.oldest_unsent_age_ms()
        self.totals.rows = store.counts(rows_max=COUNTED_ROWS_MAX)
        self.totals.sampled_at_s = now_s

    def _maintain(self, now_s: float, is_stopped: Callable[[], bool]) -> None:
        self._maintained_at_s = now_s
        done = maintain(self.database, is_stopped)
        if done.is_cut_short:
            self._maintained_at_s = now_s - self._options.maintenance_s
        if done.sent_purged or done.inbox_purged:
            log_event(
                "rows.purged",
                level=logging.DEBUG,
                database=self.name,
                sent=done.sent_purged,
                inbox=done.inbox_purged,
            )

    def _fail(self, counts: SweepCounts, kind: str) -> None:
        failure = self._outage.on_failure(kind, at_least_s=counts.retry_after_s)
        self._failed_at_s, self._was_overtaken = self._clock.monotonic_s(), False
        self.totals.errors[kind] += 1
        self.delay_s = failure.delay_s
        log_event(
            "sweep.failed",
            level=logging.WARNING if failure.is_news else logging.DEBUG,
            database=self.name,
            kind=kind,
            failures=self._outage.failures,
            next_s=failure.delay_s,
            **_worth_saying(counts),
        )

    def _succeed(self, counts: SweepCounts) -> None:
        # Accepted rows show that the broker is back, also those that another watchdog or the sender
        # sent; a sweep without due rows did not ask the broker.
        is_over = counts.sent > 0 or self._outage.kind != BROKER_UNREACHABLE or self._was_overtaken
        if is_over and (ended := self._outage.on_success()):
            log_event("sweep.recovered", database=self.name, failures=ended)
        self.delay_s = counts.rate_wait_s if counts.is_cut_short else self._poll_s()
        log_event(
            "sweep.done",
            level=logging.INFO if counts.claimed else logging.DEBUG,
            database=self.name,
            **_worth_saying(counts),
        )
        if counts.parked:
            log_event(
                "rows.parked",
                level=logging.ERROR,
                database=self.name,
                parked=counts.parked,
                remedy="qmq outbox list --state parked",
            )

    def _poll_s(self) -> float:
        poll_s = self._options.poll_s
        if self._clock.monotonic_s() - self._busy_at_s >= self._options.idle_after_s:
            poll_s = max(poll_s, self._options.idle_poll_s)
        return poll_s * (1.0 - _POLL_JITTER * self._random())


def sweep_jobs(jobs: Mapping[str, object]) -> list[SweepJob]:
    """Those of the jobs that sweep a database."""
    return [job for job in jobs.values() if isinstance(job, SweepJob)]


def _worth_saying(counts: SweepCounts) -> dict[str, str | int | float | bool | None]:
    """The counts without zeros."""
    return {name: value for name, value in counts.as_fields().items() if value}
