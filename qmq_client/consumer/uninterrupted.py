"""Work that no signal handler interrupts, because a thread of its own does it.

Python runs signal handlers in the main thread, between any two of its steps, and what one raises
(`KeyboardInterrupt`, `SystemExit` of a server that stops) comes out there. Work with locks would leave
them taken. So the caller only waits for it: if the wait is ended by an error, the work goes on, and
whoever asks again gets what it returns.
"""

from __future__ import annotations

import _thread
from collections.abc import Callable
from typing import Generic, TypeVar

from qmq_client.signal_flag import SignalFlag
from qmq_client.thread_start import start_thread

_Result = TypeVar("_Result")


class Uninterrupted(Generic[_Result]):
    """Work that is done once, however many ask for its result."""

    def __init__(self, work: Callable[[], _Result]) -> None:
        self._work = work
        #: Never given back: whoever has it does the work.
        self._right = _thread.allocate_lock()
        #: What the work returned, and what it raised.
        self._results: list[_Result] = []
        self._errors: list[BaseException] = []
        self._waiting: dict[SignalFlag, None] = {}

    def result(self) -> _Result:
        """What the work returns or raises. Begins it unless somebody has."""
        told = SignalFlag()
        self._waiting[told] = None
        try:
            if not self._right.locked():
                self._begin()
            if not (self._results or self._errors):  # asked after the note: an end is seen or tells
                told.wait()
        finally:
            self._waiting.pop(told, None)
        for error in self._errors:
            raise error
        return self._results[0]

    def _begin(self) -> None:
        try:
            start_thread(self._run, name="qmq-uninterrupted")
        except RuntimeError:  # no thread to be had, as while Python ends
            self._run()

    def _run(self) -> None:
        if not self._right.acquire(blocking=False):
            return  # another one was faster
        try:
            self._results.append(self._work())
        except BaseException as error:  # the caller's, who is told below
            self._errors.append(error)
        for told in self._waiting.copy():
            told.set()
