"""Locks that allow one migration of a database at a time, one kind for each kind of database.

A lock is a context manager around a connection. Inside it a transaction is open on that connection.
A normal exit commits the transaction and releases the lock, so the next process sees what this one
committed. To support another database, add a function and a line in `_LOCKS`.
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
#: PostgreSQL identifies advisory locks by numbers; this one is derived from the name.
_NUMBER: Final = int.from_bytes(hashlib.sha256(_NAME.encode()).digest()[:8], "big", signed=True)
_LOCK_NOT_AVAILABLE: Final = "55P03"  # PostgreSQL
_LOCK_WAIT_TIMEOUT: Final = 1205  # MySQL; also raised by DDL that waits for a transaction


def lock_for(
    connection: sa.Connection, wait_s: float, schema: str | None = None
) -> AbstractContextManager[None]:
    """The lock for this connection's database; entering it waits at most `wait_s`.

    Entering raises `MigrationBusyError` if the lock is not free by then.
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
    """The write lock of the database file, taken before the first read.

    SQLite's DDL is transactional, so a killed run leaves no partial changes.
    """
    connection.exec_driver_sql(f"PRAGMA busy_timeout = {round(wait_s * 1000)}")
    try:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
    except sa.exc.OperationalError as error:
        if "locked" not in str(error.orig):
            raise
        raise MigrationBusyError(
            f"the database stayed locked for {wait_s:g} s: another process writes to it. Run this "
            "again when that has ended"
        ) from error
    yield
    connection.commit()


@contextmanager
def _mysql(connection: sa.Connection, wait_s: float, schema: str) -> Iterator[None]:
    """A named lock of the server, held by the connection and released with it.

    A row lock would not do: the first DDL statement commits, and releases it. Lock names are global
    to the server and have at most 64 characters, so the name has a digest of the database's name.

    `wait_s` also bounds the lock wait of each step. By default, a step that is blocked by an open
    transaction waits for a day (MariaDB) or a year (MySQL), and every later statement on its table
    waits for it.
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
        # If the connection was lost, the server has released the lock.
        with suppress(sa.exc.SQLAlchemyError):
            connection.rollback()
            _set_lock_wait(connection, usual_s)
            connection.execute(sa.text("SELECT RELEASE_LOCK(:name)"), values)
            connection.rollback()


def _set_lock_wait(connection: sa.Connection, wait_s: int) -> None:
    connection.exec_driver_sql(f"SET SESSION lock_wait_timeout = {wait_s:d}")


@contextmanager
def _postgresql(connection: sa.Connection, wait_s: float, _schema: str) -> Iterator[None]:
    """An advisory lock that ends with the transaction, also on a connection through a pooler.

    `wait_s` also bounds the lock wait of each step: while a step waits for a long business
    transaction, every later statement on its table waits for the step.
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
        "long transaction holds one of its tables. Run this again after it has ended"
    )


_LOCKS: Final[Mapping[str, Lock]] = {
    "mariadb": _mysql,
    "mysql": _mysql,
    "postgresql": _postgresql,
    "sqlite": _sqlite,
}
