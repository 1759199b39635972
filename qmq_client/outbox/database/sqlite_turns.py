"""Whose turn it is at an SQLite file: a publisher's, the application's, or a fork's.

SQLite has no queue for its write lock: a thread that retries at once always wins over one that waits,
so a busy application would starve the publisher. And it bears no fork, in two ways, both reproduced:

- While a thread is inside SQLite, it may hold a lock of the library. A child inherits that, and hangs
  at its first use of any database.
- The library keeps the file locks of the process in its memory. A child that inherits an open
  connection believes that it has those locks. When the parent closes its last connection, it deletes
  the write-ahead log that the child is writing to, and what the child has committed is lost.

So a publisher has the *turn* while it uses SQLite, a fork waits until nobody has one, and connections
that nobody uses are closed before it. A connection that is in use at the fork, and a thread of the
application that is inside SQLite, are the application's affair. A fork takes no lock: what a signal
handler raises in the middle of it would leave that taken.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final
from weakref import WeakKeyDictionary

import sqlalchemy as sa

from qmq_client.clock import SYSTEM_CLOCK
from qmq_client.signal_flag import SignalFlag

#: How long a transaction of the application lets the publisher go first. Bounded, because the
#: application may itself hold the lock that the publisher waits for.
TURN_S_MAX: Final = 0.05
#: How long a fork waits at most: a publisher's transaction takes milliseconds, but it waits some
#: seconds for a lock, which the forking thread may hold.
FORK_S_MAX: Final = 5.0
#: From then on nobody waits for a fork: a signal handler has raised where its end is noted.
_UNDER_WAY_S_MAX: Final = 2 * FORK_S_MAX
_LOOK_S: Final = 0.001


class _Forks:
    """Which threads fork this process; several may at once."""

    def __init__(self) -> None:
        #: Until when at most, by the thread that forks.
        self._until_s: dict[int, float] = {}

    def begin(self) -> None:
        self._until_s[threading.get_ident()] = SYSTEM_CLOCK.monotonic_s() + _UNDER_WAY_S_MAX

    def end(self) -> None:
        self._until_s.pop(threading.get_ident(), None)

    def end_in_child(self) -> None:
        self._until_s = {}  # other threads may have been about to fork

    @property
    def is_under_way(self) -> bool:
        """In another thread: what this one does is done before it forks."""
        here, now_s = threading.get_ident(), SYSTEM_CLOCK.monotonic_s()
        others = self._until_s.copy().items()
        return any(thread != here and now_s < until_s for thread, until_s in others)


class Turn:
    """The turn at one file."""

    def __init__(self, forks: _Forks) -> None:
        self._forks = forks
        #: Of threads of publishers and watchdogs alone; reentrant for a signal handler.
        self._lock = threading.RLock()
        #: Which thread has the turn.
        self._owner: int | None = None
        #: Of transactions that let the publisher go first.
        self._waiting: dict[SignalFlag, None] = {}

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Have the turn, for a thread of a publisher or a watchdog."""
        with self._lock:
            before = self._owner
            try:
                self._enter()
                yield
            finally:
                self._owner = before
                for told in self._waiting.copy():
                    told.set()

    def _enter(self) -> None:
        self._owner = here = threading.get_ident()
        while self._forks.is_under_way:  # asked after the note: one of the two sees the other
            self._owner = None
            SYSTEM_CLOCK.sleep(_LOOK_S)
            self._owner = here

    def let_the_publisher_go_first(self) -> None:
        """Before a transaction of the application that will write; waits for `TURN_S_MAX` at most."""
        if self._owner is None:
            return
        told = SignalFlag()
        self._waiting[told] = None
        try:
            if self._owner is not None:  # asked after the note: an end is seen or tells
                told.wait(TURN_S_MAX)
        finally:
            self._waiting.pop(told, None)

    @property
    def is_anothers(self) -> bool:
        """Whether another thread has it."""
        return self._owner not in {None, threading.get_ident()}


class Turns:
    """The turns of all files, and the engines whose idle connections are closed before a fork."""

    def __init__(self) -> None:
        self._forks = _Forks()
        self._by_file: dict[str, Turn] = {}
        self._engines: WeakKeyDictionary[sa.Engine, None] = WeakKeyDictionary()

    def of(self, engine: sa.Engine) -> Turn:
        """The turn at this engine's file."""
        path = str(engine.url.database)
        found = self._by_file.get(path)
        return found or self._by_file.setdefault(path, Turn(self._forks))

    def close_before_forks(self, engine: sa.Engine) -> None:
        """From now on, a fork closes this engine's idle connections; safe to repeat.

        Not those of a database in memory, which would end with its last one.
        """
        if not _is_in_memory(engine.url):
            self._engines[engine] = None

    def before_fork(self) -> None:
        """Wait until no publisher is inside SQLite, and close connections that nobody uses."""
        ends_at_s = SYSTEM_CLOCK.monotonic_s() + FORK_S_MAX
        self._forks.begin()
        for turn in list(self._by_file.values()):
            while turn.is_anothers and SYSTEM_CLOCK.monotonic_s() < ends_at_s:
                SYSTEM_CLOCK.sleep(_LOOK_S)
        for found in self._engines.keyrefs():
            engine = found()
            # Other pools keep none that is idle.
            if (
                engine is not None
                and isinstance(engine.pool, sa.QueuePool)
                and engine.pool.checkedin()
            ):
                engine.dispose()

    def after_fork(self) -> None:
        """In the parent: let the publishers go on."""
        self._forks.end()

    def after_fork_in_child(self) -> None:
        """In the child: the threads that may have had a turn are not here."""
        self._by_file = {}
        self._forks.end_in_child()


def _is_in_memory(url: sa.URL) -> bool:
    """Whether this leads to no file, by one of the ways to write that."""
    is_named_so = ":memory:" in (url.database or "")
    return is_named_so or url.query.get("mode") == "memory" or url.query.get("vfs") == "memdb"


TURNS: Final = Turns()
os.register_at_fork(
    before=TURNS.before_fork,
    after_in_parent=TURNS.after_fork,
    after_in_child=TURNS.after_fork_in_child,
)
