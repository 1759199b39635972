"""Detects a connection that commits each statement by itself, asking the driver through SQLAlchemy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sqlalchemy as sa


def is_autocommit(connection: sa.Connection) -> bool:
    """Whether the next statement on this connection would be committed at once.

    Sends nothing. SQLite's driver is also "in autocommit" where the application begins its
    transactions by its own BEGIN, as SQLAlchemy's documentation shows: then one is open by now.
    Requires: SQLAlchemy's transaction has begun.
    """
    adapted: Any = connection.connection.dbapi_connection
    if getattr(driver_of(connection), "autocommit", None) is True:
        return True  # SQLite's own mode, from Python 3.12 on; and of other drivers, the same
    if not connection.dialect.detect_autocommit_setting(adapted):
        return False
    return connection.dialect.name != "sqlite" or not in_transaction(connection)


def begins_no_transaction(connection: sa.Connection) -> bool:
    """Whether the next statement on this connection would be a transaction of its own, with asyncpg.

    SQLAlchemy has asyncpg begin with the first statement, and does not learn that a text, like `ROLLBACK`,
    ended that: what follows is in no transaction. Which of both it is, a statement without effect tells.
    Other drivers begin the next transaction themselves.
    """
    is_begun: Callable[[], bool] | None
    is_begun = getattr(driver_of(connection), "is_in_transaction", None)  # asyncpg
    if is_begun is None or is_begun():
        return False
    connection.exec_driver_sql("SELECT 1").close()
    return not is_begun()


def in_transaction(connection: sa.Connection) -> bool:
    """Whether SQLite's driver has a transaction open; also for an asynchronous engine."""
    return bool(getattr(driver_of(connection), "in_transaction", False))


def driver_of(connection: sa.Connection) -> Any:
    """The driver's own connection, also of one that was detached from its pool."""
    proxied = connection.connection
    if (driver := proxied.driver_connection) is not None:
        return driver
    adapted: Any = proxied.dbapi_connection
    return getattr(adapted, "driver_connection", adapted)


def begin_to_write(connection: sa.Connection) -> None:
    """Take SQLite's write lock for a transaction that has just begun, or wait for it; else nothing.

    A transaction that has read fails at its first write if another one wrote in between, and none can wait
    for that. An application that begins by itself, or in AUTOCOMMIT, is left alone.
    """
    if connection.dialect.name != "sqlite" or in_transaction(connection):
        return
    if not is_autocommit(connection):
        connection.exec_driver_sql("BEGIN IMMEDIATE")
