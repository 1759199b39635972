"""Calls at a later time, kept by APScheduler. A call must take no time, because all share its
thread.

It uses the wall clock, which may be set back; whoever notices that calls `call_all_now`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final

from apscheduler.executors.debug import DebugExecutor
from apscheduler.jobstores.base import JobLookupError
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.schedulers.base import STATE_RUNNING
from apscheduler.triggers.date import DateTrigger

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
        """Whether calls are made: after `start`, until `end` begins."""
        return bool(self._scheduler.state == STATE_RUNNING)

    def start(self) -> None:
        """Start making calls."""
        self._scheduler.start()

    def call_at(self, at_ms: int, call: Callable[..., None], *arguments: Any) -> None:
        """Make this call at this wall-clock time; independent of any other pending call."""
        run_at = datetime.fromtimestamp(at_ms / 1000, UTC)
        self._scheduler.add_job(call, DateTrigger(run_at), args=arguments)

    def call_all_now(self) -> None:
        """Make every call now."""
        for waiting in self._scheduler.get_jobs():
            with suppress(JobLookupError):  # it has just been made
                waiting.modify(next_run_time=_AT_ONCE)

    def end(self) -> None:
        """Stop making calls; returns when none is being made.

        A scheduler that is shut down while it makes a call looks for the call's job in vain and
        ends its thread with a traceback. So it is paused first, and a call in progress is waited
        for.
        """
        self._scheduler.pause()
        self._scheduler.remove_all_jobs()  # has to wait for a round of calls
        self._scheduler.shutdown(wait=False)
