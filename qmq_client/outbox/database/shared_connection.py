"""One connection shared by application and publisher, for databases in memory.

A database in memory lives in its one connection, so two users of it would commit and roll back each
other's work. This gate separates them: the publisher enters only while the application has nothing
checked out, and the application's next check-out waits for the moment that the publisher is inside.
For tests and first steps; a database in a file has enough connections.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final
from weakref import WeakKeyDictionary

import sqlalchemy as sa
from sqlalchemy import event

from qmq_client.clock import SYSTEM_CLOCK

#: How long the publisher waits for the application to return the connection.
ENTER_S_MAX: Final = 1.0
#: Interval of the checks: a pool that gives one connection to several users does not report every
#: return.
_LOOK_S: Final = 0.002
#: How long the application's next use lets the publisher go first. Bounded, because the application
#: may itself hold the connection that the publisher waits for.
TURN_S_MAX: Final = 0.05


class SharedConnection:
    """Who may use the one connection of a pool."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        #: What the application was given, and in which thread; a returned entry has no connection any more.
        self._given: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._inside: int | None = None
        #: Number of publishers inside, or waiting to enter.
        self._entering = 0

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Keep the application out; raises SQLAlchemy's `TimeoutError` if it does not leave."""
        with self._changed:
            self._entering += 1
        try:
            self._wait_until_free()
            yield
        finally:
            with self._changed:
                self._entering -= 1
                if self._inside == threading.get_ident():
                    self._inside = None
                self._changed.notify_all()

    def on_checkout(self, _: Any, __: Any, given: Any) -> None:
        """Called by the pool before a connection is given out."""
        with self._changed:
            if self._inside == threading.get_ident():
                return
            if self._entering:
                self._changed.wait_for(lambda: not self._entering, TURN_S_MAX)
            self._changed.wait_for(lambda: self._inside is None)
            self._given[given] = threading.get_ident()

    def renew_after_fork(self) -> None:
        """Wait no longer for threads that a child does not have."""
        self._changed = threading.Condition()
        self._inside, self._entering = None, 0
        here = threading.get_ident()
        for given in [each for each, thread in self._given.items() if thread != here]:
            del self._given[given]

    def _wait_until_free(self) -> None:
        end_s = SYSTEM_CLOCK.monotonic_s() + ENTER_S_MAX
        with self._changed:
            while not self._is_free():
                if SYSTEM_CLOCK.monotonic_s() >= end_s:
                    raise sa.exc.TimeoutError(
                        "the one connection of this database in memory is in use by the application"
                    )
                self._changed.wait(_LOOK_S)
            self._inside = threading.get_ident()

    def _is_free(self) -> bool:
        in_use = any(given.dbapi_connection is not None for given in list(self._given))
        return not in_use and self._inside is None


class _Gates:
    """The gates of all pools."""

    def __init__(self) -> None:
        self._by_pool: WeakKeyDictionary[sa.Pool, SharedConnection] = WeakKeyDictionary()
        #: Two producers that start at once must find one gate, not make two.
        self._making = threading.Lock()

    def of(self, pool: sa.Pool) -> SharedConnection:
        """See `shared_connection`."""
        with self._making:
            gate = self._by_pool.get(pool)
            if gate is None:
                gate = self._by_pool[pool] = SharedConnection()
                event.listen(pool, "checkout", gate.on_checkout)
            return gate

    def renew_after_fork(self) -> None:
        """In a forked child: forget the parent's other threads."""
        self._making = threading.Lock()
        for gate in list(self._by_pool.values()):
            gate.renew_after_fork()


_GATES: Final = _Gates()
os.register_at_fork(after_in_child=_GATES.renew_after_fork)


def shared_connection(pool: sa.Pool) -> SharedConnection:
    """The gate of this pool; created at the first call from any thread."""
    return _GATES.of(pool)
