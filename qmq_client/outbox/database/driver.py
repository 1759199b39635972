"""Finds the driver's own connection behind SQLAlchemy's wrappers.

Only the driver knows whether a transaction is really open. SQLAlchemy can be wrong about
AUTOCOMMIT, and about transactions that were ended behind its back.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import sqlalchemy as sa


def driver_of(connection: sa.Connection) -> Any:
    """The driver's own connection, also for an asynchronous engine."""
    return unwrapped(connection.connection)


def unwrapped(proxied: Any) -> Any:
    """The same for a connection from a pool."""
    if (driver := proxied.driver_connection) is not None:
        return driver
    adapted = proxied.dbapi_connection  # detached from its pool
    return getattr(adapted, "driver_connection", adapted)


def file_number(driver: Any) -> int | None:
    """The descriptor of a driver's socket, for psycopg, pymysql and asyncmy; None if there is none."""
    with suppress(Exception):  # closed, or of a kind that has none
        if hasattr(driver, "fileno"):
            return int(driver.fileno())
        if (blocking := getattr(driver, "_sock", None)) is not None:
            return int(blocking.fileno())
        return int(driver._writer.get_extra_info("socket").fileno())
    return None


def error_number(error: BaseException | None) -> int | None:
    """The number of a MySQL driver's error; None for errors without one."""
    arguments = getattr(error, "args", ())
    number = arguments[0] if arguments else None
    return number if isinstance(number, int) else None


def is_encodable(text: str, encoding: str) -> bool:
    """Whether Python's codec of this name has every character of the text."""
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True


def root_engine(engine: sa.Engine) -> sa.Engine:
    """The engine itself, if the given one only adds options to another."""
    while isinstance(proxied := getattr(engine, "_proxied", None), sa.Engine):
        engine = proxied
    return engine


def keep_one_connection(pool: sa.Pool) -> None:
    """Close the pool's idle connections except the one that is given out next.

    Requires: the pool gives out first what came back last.
    """
    if not isinstance(pool, sa.QueuePool) or pool.checkedin() < 2:
        return
    with suppress(sa.exc.SQLAlchemyError):  # one that was gone, and cannot be made anew: not kept
        kept, *others = [pool.connect() for _ in range(pool.checkedin())]
        for other in others:
            other.invalidate()
            other.close()
        kept.close()
