"""Cuts connections whose transaction takes too long, because a server may never answer.

A driver may wait forever on a connection that is established and silent (a frozen server behind a
proxy, a stalled pooler); libpq has no time-out for that at all. The publisher's own transactions
are short, so each has a deadline. At the deadline the socket is shut down, the driver finds its
connection lost, and the thread goes on with an error. One thread watches over all of them and
sleeps while there are none.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from qmq_client.clock import SYSTEM_CLOCK
from qmq_client.outbox.database.driver import file_number

#: Far above what a batch takes, and below what people call hanging.
TRANSACTION_S_MAX: Final = 60.0
#: Interval of the checks; after some without any deadline the thread sleeps until there is one.
_LOOK_S: Final = 1.0
_IDLE_LOOKS_MAX: Final = 60


class _Deadlines:
    """Which sockets are to be cut, and when. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._ends: dict[int, tuple[float, int]] = {}
        self._next_key = 0
        self._thread: threading.Thread | None = None
        self._is_asleep = False

    def add(self, number: int, seconds: float) -> int:
        """Cut this socket after that time; returns the key for `remove`."""
        with self._changed:
            self._next_key += 1
            self._ends[self._next_key] = (SYSTEM_CLOCK.monotonic_s() + seconds, number)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="qmq-deadlines", daemon=True)
                self._thread.start()
            elif self._is_asleep:
                self._changed.notify()
            return self._next_key

    def remove(self, key: int) -> None:
        """The transaction is over: from here on the socket must not be cut."""
        with self._changed:
            self._ends.pop(key, None)

    def _run(self) -> None:
        idle_looks = 0
        with self._changed:
            while True:
                now_s = SYSTEM_CLOCK.monotonic_s()
                for key in [key for key, (end_s, _) in self._ends.items() if end_s <= now_s]:
                    _cut(self._ends.pop(key)[1])
                idle_looks = 0 if self._ends else idle_looks + 1
                # Checking costs less than being woken for every transaction.
                self._is_asleep = idle_looks > _IDLE_LOOKS_MAX
                self._changed.wait(None if self._is_asleep else _LOOK_S)
                self._is_asleep = False


_deadlines = _Deadlines()


def _forget() -> None:
    global _deadlines  # noqa: PLW0603  # a forked child has neither the thread nor the sockets
    _deadlines = _Deadlines()


os.register_at_fork(after_in_child=_forget)


@contextmanager
def answered_within(driver: Any, seconds: float) -> Iterator[None]:
    """Around a transaction: if the block takes longer, the driver's connection is cut.

    `driver` is a blocking connection. Without a `fileno` nothing is done.
    """
    number = file_number(driver)
    if number is None:
        yield
        return
    watched = _deadlines
    key = watched.add(number, seconds)
    try:
        yield
    finally:
        watched.remove(key)


def _cut(number: int) -> None:
    with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
        connection.shutdown(socket.SHUT_RDWR)
