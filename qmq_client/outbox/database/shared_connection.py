"""One connection shared by application and publisher, for databases in memory.

A database in memory has a single connection, so two users of it would commit and roll back each
other's work. This gate separates them: the publisher enters only while the application has no
connection checked out, and the application's next check-out waits until the publisher leaves. For
tests and first steps; a database in a file has enough connections.
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
#: Interval of the checks: a pool that shares one connection among several users does not report every return.
_LOOK_S: Final = 0.002
#: How long the application's next use waits for the publisher. Bounded, because the application may
#: itself hold the connection that the publisher waits for.
TURN_S_MAX: Final = 0.05


class SharedConnection:
    """Decides who may use the single connection of a pool."""

    def __init__(self) -> None:
        #: Notified of each change. Its lock is reentrant.
        self._changed = threading.Condition()
        #: Connections of the application, with their threads; a returned entry has no connection any more.
        self._given: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._inside: int | None = None
        #: How many publishers are inside, or waiting to enter.
        self._entering = 0

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Keep the application out; raises SQLAlchemy's `TimeoutError` if it does not leave."""
        with self._changed:
            self._entering += 1
        try:
            self._wait_until_free()
            try:
                yield
            finally:
                with self._changed:
                    self._inside = None
        finally:
            with self._changed:
                self._entering -= 1
                self._changed.notify_all()

    def on_checkout(self, _: Any, __: Any, given: Any) -> None:
        """Called by the pool before a connection is given out."""
        here = threading.get_ident()
        with self._changed:
            if self._inside == here:
                return
            self._changed.wait_for(lambda: not self._entering, TURN_S_MAX)
            self._changed.wait_for(lambda: self._inside is None)
            self._given[given] = here

    def renew_after_fork(self) -> None:
        """Stop waiting for threads that do not exist in a child."""
        self._changed = threading.Condition()
        self._inside, self._entering = None, 0
        here = threading.get_ident()
        for given in [each for each, thread in self._given.items() if thread != here]:
            del self._given[given]

    def _wait_until_free(self) -> None:
        ends_at_s = SYSTEM_CLOCK.monotonic_s() + ENTER_S_MAX
        with self._changed:
            while not self._is_free():
                if SYSTEM_CLOCK.monotonic_s() >= ends_at_s:
                    raise sa.exc.TimeoutError(
                        "the single connection of this database in memory is in use by the application"
                    )
                self._changed.wait(_LOOK_S)
            self._inside = threading.get_ident()

    def _is_free(self) -> bool:
        in_use = any(given.dbapi_connection is not None for given in list(self._given))
        return not in_use and self._inside is None


_gates: Final[WeakKeyDictionary[sa.Pool, SharedConnection]] = WeakKeyDictionary()
_making = threading.Lock()


def shared_connection(pool: sa.Pool) -> SharedConnection:
    """The gate of this pool; created at the first call from any thread."""
    with _making:
        gate = _gates.get(pool)
        if gate is None:
            gate = _gates[pool] = SharedConnection()
            event.listen(pool, "checkout", gate.on_checkout)
        return gate


def _renew_after_fork() -> None:
    """In a forked child: forget the parent's other threads."""
    global _making  # noqa: PLW0603  # one of them may have it
    _making = threading.Lock()
    for gate in list(_gates.values()):
        gate.renew_after_fork()


os.register_at_fork(after_in_child=_renew_after_fork)
