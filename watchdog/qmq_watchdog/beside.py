"""Work that a sweep runs beside itself: claims and settlements, on two threads.

Two threads are two connections, and a sweep has no more: while work is under way here, the sweep
itself asks the database for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Final, ParamSpec, TypeVar

THREADS: Final = 2

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def two_threads() -> Executor:
    """Threads that are created when needed."""
    return ThreadPoolExecutor(max_workers=THREADS, thread_name_prefix="qmq-beside")


class Beside:
    """The threads of one sweep, from the first work for them to its end. One thread submits."""

    def __init__(self, make: Callable[[], Executor] = two_threads) -> None:
        self._make = make
        self._executor: Executor | None = None

    def submit(
        self, work: Callable[_Given, _Result], *given: _Given.args, **options: _Given.kwargs
    ) -> Future[_Result]:
        """Run this as soon as a thread is free, in the order of the calls."""
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
