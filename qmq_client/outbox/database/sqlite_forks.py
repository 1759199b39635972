"""Forks of a process whose publisher uses an SQLite file.

SQLite bears no fork, in two ways, both reproduced. While a thread is inside SQLite, it may hold a
lock of the library; a child inherits that, and hangs at its first use of any database. And the
library keeps the file locks of the process in its memory: a child that inherits an open connection
believes that it has them, and when the parent closes its last connection, it deletes the write-ahead
log that the child is writing to. So a fork waits until no publisher is inside SQLite, and the idle
connections of publishers are closed before it. The application's own connections are its own affair:
SQLAlchemy's documentation says to dispose of an engine before a fork.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final
from weakref import WeakSet

import sqlalchemy as sa

from qmq_client.clock import SYSTEM_CLOCK

#: How long a fork waits at most: a publisher's transaction takes milliseconds, but it waits some
#: seconds for a lock, which the forking thread may hold.
FORK_S_MAX: Final = 5.0


class SqliteUse:
    """The use of one SQLite file by one publisher or watchdog, from one thread at a time."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        #: Reentrant: what runs inside may fork.
        self._lock = threading.RLock()
        self._is_held_for_fork = False
        _uses.add(self)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Around each use of the file."""
        with self._lock:
            yield

    def before_fork(self, end_s: float) -> None:
        """Wait until nobody is inside, or until `end_s`, and close the idle connections."""
        left_s = max(0.0, end_s - SYSTEM_CLOCK.monotonic_s())
        self._is_held_for_fork = self._lock.acquire(timeout=left_s)
        if isinstance(self._engine.pool, sa.QueuePool) and self._engine.pool.checkedin():
            self._engine.dispose()

    def after_fork(self) -> None:
        """In the parent: continue."""
        if self._is_held_for_fork:
            self._is_held_for_fork = False
            self._lock.release()

    def after_fork_in_child(self) -> None:
        """In the child: the thread that may have been inside is not here."""
        self._lock = threading.RLock()
        self._is_held_for_fork = False


_uses: Final[WeakSet[SqliteUse]] = WeakSet()


def _before_fork() -> None:
    end_s = SYSTEM_CLOCK.monotonic_s() + FORK_S_MAX
    for use in list(_uses):
        use.before_fork(end_s)


def _after_fork() -> None:
    for use in list(_uses):
        use.after_fork()


def _after_fork_in_child() -> None:
    for use in list(_uses):
        use.after_fork_in_child()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child
)
