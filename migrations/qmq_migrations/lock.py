"""One migration at a time: the lock for each kind of database.

A lock is a context manager around a connection. Inside it a transaction is open on that connection;
at the normal end it is committed and the lock released. So a process that waited for the lock sees
what the one before it committed. A further database is a function and a line in `_LOCKS`.
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
#: PostgreSQL's locks are identified by numbers; ours is derived from the name.
_NUMBER: Final = int.from_bytes(hashlib.sha256(_NAME.encode()).digest()[:8], "big", signed=True)
_LOCK_NOT_AVAILABLE: Final = "55P03"  # PostgreSQL
_LOCK_WAIT_TIMEOUT: Final = 1205  # MySQL, also of DDL that waits for a transaction


def lock_for(
    connection: sa.Connection, wait_s: float, schema: str | None = None
) -> AbstractContextManager[None]:
    """The lock for this connection's database; entering it waits at most `wait_s`.

    Raises `MigrationBusyError` on entering if the wait was too short.
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

    SQLite's DDL is transactional, so a run that dies leaves nothing behind.
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
    """A named lock of the server, held by the connection and released with it.

    MySQL's DDL commits earlier statements, so a lock in a table would be lost by the first step.
    Names belong to the server, not to the database, and have at most 64 characters. The wait also
    bounds the steps: by default a step that meets an open transaction waits for a day or a year,
    with every later statement on its table after it.
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
        # A lost connection has lost the lock too.
        with suppress(sa.exc.SQLAlchemyError):
            connection.rollback()
            _set_lock_wait(connection, usual_s)
            connection.execute(sa.text("SELECT RELEASE_LOCK(:name)"), values)
            connection.rollback()


def _set_lock_wait(connection: sa.Connection, wait_s: int) -> None:
    connection.exec_driver_sql(f"SET SESSION lock_wait_timeout = {wait_s:d}")


@contextmanager
def _postgresql(connection: sa.Connection, wait_s: float, _schema: str) -> Iterator[None]:
    """An advisory lock of the database that ends with the transaction, even behind a pooler.

    The wait also bounds the locks of the steps: a step that waits for a long business transaction
    makes every later one wait after it.
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
