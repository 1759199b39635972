"""The daemon of `qmq watchdog run`: schedules jobs on the threads of `workers.py`.

APScheduler times the waits: at the end of its wait a job is offered to the workers. It runs once
and then waits again, so it never runs twice at once, and runs of a slow job do not pile up. Jobs
may come and go while the daemon runs.

Waits use the wall clock, which may be set back. `step` detects that and restarts all waits, so the
jump delays a job only until it is detected.
"""

from __future__ import annotations

import logging
import random as random_source
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final, Protocol

from apscheduler.executors.debug import DebugExecutor
from apscheduler.jobstores.base import JobLookupError
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.schedulers.base import STATE_RUNNING
from apscheduler.triggers.date import DateTrigger

from qmq_client.clock import SYSTEM_CLOCK, Clock
from qmq_watchdog.events import LOGGER, log_event
from qmq_watchdog.options import DaemonOptions
from qmq_watchdog.sweep import Sweep
from qmq_watchdog.sweep_job import SweepJob
from qmq_watchdog.workers import Workers

_AT_ONCE: Final = datetime.fromtimestamp(0, UTC)


class Waits:
    """The pending calls. Life cycle: `start`, then calls from any thread, then `end` once."""

    def __init__(self) -> None:
        self._scheduler = BackgroundScheduler(
            timezone=UTC,
            executors={"default": DebugExecutor()},  # in the scheduler's own thread
            job_defaults={"max_instances": 1, "coalesce": True, "misfire_grace_time": None},
        )

    @property
    def is_running(self) -> bool:
        """Whether calls are made: from `start` until `end` begins."""
        return bool(self._scheduler.state == STATE_RUNNING)

    def start(self) -> None:
        """Start making calls."""
        self._scheduler.start()

    def call_at(self, at_ms: int, call: Callable[..., None], *arguments: Any) -> None:
        """Make this call at this wall-clock time; independent of any other pending call."""
        run_at = datetime.fromtimestamp(at_ms / 1000, UTC)
        self._scheduler.add_job(call, DateTrigger(run_at), args=arguments)

    def call_all_now(self) -> None:
        """Make every pending call now."""
        for waiting in self._scheduler.get_jobs():
            with suppress(JobLookupError):  # the call has just been made
                waiting.modify(next_run_time=_AT_ONCE)

    def end(self) -> None:
        """Stop making calls; returns when no call is in progress.

        A scheduler that is shut down while it makes a call looks for the call's job in vain and
        ends its thread with a traceback. So it is paused first, and a call in progress is waited
        for.
        """
        self._scheduler.pause()
        self._scheduler.remove_all_jobs()  # must wait for a round of calls
        self._scheduler.shutdown(wait=False)


#: A wall clock that moved this far against the monotonic one was set, not slewed.
_JUMP_MS: Final = 2_000
#: A run is slow if it takes this much longer than its share.
_SLOW_S: Final = 1.0


class Job(Protocol):
    """A periodic job; `SweepJob` is one."""

    name: str
    server: str
    #: Wait before the next step.
    delay_s: float
    #: Whether the last step succeeded.
    is_well: bool

    @property
    def is_in_trouble(self) -> bool:
        """Whether the last step failed, so that the next one waits longer."""
        ...

    @property
    def trouble(self) -> str:
        """The kind of the current failure; empty without one."""
        ...

    def step(self, is_stopped: Callable[[], bool]) -> object:
        """Do one bounded pass of the work."""
        ...

    def on_fault(self) -> None:
        """A step ended with an unforeseen error."""
        ...

    def close(self) -> None:
        """Release resources: the job will not run again."""
        ...


