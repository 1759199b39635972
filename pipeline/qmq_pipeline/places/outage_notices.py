"""What is said about a broker that is away.

An outage is one thing, however many tasks and processes find it. It is told once when it has lasted
for a second, and once when it is over. In a worker process (`work/worker.py`) it is told to the process
that started it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Final

_LOG: Final = logging.getLogger("qmq.pipeline")


@dataclass(frozen=True, slots=True, kw_only=True)
class OutageNotice:
    """An outage that has begun, or is over."""

    #: The broker; contains no secrets.
    source: str
    #: What is the matter; empty once the broker answers again.
    reason: str = ""
    #: How long it has been away.
    seconds: float
    #: How long it is waited for at most; None for as long as it takes.
    wait_s: float | None

    def __str__(self) -> str:
        if not self.reason:
            return f"{self.source}: the broker answers again, after {self.seconds:.0f} s"
        bound = "" if self.wait_s is None else f", for {self.wait_s:g} s at most"
        return f"{self.source}: {self.reason}; waiting for it{bound}"


#: Called with what is to be told.
OnOutage = Callable[[OutageNotice], None]


def _log(notice: OutageNotice) -> None:
    _LOG.warning("%s", notice)


class OutageNotices:
    """Who waits for a broker in this process, and who is told about it. Thread safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._waiting: set[object] = set()
        self._tell: OnOutage = _log

    @contextmanager
    def told_to(self, tell: OnOutage) -> Iterator[None]:
        """Tell this one in the block, instead of the log."""
        before, self._tell = self._tell, tell
        try:
            yield
        finally:
            self._tell = before

    def began(self, waiter: object, notice: OutageNotice) -> None:
        """This one waits; told if it is the first."""
        with self._lock:
            is_first = not self._waiting
            self._waiting.add(waiter)
        if is_first:
            self._tell(notice)

    def over(self, waiter: object, notice: OutageNotice) -> None:
        """The broker answered this one again; told if it was the last that waited."""
        if self.gone(waiter):
            self._tell(notice)

    def gone(self, waiter: object) -> bool:
        """This one does not wait any more, whatever came of it; whether it was the last that did."""
        with self._lock:
            if waiter not in self._waiting:
                return False
            self._waiting.discard(waiter)
            return not self._waiting


#: Of this process.
NOTICES: Final = OutageNotices()
