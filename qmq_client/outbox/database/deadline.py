"""Cuts connections whose transaction takes too long, because a server may never answer.

A driver may wait forever on a connection that is established and silent (a frozen server behind a
proxy, a stalled pooler); libpq has no time-out for that at all. The publisher's own transactions
are short, so each has a deadline. At the deadline the socket is shut down, the driver finds its
connection lost, and the thread goes on with an error. One thread watches over all of them and
sleeps while there are none.
"""

from __future__ import annotations

import _thread
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any, Final

from qmq_client.clock import SYSTEM_CLOCK
from qmq_client.thread_start import start_thread

#: Interval of the checks; after some without any deadline the thread sleeps until there is one.
_LOOK_S: Final = 1.0
_IDLE_LOOKS_MAX: Final = 60


class _Watch:
    """One socket that is to be cut."""

    __slots__ = ("end_s", "is_over", "number")

    def __init__(self, number: int, end_s: float) -> None:
        self.number = number
        self.end_s = end_s
        #: The transaction is over: from then on others may use the socket.
        self.is_over = False


class _Deadlines:
    """Which sockets are to be cut, and when. Thread-safe.

    The main thread comes through here, so a lock is entered as itself: what a signal handler raises
    leaves nothing taken.
    """

    def __init__(self) -> None:
        #: Held while a socket is cut, and by whoever says that a transaction is over. Reentrant for a signal
        #: handler that has a transaction of its own.
        self.lock = threading.RLock()
        self._watches: dict[_Watch, None] = {}
        #: Never given back: whoever has it is the thread that watches.
        self._right = _thread.allocate_lock()
        self._is_asleep = False
        self._rings: SimpleQueue[None] = SimpleQueue()

    def add(self, watch: _Watch) -> None:
        """Cut this socket at its time, unless the transaction is over before."""
        if not self._right.locked():
            start_thread(self._run, name="qmq-deadlines")
        self._watches[watch] = None
        if self._is_asleep:
            self._rings.put(None)

    def forget(self, watch: _Watch) -> None:
        """Drop what is over; the thread would do it later."""
        self._watches.pop(watch, None)

    def _run(self) -> None:
        if not self._right.acquire(blocking=False):
            return  # another one was faster
        idle_looks = 0
        while True:
            self._cut_what_is_due(SYSTEM_CLOCK.monotonic_s())
            idle_looks = 0 if self._watches else idle_looks + 1
            # Checking costs less than being woken for every transaction.
            self._is_asleep = idle_looks > _IDLE_LOOKS_MAX
            # Asked after the note: what is added now is seen or rings.
            with suppress(Empty):
                self._rings.get(timeout=None if self._is_asleep and not self._watches else _LOOK_S)
            self._is_asleep = False

    def _cut_what_is_due(self, now_s: float) -> None:
        for watch in self._watches.copy():
            with self.lock:
                is_due = not watch.is_over and watch.end_s <= now_s
                if is_due:
                    _cut(watch.number)
            if is_due or watch.is_over:
                self.forget(watch)


_deadlines = _Deadlines()


def _forget() -> None:
    global _deadlines  # noqa: PLW0603  # a forked child has neither the thread nor the sockets
    _deadlines = _Deadlines()


os.register_at_fork(after_in_child=_forget)


@contextmanager
def answered_within(driver: Any, seconds: float) -> Iterator[None]:
    """Around a transaction: if the block takes longer, the driver's connection is cut.

    `driver` is a blocking connection. Without a public `fileno` nothing is done: other drivers take a
    time limit when they connect.
    """
    number = _file_number(driver)
    if number is None:
        yield
        return
    watched = _deadlines
    watch = _Watch(number, SYSTEM_CLOCK.monotonic_s() + seconds)
    try:
        watched.add(watch)
        yield
    finally:
        with watched.lock:
            watch.is_over = True
        watched.forget(watch)


def _cut(number: int) -> None:
    with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
        connection.shutdown(socket.SHUT_RDWR)


def _file_number(driver: Any) -> int | None:
    with suppress(Exception):  # closed, or of a kind that has none
        return int(driver.fileno())
    return None
