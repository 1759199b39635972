"""One connection shared by application and publisher: databases in memory.

A database in memory lives in its one connection, so two users of it would commit and roll back each
other's work. This gate keeps them apart: the publisher's side enters only while the application has
nothing checked out, and the application's next check-out waits the moment that the publisher is
inside. For tests and first steps; a database in a file has connections enough.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import sqlalchemy as sa
from sqlalchemy import event

#: How long the publisher's side waits for the application to give the connection back.
ENTER_S_MAX = 1.0


class SharedConnection:
    """Who may use the one connection of a pool."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._checked_out = 0
        self._inside: int | None = None

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Keep the application out; raises SQLAlchemy's `TimeoutError` when it does not leave."""
        with self._changed:
            is_free = self._changed.wait_for(
                lambda: not self._checked_out and self._inside is None, ENTER_S_MAX
            )
            if not is_free:
                raise sa.exc.TimeoutError(
                    "the one connection of this database in memory is in use by the application"
                )
            self._inside = threading.get_ident()
        try:
            yield
        finally:
            with self._changed:
                self._inside = None
                self._changed.notify_all()

    def on_checkout(self, *_: Any) -> None:
        """Called by the pool before a connection is given out."""
        with self._changed:
            if self._inside == threading.get_ident():
                return
            self._changed.wait_for(lambda: self._inside is None)
            self._checked_out += 1

    def on_checkin(self, *_: Any) -> None:
        """Called by the pool after a connection was reset and given back."""
        with self._changed:
            if self._inside == threading.get_ident():
                return
            # Connections given out before this gate was there come back uncounted.
            self._checked_out = max(0, self._checked_out - 1)
            self._changed.notify_all()


_gates: WeakKeyDictionary[sa.Pool, SharedConnection] = WeakKeyDictionary()


def shared_connection(pool: sa.Pool) -> SharedConnection:
    """The gate of this pool; made and put in place at the first call."""
    gate = _gates.get(pool)
    if gate is None:
        gate = _gates[pool] = SharedConnection()
        event.listen(pool, "checkout", gate.on_checkout)
        event.listen(pool, "checkin", gate.on_checkin)
    return gate
