"""One migration at a time: the lock of each kind of database.

A lock is a context manager around a connection. Inside it a transaction is open on that connection;
at its orderly end that is committed and the lock given back. Whoever waited for the lock sees what
the one before it committed. A further database is a function and a line in `_LOCKS`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Final

import sqlalchemy as sa

from qmq_migrations.errors import MigrationBusyError, NoLockError

Lock = Callable[[sa.Connection, float, str], AbstractContextManager[None]]

_NAME: Final = "qmq_migrations"
#: PostgreSQL's locks have numbers for names; ours is made from the name.
_NUMBER: Final = int.from_bytes(hashlib.sha256(_NAME.encode()).digest()[:8], "big", signed=True)
_LOCK_NOT_AVAILABLE: Final = "55P03"  # PostgreSQL
_LOCK_WAIT_TIMEOUT: Final = 1205  # MySQL, also of DDL that waits for a transaction


def lock_for(
    connection: sa.Connection, wait_s: float, schema: str | None = None
) -> AbstractContextManager[None]:
    """The lock of this connection's database, waited for at most so long.

    Raises `MigrationBusyError` on entering when the wait was not enough.
    """
    lock = _LOCKS.get(connection.dialect.name)
    if lock is None:
        known = ", ".join(sorted(_LOCKS))
        raise NoLockError(
            f"There is no lock for a {connection.dialect.name} database; known: {known}. "
            "Print the statements with `qmq db sql` and run them with your own tools."
        )
    return lock(connection, wait_s, schema or "")


@contextmanager
def _sqlite(connection: sa.Connection, wait_s: float, _schema: str) -> Iterator[None]:
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
    connection.commit()


@contextmanager
def _mysql(connection: sa.Connection, wait_s: float, schema: str) -> Iterator[None]:
    """A named lock of the server, held by the connection and gone with it.

    MySQL's DDL commits what came before it, so a lock in a table would be lost by the first step.
    Names are the server's, not the database's, and have at most 64 characters. The wait bounds the
    steps too: by default one that meets an open transaction waits for a day or a year, and every
    later statement on its table behind it.
    """
    target = schema or connection.exec_driver_sql("SELECT DATABASE()").scalar() or ""
    digest = hashlib.sha256(str(target).encode()).hexdigest()[:32]
    values = {"name": f"{_NAME}_{digest}", "wait_s": wait_s}
    got = connection.execute(sa.text("SELECT GET_LOCK(:name, :wait_s)"), values).scalar()
    if got != 1:
        raise _busy(wait_s)
    usual_s = connection.exec_driver_sql("SELECT @@session.lock_wait_timeout").scalar_one()
    try:
        _set_lock_wait(connection, max(1, round(wait_s)))
        yield
        connection.commit()
    except sa.exc.OperationalError as error:
        if error.orig is None or error.orig.args[:1] != (_LOCK_WAIT_TIMEOUT,):
            raise
        raise _busy(wait_s) from error
    finally:
        # A connection that is lost has lost the lock too.
        with suppress(sa.exc.SQLAlchemyError):
            connection.rollback()
            _set_lock_wait(connection, usual_s)
            connection.execute(sa.text("SELECT RELEASE_LOCK(:name)"), values)
            connection.rollback()


def _set_lock_wait(connection: sa.Connection, wait_s: int) -> None:
    connection.exec_driver_sql(f"SET SESSION lock_wait_timeout = {wait_s:d}")


@contextmanager
def _postgresql(connection: sa.Connection, wait_s: float, _schema: str) -> Iterator[None]:
    """An advisory lock of the database that goes with the transaction, also behind a pooler.

    The wait bounds the locks of the steps too: a step that waits for a long business transaction
    makes every later one wait behind it.
    """
    set_wait = sa.text("SELECT set_config('lock_timeout', :wait, true)")
    connection.execute(set_wait, {"wait": f"{max(1, round(wait_s * 1000))}ms"})
    try:
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_NUMBER})")
        yield
    except sa.exc.OperationalError as error:
        if getattr(error.orig, "sqlstate", None) != _LOCK_NOT_AVAILABLE:
            raise
        raise _busy(wait_s) from error
    connection.commit()


def _busy(wait_s: float) -> MigrationBusyError:
    return MigrationBusyError(
        f"no lock was free within {wait_s:g} s: another process migrates this database, or a "
        "long transaction holds one of its tables"
    )


_LOCKS: Final[Mapping[str, Lock]] = {
    "mariadb": _mysql,
    "mysql": _mysql,
    "postgresql": _postgresql,
    "sqlite": _sqlite,
}
