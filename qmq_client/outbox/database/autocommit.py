"""Detects a connection that commits each statement by itself, from the driver's state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sqlalchemy as sa


def is_autocommit(connection: sa.Connection) -> bool:
    """Whether the next statement on this connection would be committed at once.

    Sends no statement. SQLite's driver is also "in autocommit" if the application begins its
    transactions by its own BEGIN, as SQLAlchemy's documentation shows: then one is already open.
    Requires: SQLAlchemy's transaction has begun.
    """
    adapted: Any = connection.connection.dbapi_connection
    if getattr(driver_of(connection), "autocommit", None) is True:
        return True  # SQLite's own mode, from Python 3.12 on; other drivers have the same attribute
    if not connection.dialect.detect_autocommit_setting(adapted):
        return False
    return connection.dialect.name != "sqlite" or not in_transaction(connection)


def begins_no_transaction(connection: sa.Connection) -> bool:
    """Whether the next statement on this asyncpg connection would be a separate transaction.

    SQLAlchemy makes asyncpg begin a transaction with the first statement, and does not notice that
    a text, like `ROLLBACK`, ended it: later statements are in no transaction. A statement without
    effect shows which case applies. Other drivers begin the next transaction themselves.
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
    """The driver's own connection, also for a connection that was detached from its pool."""
    proxied = connection.connection
    if (driver := proxied.driver_connection) is not None:
        return driver
    adapted: Any = proxied.dbapi_connection
    return getattr(adapted, "driver_connection", adapted)


def begin_to_write(connection: sa.Connection) -> None:
    """On SQLite, take the write lock for a transaction that has just begun, or wait for it; does nothing otherwise.

    A transaction that has read fails at its first write if another one wrote in between, and cannot
    wait for it. Connections whose transactions the application begins itself, or in AUTOCOMMIT, are
    not changed.
    """
    if connection.dialect.name != "sqlite" or in_transaction(connection):
        return
    if not is_autocommit(connection):
        connection.exec_driver_sql("BEGIN IMMEDIATE")
