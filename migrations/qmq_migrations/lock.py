"""One migration at a time: the lock of each kind of database.

A lock is a context manager around a connection. Inside it a transaction is open on that connection,
which the caller commits; whoever waited for the lock sees what the one before it committed. A
further database is a function and a line in `_LOCKS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Final

import sqlalchemy as sa

from qmq_migrations.errors import MigrationBusyError, NoLockError

Lock = Callable[[sa.Connection, float], AbstractContextManager[None]]


def lock_for(connection: sa.Connection, wait_s: float) -> AbstractContextManager[None]:
    """The lock of this connection's database, waited for at most so long.

    Raises `MigrationBusyError` on entering when the wait was not enough.
    """
    lock = _LOCKS.get(connection.dialect.name)
    if lock is None:
        known = ", ".join(sorted(_LOCKS))
        raise NoLockError(
            f"no lock for a {connection.dialect.name} database; known: {known}. "
            "Print the statements with `qmq db sql` and run them with your own tools."
        )
    return lock(connection, wait_s)


@contextmanager
def _sqlite(connection: sa.Connection, wait_s: float) -> Iterator[None]:
    """The database file's own write lock, taken before anything is read.

    SQLite's DDL is transactional, so a run that dies inside leaves nothing behind.
    """
    connection.exec_driver_sql(f"PRAGMA busy_timeout = {round(wait_s * 1000)}")
    try:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
    except sa.exc.OperationalError as error:
        if "locked" not in str(error.orig):
            raise
        raise MigrationBusyError(
            f"the database stayed locked for {wait_s:g} s: another process writes to it"
        ) from error
    yield


_LOCKS: Final[Mapping[str, Lock]] = {"sqlite": _sqlite}
