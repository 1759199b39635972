"""The threads that sweep: a fixed number, shared fairly, and never all blocked by hanging databases.

Jobs wait in order of arrival, and each runs for a bounded time, so a few threads serve hundreds of
databases in turn. A run that takes too long is *isolated*: a spare thread takes its place, and the
next run of that job starts among the isolated ones, whose number is bounded. A server on
which run after run fails is isolated as a whole, with two of its databases at a time, until one of
them succeeds: databases on other servers are swept as before. Promise W3 depends on this module.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

from qmq_client.clock import SYSTEM_CLOCK, Clock
from qmq_watchdog.events import log_event

#: Failures in a row, of any databases of one server, after which the server is isolated.
SERVER_FAILURES_MAX: Final = 3
#: Databases of such a server that are tried at the same time.
RUNS_PER_SERVER_ISOLATED: Final = 2


class Work(Protocol):
    """The interface of a job."""

    @property
    def name(self) -> str:
        """Unique among the jobs."""
        ...

    @property
    def server(self) -> str:
        """The database's server: its databases fail together."""
        ...


_Work = TypeVar("_Work", bound=Work)


@dataclass(slots=True, kw_only=True)
class _Run:
    """A job that is under way."""

    name: str
    server: str
    started_s: float
    is_isolated: bool
    #: Whether it has been found to take too long.
    is_slow: bool = False
    #: Whether the job was offered again meanwhile.
    is_wanted_again: bool = False


