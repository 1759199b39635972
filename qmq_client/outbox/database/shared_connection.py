"""One connection shared by application and publisher, for databases in memory.

A database in memory lives in its one connection, so two users of it would commit and roll back each
other's work. This gate separates them: the publisher enters only while the application has nothing
checked out, and the application's next check-out waits for the moment that the publisher is inside.
For tests and first steps; a database in a file has enough connections.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final
from weakref import WeakKeyDictionary

import sqlalchemy as sa
from sqlalchemy import event

from qmq_client.clock import SYSTEM_CLOCK
from qmq_client.signal_flag import SignalFlag

#: How long the publisher waits for the application to return the connection.
ENTER_S_MAX: Final = 1.0
#: Interval of the checks: a pool that gives one connection to several users does not report every
#: return.
_LOOK_S: Final = 0.002
#: How long the application's next use lets the publisher go first. Bounded, because the application
#: may itself hold the connection that the publisher waits for.
TURN_S_MAX: Final = 0.05


class SharedConnection:
    """Who may use the one connection of a pool.

    The main thread comes through here: a lock is entered as itself, and who waits has a flag of its own,
    so what a signal handler raises leaves nothing taken.
    """

    def __init__(self) -> None:
        #: Reentrant for a signal handler that uses the connection, too. Nobody waits with it.
        self._lock = threading.RLock()
        #: What the application was given, and in which thread; a returned entry has no connection any more.
        self._given: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._inside: int | None = None
        #: Publishers inside, or waiting to enter.
        self._entering: dict[object, None] = {}
        #: Whom to tell that a publisher has left.
        self._waiting: dict[SignalFlag, None] = {}

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Keep the application out; raises SQLAlchemy's `TimeoutError` if it does not leave."""
        here, mine = threading.get_ident(), object()
        try:
            self._entering[mine] = None
            self._wait_until_free()
            yield
        finally:
            # First what needs no call: behind one, a signal handler may raise.
            if self._inside == here:
                self._inside = None
            self._entering.pop(mine, None)
            for told in self._waiting.copy():
                told.set()

    def on_checkout(self, _: Any, __: Any, given: Any) -> None:
        """Called by the pool before a connection is given out."""
        if self._inside == threading.get_ident():
            return
        self._wait_for(lambda: not self._entering, TURN_S_MAX)
        try:
            while not self._give(given):
                self._wait_for(lambda: self._inside is None, ENTER_S_MAX)
        except BaseException:  # of a signal handler: then the pool does not give it out
            self._given.pop(given, None)
            raise

    def renew_after_fork(self) -> None:
        """Wait no longer for threads that a child does not have."""
        self._lock = threading.RLock()
        self._inside, self._entering, self._waiting = None, {}, {}
        here = threading.get_ident()
        for given in [each for each, thread in self._given.items() if thread != here]:
            del self._given[given]

    def _give(self, given: Any) -> bool:
        with self._lock:
            is_free = self._inside is None
            if is_free:
                self._given[given] = threading.get_ident()
            return is_free

    def _wait_for(self, is_so: Callable[[], bool], seconds: float) -> None:
        ends_at_s = SYSTEM_CLOCK.monotonic_s() + seconds
        told = SignalFlag()
        self._waiting[told] = None
        try:
            # Asked after the note: a change is seen or tells.
            while not is_so() and (left_s := ends_at_s - SYSTEM_CLOCK.monotonic_s()) > 0:
                told.wait(left_s)
                told.clear()
        finally:
            self._waiting.pop(told, None)

    def _wait_until_free(self) -> None:
        ends_at_s = SYSTEM_CLOCK.monotonic_s() + ENTER_S_MAX
        while not self._enter_if_free():
            if SYSTEM_CLOCK.monotonic_s() >= ends_at_s:
                raise sa.exc.TimeoutError(
                    "the one connection of this database in memory is in use by the application"
                )
            SYSTEM_CLOCK.sleep(_LOOK_S)

    def _enter_if_free(self) -> bool:
        with self._lock:
            in_use = any(given.dbapi_connection is not None for given in list(self._given))
            is_free = not in_use and self._inside is None
            if is_free:
                self._inside = threading.get_ident()
            return is_free


class _Gates:
    """The gates of all pools."""

    def __init__(self) -> None:
        self._by_pool: WeakKeyDictionary[sa.Pool, SharedConnection] = WeakKeyDictionary()
        #: Two producers that start at once must find one gate, not make two.
        self._making = threading.RLock()

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
        self._making = threading.RLock()
        for gate in list(self._by_pool.values()):
            gate.renew_after_fork()


_GATES: Final = _Gates()
os.register_at_fork(after_in_child=_GATES.renew_after_fork)


def shared_connection(pool: sa.Pool) -> SharedConnection:
    """The gate of this pool; created at the first call from any thread."""
    return _GATES.of(pool)