class Daemon:
    """Runs jobs until stopped. `start`, `step` and `stop` belong to one thread."""

    def __init__(
        self,
        sweeps: Sequence[Sweep] = (),
        options: DaemonOptions | None = None,
        *,
        clock: Clock = SYSTEM_CLOCK,
        random: Callable[[], float] = random_source.random,
    ) -> None:
        options = DaemonOptions() if options is None else options
        self._clock = clock
        self._jump_from_ms = self._clock_difference_ms()
        self._lock = threading.Lock()
        self._jobs: dict[str, Job] = {}
        self._is_started = self._is_stopped = False
        self._workers: Workers[Job] = Workers(
            self._run,
            threads=options.workers,
            isolated_max=options.isolated_workers,
            slow_s=options.share_s + _SLOW_S,
            clock=clock,
        )
        self._waits = Waits()
        for sweep in sweeps:
            self.add(SweepJob(sweep, options, random, clock=clock))

    def start(self) -> None:
        """Start all jobs."""
        self._waits.start()
        with self._lock:
            self._is_started = True
            jobs = list(self._jobs.values())
        for job in jobs:
            self._workers.offer(job)

    def add(self, job: Job) -> None:
        """Add a job; if the daemon runs, it starts at once. A job of the same name is removed."""
        self.remove(job.name)
        with self._lock:
            self._jobs[job.name] = job
            is_started = self._is_started
        if is_started:
            self._workers.offer(job)

    def remove(self, name: str) -> None:
        """Remove a job: it does not run again, and is closed once it is no longer under way."""
        with self._lock:
            job = self._jobs.pop(name, None)
            is_started = self._is_started
        if job is None:
            return
        self._workers.forget(job)
        if is_started:
            self._workers.offer(job)  # a worker closes it, after a step that may be under way
        else:
            job.close()

    def jobs(self) -> Mapping[str, Job]:
        """The current jobs by name."""
        with self._lock:
            return dict(self._jobs)

    def under_way(self) -> tuple[int, int, int]:
        """See `Workers.under_way`."""
        return self._workers.under_way()

    def step(self) -> bool:
        """Check for slow jobs and jumps of the wall clock; returns whether it was set.

        Call it a few times a second.
        """
        self._workers.look()
        difference_ms = self._clock_difference_ms()
        moved_ms = difference_ms - self._jump_from_ms
        self._jump_from_ms = difference_ms
        if abs(moved_ms) < _JUMP_MS:
            return False
        log_event("clock.jumped", level=logging.WARNING, moved_ms=moved_ms)
        self.wake_all()
        return True

    def wake_all(self) -> None:
        """Let every waiting job run now."""
        self._waits.call_all_now()

    def wait_idle(self, deadline_s: float) -> bool:
        """Wait until no job is under way; returns whether that happened in time."""
        return self._workers.wait_idle(deadline_s)

    def stop(self, deadline_s: float) -> bool:
        """Let each sweep end after its batch; returns whether all did before the deadline.

        Rows of an unfinished sweep are only claimed, and fall due again. Safe to call twice.
        """
        with self._lock:
            is_first, self._is_stopped = not self._is_stopped, True
        if is_first:
            self._workers.stop()
            if self._is_started:
                self._waits.end()
        is_idle = self.wait_idle(deadline_s)
        if is_idle:
            for job in self.jobs().values():
                job.close()
        return is_idle

    def _run(self, job: Job) -> bool:
        """Run one pass of a job; returns whether its database worked."""
        if self._is_stopped:
            return True
        try:
            if self.jobs_has(job):
                job.step(lambda: self._is_stopped)
        except Exception:  # the top of a loop: a bug must not end the sweeps permanently
            job.on_fault()
            LOGGER.exception("sweep.fault database=%s", job.name)
        finally:
            if self.jobs_has(job):
                self._schedule(job)
            else:
                job.close()
        return job.is_well

    def jobs_has(self, job: Job) -> bool:
        """Whether exactly this job has not been removed."""
        with self._lock:
            return self._jobs.get(job.name) is job

    def _schedule(self, job: Job) -> None:
        if self._is_stopped:
            return
        if job.delay_s <= 0:
            self._workers.offer(job)
            return
        at_ms = self._clock.now_ms() + round(job.delay_s * 1000)
        # Each wait is separate: a job may be offered twice, but must never be forgotten because
        # another of its waits ended first.
        self._waits.call_at(at_ms, self._workers.offer, job)

    def _clock_difference_ms(self) -> int:
        return self._clock.now_ms() - round(self._clock.monotonic_s() * 1000)
