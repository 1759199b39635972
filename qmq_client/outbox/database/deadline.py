"""Cuts connections whose transaction takes too long, because a server may never answer.

A driver may wait forever on a connection that is established and silent (a frozen server behind a
proxy, a stalled pooler); libpq has no time-out for that at all. The publisher's own transactions
are short, so each has a deadline. At the deadline the socket is shut down, the driver finds its
connection lost, and the thread continues with an error. One thread watches all of them, and ends when
there was none for a minute.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from qmq_client.clock import SYSTEM_CLOCK

_LOOK_S: Final = 1.0
_IDLE_LOOKS_MAX: Final = 60


class _Deadlines:
    """Which sockets are to be cut, and when. Safe for any number of threads."""

    def __init__(self) -> None:
        #: Held while a socket is cut: once its transaction is over, others may use the number.
        self._lock = threading.Lock()
        #: File number and time of each open transaction.
        self._open: dict[object, tuple[int, float]] = {}
        self._is_running = False

    @contextmanager
    def around(self, number: int, end_s: float) -> Iterator[None]:
        """Cut this socket at `end_s` unless the block has ended."""
        mine = object()
        with self._lock:
            if not self._is_running:
                threading.Thread(target=self._run, name="qmq-deadlines", daemon=True).start()
                self._is_running = True
            self._open[mine] = (number, end_s)
        try:
            yield
        finally:
            with self._lock:
                self._open.pop(mine, None)

    def _run(self) -> None:
        idle_looks = 0
        while True:
            SYSTEM_CLOCK.sleep(_LOOK_S)
            now_s = SYSTEM_CLOCK.monotonic_s()
            with self._lock:
                for mine, (number, end_s) in list(self._open.items()):
                    if end_s <= now_s:
                        del self._open[mine]
                        _cut(number)
                idle_looks = 0 if self._open else idle_looks + 1
                if idle_looks > _IDLE_LOOKS_MAX:
                    self._is_running = False
                    return


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
    with _deadlines.around(number, SYSTEM_CLOCK.monotonic_s() + seconds):
        yield


def _cut(number: int) -> None:
    with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
        connection.shutdown(socket.SHUT_RDWR)


def _file_number(driver: Any) -> int | None:
    with suppress(Exception):  # closed, or of a kind that has none
        return int(driver.fileno())
    return None
