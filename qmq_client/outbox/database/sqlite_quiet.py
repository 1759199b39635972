"""Moments in which the application uses no connection to its SQLite file.

A transaction that has read fails at its first write if anybody wrote in between. So deletes of the
publisher wait for such a moment, and a connection that is taken during one waits for its end.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import sqlalchemy as sa
from sqlalchemy import event

from qmq_client.clock import SYSTEM_CLOCK

#: How long an application waits at most, and how often it looks. A delete takes a millisecond, or the
#: time of a slow disk.
_LOOKS_MAX: Final = 500
_LOOK_S: Final = 0.001
#: How often who wants a moment looks, while whoever takes a connection waits.
_GATHERING_LOOKS_MAX: Final = 200


class QuietMoments:
    """Of one engine of the application. Safe for any number of threads."""

    def __init__(self, engine: sa.Engine) -> None:
        #: Who is in a moment now, by thread; changed in single steps.
        self._inside: dict[object, int] = {}
        #: Connections in use. The pool has its own count, behind a lock that the application may hold.
        self._in_use: dict[object, None] = {}
        event.listen(engine, "checkout", self._on_checkout)
        event.listen(engine, "checkin", self._on_checkin)
        event.listen(engine, "detach", self._on_checkin)

    @contextmanager
    def moment(self, *, waits: bool) -> Iterator[bool]:
        """Whether nothing is in use; what the application takes within the block waits, but not long.

        With `waits` that begins before: until what is in use has come back, or for a fifth of a second.
        """
        mine = object()
        try:
            self._inside[mine] = (
                threading.get_ident()
            )  # before the look: who takes one now is seen, or waits
            yield not self._in_use
        finally:
            self._inside.pop(mine, None)

    def after_fork(self) -> None:
        """In a forked child: the parent's threads are not here."""
        self._inside.clear()
        self._in_use.clear()

    def _on_checkin(self, _: object, entry: object) -> None:
        self._in_use.pop(entry, None)

    def _on_checkout(self, _: object, entry: object, __: object) -> None:
        self._in_use[entry] = None
        here = threading.get_ident()
        for _look in range(_LOOKS_MAX):
            if all(thread == here for thread in self._inside.copy().values()):
                return
            SYSTEM_CLOCK.sleep(_LOOK_S)
