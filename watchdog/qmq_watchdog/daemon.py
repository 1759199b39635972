"""`qmq watchdog run`: sweeps of many databases, each at its own pace.

Every database is a job of its own with a thread of its own, so one that hangs delays no other. A
job runs once and is scheduled again when it has ended: at once while rows are left, after the poll
time when there was nothing, later and later while something is away. Nothing is decided here about
rows; that is `sweep.py`.

APScheduler goes by the wall clock, which may be set back; `step` notices and starts waiting jobs
anew, so no outage is longer than the jump was noticed late.
"""

from __future__ import annotations

import logging
import random as random_source
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.jobstores.base import JobLookupError
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.date import DateTrigger

from qmq_client.clock import SYSTEM_CLOCK, Clock
from qmq_client.config import WatchdogSection
from qmq_client.retry import Backoff
from qmq_watchdog.events import LOGGER, log_event
from qmq_watchdog.outage import Outage
from qmq_watchdog.sweep import Sweep, SweepCounts

#: Share by which a poll wait may be shorter, so that several watchdogs spread out.
_POLL_JITTER: Final = 0.2
_FIRST_RETRY_MS: Final = 1_000
_BROKER_AWAY: Final = "broker_unreachable"
_AT_ONCE: Final = datetime.fromtimestamp(0, UTC)
#: A wall clock that moved this far against the monotonic one was set, not slewed.
_JUMP_MS: Final = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonOptions:
    """Pace of the daemon; see `qmq_client.config.WatchdogSection`."""

    poll_s: float = WatchdogSection().poll_s
    outage_s_max: float = WatchdogSection().outage_s_max

    @classmethod
    def from_config(cls, section: WatchdogSection) -> DaemonOptions:
        """The options that a configuration asks for."""
        return cls(poll_s=section.poll_s, outage_s_max=section.outage_s_max)


class SweepJob:
    """The sweeps of one database and the wait between them. One thread at a time."""

    def __init__(self, sweep: Sweep, options: DaemonOptions, random: Callable[[], float]) -> None:
        self.name = sweep.database.name
        self._sweep = sweep
        self._options = options
        self._random = random
        max_ms = max(_FIRST_RETRY_MS, round(options.outage_s_max * 1000))
        self._outage = Outage(Backoff(first_ms=_FIRST_RETRY_MS, max_ms=max_ms), random)
        #: Wait before the next sweep.
        self.delay_s = 0.0

    def step(self, is_stopped: Callable[[], bool]) -> SweepCounts:
        """One sweep; afterwards `delay_s` says when the next one is wanted."""
        counts = self._sweep.step(is_stopped)
        if counts.error is not None:
            self._fail(counts, counts.error.code)
        elif counts.unreachable:
            self._fail(counts, _BROKER_AWAY)
        else:
            self._succeed(counts)
        return counts

    def on_fault(self) -> None:
        """A sweep ended with an error that nobody foresaw; try again, but slowly."""
        failure = self._outage.on_failure("fault")
        self.delay_s = failure.delay_s

    def _fail(self, counts: SweepCounts, kind: str) -> None:
        failure = self._outage.on_failure(kind, at_least_s=counts.retry_after_s)
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
        # That the broker is back shows by what it took; where nothing was due, nobody asked it.
        is_over = counts.sent > 0 or self._outage.kind != _BROKER_AWAY
        if is_over and (ended := self._outage.on_success()):
            log_event("sweep.recovered", database=self.name, failures=ended)
        jitter = 1.0 - _POLL_JITTER * self._random()
        self.delay_s = 0.0 if counts.is_cut_short else self._options.poll_s * jitter
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


class Daemon:
    """Runs the jobs until it is stopped. `start`, `step` and `stop` belong to one thread."""

    def __init__(
        self,
        sweeps: Sequence[Sweep],
        options: DaemonOptions | None = None,
        *,
        clock: Clock = SYSTEM_CLOCK,
        random: Callable[[], float] = random_source.random,
    ) -> None:
        options = DaemonOptions() if options is None else options
        self._jobs = [SweepJob(sweep, options, random) for sweep in sweeps]
        self._clock = clock
        self._jump_from_ms = self._clock_difference_ms()
        self._changed = threading.Condition()
        self._running = 0
        self._is_stopped = False
        self._scheduler = BackgroundScheduler(
            timezone=UTC,
            executors={"default": ThreadPoolExecutor(max(1, len(sweeps)))},
            job_defaults={"max_instances": 1, "coalesce": True, "misfire_grace_time": None},
        )

    def start(self) -> None:
        """Sweep every database now and from now on."""
        self._scheduler.start()
        for job in self._jobs:
            self._schedule(job, _AT_ONCE)

    def step(self) -> bool:
        """Look whether the wall clock was set; if so, start all waiting jobs anew."""
        difference_ms = self._clock_difference_ms()
        moved_ms = difference_ms - self._jump_from_ms
        self._jump_from_ms = difference_ms
        if abs(moved_ms) < _JUMP_MS:
            return False
        log_event("clock.jumped", level=logging.WARNING, moved_ms=moved_ms)
        for waiting in self._scheduler.get_jobs():
            with suppress(JobLookupError):  # it has just been started
                waiting.modify(next_run_time=_AT_ONCE)
        return True

    def wait_idle(self, deadline_s: float) -> bool:
        """Wait until no sweep is under way; whether that came about in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._running == 0, deadline_s)

    def stop(self, deadline_s: float) -> bool:
        """Let each sweep end after its batch; whether all did before the deadline.

        Rows of one that did not are only claimed, and fall due again. Safe to call twice.
        """
        with self._changed:
            is_first, self._is_stopped = not self._is_stopped, True
        if is_first:
            self._scheduler.shutdown(wait=False)
        return self.wait_idle(deadline_s)

    def _run(self, job: SweepJob) -> None:
        with self._changed:
            self._running += 1
        try:
            if not self._is_stopped:
                job.step(lambda: self._is_stopped)
        except Exception:  # the top of a loop: a fault of ours must not end the sweeps for good
            job.on_fault()
            LOGGER.exception("sweep.fault database=%s", job.name)
        finally:
            at_ms = self._clock.now_ms() + round(job.delay_s * 1000)
            self._schedule(job, datetime.fromtimestamp(at_ms / 1000, UTC))
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def _schedule(self, job: SweepJob, run_at: datetime) -> None:
        # Each run is a scheduler's job with an id of its own: APScheduler may tell that a short job
        # has ended before it has noted that it began, and would then remove its successor by id.
        if not self._is_stopped:
            self._scheduler.add_job(self._run, DateTrigger(run_at), args=(job,), name=job.name)

    def _clock_difference_ms(self) -> int:
        return self._clock.now_ms() - round(self._clock.monotonic_s() * 1000)


def _worth_saying(counts: SweepCounts) -> dict[str, str | int | float | bool | None]:
    """The counts without those that are nothing."""
    return {name: value for name, value in counts.as_fields().items() if value}
