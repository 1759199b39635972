"""The connection budget: how many databases may keep a connection open between their sweeps.

Hundreds of databases must not hold hundreds of connections to servers that have other users. A
connection is kept while there is room; beyond that it is closed after its sweep, except that one
which has just had work takes the place of one that had none. A database at rest has one connection,
which `sweep.py` ensures; one that is swept has at most `CONNECTIONS_PER_RUN`.
"""

from __future__ import annotations

import threading
from typing import Final

from qmq_watchdog.beside import THREADS
from qmq_watchdog.databases import Database

#: Of a sweep: its own or, while it does well, those of the threads beside it.
CONNECTIONS_PER_RUN: Final = THREADS


class ConnectionBudget:
    """At most `kept_max` databases with open connections that are not in use. Thread-safe."""

    def __init__(self, kept_max: int) -> None:
        self._kept_max = kept_max
        self._lock = threading.Lock()
        #: In the order in which they were given back.
        self._kept: dict[Database, bool] = {}

    def take(self, database: Database) -> None:
        """Its connections are about to be used. Requires: the caller holds `database.lock`."""
        with self._lock:
            self._kept.pop(database, None)

    def give_back(self, database: Database, *, was_busy: bool) -> None:
        """Its connections are not needed for now; if too many are open, those of some database are
        closed.

        Requires: the caller has released `database.lock`.
        """
        with self._lock:
            self._kept[database] = was_busy
            if len(self._kept) <= self._kept_max:
                return
            idle = (each for each, is_busy in self._kept.items() if not is_busy)
            surplus = next(idle, database) if was_busy else database
            del self._kept[surplus]
        if surplus.lock.acquire(
            blocking=False
        ):  # otherwise it is in use again, and comes back here
            try:
                surplus.close()
            finally:
                surplus.lock.release()

    def forget(self, database: Database) -> None:
        """It was closed for good."""
        with self._lock:
            self._kept.pop(database, None)

    @property
    def kept(self) -> int:
        """Databases with connections that are not in use."""
        with self._lock:
            return len(self._kept)