class Workers(Generic[_Work]):
    """Runs jobs on a bounded number of threads. Safe for any number of callers.

    `run` runs a job for its share of time and returns whether its database worked. It must not raise. A
    job never runs twice at once: if it is offered during its run it waits for the end, and a
    waiting job is not queued again.
    """

    def __init__(
        self,
        run: Callable[[_Work], bool],
        *,
        threads: int,
        isolated_max: int,
        slow_s: float,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._run = run
        self._threads_max = threads
        self._isolated_max = isolated_max
        self._slow_s = slow_s
        self._clock = clock
        self._lock = threading.Lock()
        #: Idle threads wait here …
        self._wanted = threading.Condition(self._lock)
        #: … and here callers that wait for all runs to end.
        self._ended = threading.Condition(self._lock)
        self._brisk: deque[_Work] = deque()
        self._isolated: deque[_Work] = deque()
        #: Identities of the jobs in either queue.
        self._waiting: set[int] = set()
        self._running: dict[int, _Run] = {}
        self._suspects: set[str] = set()
        self._server_failures: Counter[str] = Counter()
        self._thread_count = 0
        #: Whether the system refused to start the last thread.
        self._lacks_thread = False
        #: Waiting threads that are not yet woken.
        self._idle_count = 0
        self._is_stopped = False

    def offer(self, job: _Work) -> None:
        """Queue `job`; it is dropped if the workers have been stopped."""
        with self._lock:
            if self._is_stopped:
                return
            if (run := self._running.get(id(job))) is not None:
                run.is_wanted_again = True
                return
            self._line_up(job)

    def forget(self, job: _Work) -> None:
        """Forget a job that will not be offered again."""
        with self._lock:
            self._suspects.discard(job.name)

    def look(self) -> None:
        """Isolate runs that take too long, so that others take their places; try again for a thread
        that could not be started.

        Call it a few times a second.
        """
        now_s = self._clock.monotonic_s()
        with self._lock:
            for run in self._running.values():
                if now_s - run.started_s < self._slow_s:
                    continue
                if not run.is_slow:
                    run.is_slow = True
                    self._note(run.name, run.server, is_well=False)
                if not run.is_isolated and self._count(is_isolated=True) < self._isolated_max:
                    run.is_isolated = True
                    self._start_or_wake()
            if (
                self._lacks_thread
            ):  # even if none is needed: otherwise the end of the shortage would not be noticed
                self._start_thread()

    def stop(self) -> None:
        """Drop waiting jobs; runs under way continue to their end."""
        with self._lock:
            self._is_stopped = True
            self._brisk.clear()
            self._isolated.clear()
            self._waiting.clear()
            self._wake_all()
            self._ended.notify_all()

    def wait_idle(self, deadline_s: float) -> bool:
        """Wait until no job runs or waits; returns whether that happened in time."""
        with self._lock:
            return self._ended.wait_for(
                lambda: not (self._running or self._brisk or self._isolated), deadline_s
            )

    def under_way(self) -> tuple[int, int, int]:
        """How many jobs run, how many are isolated, and how many wait."""
        with self._lock:
            isolated = self._count(is_isolated=True)
            return len(self._running) - isolated, isolated, len(self._brisk) + len(self._isolated)

    # -- everything below: with the lock

    def _line_up(self, job: _Work) -> None:
        if id(job) not in self._waiting:
            self._waiting.add(id(job))
            self._queue_of(job).append(job)
            self._start_or_wake()

    def _queue_of(self, job: _Work) -> deque[_Work]:
        is_isolated = job.name in self._suspects or self._is_server_isolated(job.server)
        return self._isolated if is_isolated else self._brisk

    def _is_server_isolated(self, server: str) -> bool:
        return self._server_failures[server] >= SERVER_FAILURES_MAX

    def _count(self, *, is_isolated: bool) -> int:
        return sum(run.is_isolated is is_isolated for run in self._running.values())

    def _start_or_wake(self) -> None:
        if self._idle_count:
            self._idle_count -= 1
            self._wanted.notify()
        elif self._thread_count < self._threads_max + self._isolated_max:
            self._start_thread()

    def _start_thread(self) -> None:
        """Start one more thread; if the system refuses, the next `look` tries again."""
        name = f"qmq-watchdog-{self._thread_count + 1}"
        try:
            threading.Thread(target=self._loop, name=name, daemon=True).start()
        except RuntimeError as error:
            if not self._lacks_thread:
                log_event("thread.refused", level=logging.WARNING, error=str(error))
            self._lacks_thread = True
        else:
            self._lacks_thread = False
            self._thread_count += 1

    def _wake_all(self) -> None:
        self._idle_count = 0
        self._wanted.notify_all()

    def _note(self, name: str, server: str, *, is_well: bool) -> None:
        was_isolated = self._is_server_isolated(server)
        if is_well:
            self._suspects.discard(name)
            del self._server_failures[server]
        else:
            self._suspects.add(name)
            self._server_failures[server] += 1
        if was_isolated != self._is_server_isolated(server):
            self._sort_again()

    def _sort_again(self) -> None:
        waiting = [*self._brisk, *self._isolated]
        self._brisk.clear()
        self._isolated.clear()
        for job in waiting:
            self._queue_of(job).append(job)
        self._wake_all()

    def _next(self) -> tuple[_Work, bool] | None:
        if self._brisk and self._count(is_isolated=False) < self._threads_max:
            return self._brisk.popleft(), False
        if self._count(is_isolated=True) < self._isolated_max:
            # Counted once: a thousand databases of one dead server may be in this line.
            runs = Counter(run.server for run in self._running.values() if run.is_isolated)
            for index, job in enumerate(self._isolated):
                if (
                    not self._is_server_isolated(job.server)
                    or runs[job.server] < RUNS_PER_SERVER_ISOLATED
                ):
                    del self._isolated[index]
                    return job, True
        return None

    # -- the threads

    def _loop(self) -> None:
        while (job := self._take()) is not None:
            is_well = False
            try:
                is_well = self._run(job)
            finally:
                self._end(job, is_well)

    def _take(self) -> _Work | None:
        with self._lock:
            while not self._is_stopped:
                found = self._next()
                if found is not None:
                    job, is_isolated = found
                    self._waiting.discard(id(job))
                    self._running[id(job)] = _Run(
                        name=job.name,
                        server=job.server,
                        started_s=self._clock.monotonic_s(),
                        is_isolated=is_isolated,
                    )
                    return job
                self._idle_count += 1
                self._wanted.wait()
            self._thread_count -= 1
            return None

    def _end(self, job: _Work, is_well: bool) -> None:
        with self._lock:
            run = self._running.pop(id(job))
            if is_well or not run.is_slow:  # it was counted as slow when it was isolated
                self._note(run.name, run.server, is_well=is_well)
            if run.is_slow:
                self._suspects.add(run.name)  # an isolated job must first prove that it is quick
            if run.is_wanted_again and not self._is_stopped:
                self._line_up(job)
            self._ended.notify_all()
