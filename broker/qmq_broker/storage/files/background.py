"""Disk work that runs next to the writer: one piece at a time, in a separate thread.

Requests wait while the writer works. A sync of files that no answer depends on may take long, so it
is done here, and the writer checks the result later.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

Work = Callable[[], None]


def at_once(work: Work) -> None:
    """Run the work now, in the calling thread: at a start, a clean stop, and without threads."""
    work()


def in_a_thread(work: Work) -> None:
    """Run the work in a daemon thread: if the disk hangs, the process can still end."""
    threading.Thread(target=work, name="qmq-background", daemon=True).start()


class Background:
    """At most one piece of work under way; `begin`, `is_busy` and `check` belong to the writer."""

    def __init__(self) -> None:
        #: How a piece of work is started.
        self.start: Callable[[Work], None] = at_once
        self._is_over = threading.Event()
        self._is_over.set()
        self._error: Exception | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a piece of work is under way."""
        return not self._is_over.is_set()

    def begin(self, work: Work) -> None:
        """Start a piece of work. Requires: none is under way, and the last one was checked."""
        self._is_over.clear()
        try:
            self.start(lambda: self._do(work))
        except BaseException:  # no thread could be started, so no work is under way
            self._is_over.set()
            raise

    def check(self) -> None:
        """Raise the error of the last piece of work, once. Requires: it has ended."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def wait(self) -> None:
        """Wait until no work is under way."""
        self._is_over.wait()

    def _do(self, work: Work) -> None:
        try:
            work()
        except Exception as error:  # the top of its thread: the writer handles the error
            self._error = error
        finally:
            self._is_over.set()
