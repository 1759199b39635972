"""Checks of SQLite: most settings belong to a connection, so only the application's own engine shows them."""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa

from qmq_client.doctor.finding import Findings, found
from qmq_client.outbox.database.sqlite import read_only_error, unwritable

_FULL: Final = 2
_BUSY_MS_MIN: Final = 1_000
_NO_JOURNAL: Final = ("off", "memory")


def settings(connection: sa.Connection, *, is_application: bool) -> Findings:
    """Settings of the file, and of the connection if it is the application's."""
    path = str(_pragma(connection, "database_list", column=2))
    if not path:
        return  # a database in memory is lost anyway
    mode = _journal_mode(connection, path)
    if mode in _NO_JOURNAL:
        yield found("sqlite.journal_off", f"journal_mode is {mode}", "PRAGMA journal_mode = WAL")
    elif mode != "wal":
        yield found("sqlite.journal_mode", f"journal_mode is {mode}", "PRAGMA journal_mode = WAL")
    if refused := unwritable(path, mode):
        fix = f"let this user write {path} and its directory"
        yield found("server.read_only", f"{refused} is not writable", fix)
    if not is_application:
        return
    if _pragma(connection, "query_only"):
        yield found("server.read_only", "query_only is 1", "PRAGMA query_only = OFF")
    synchronous = int(str(_pragma(connection, "synchronous")))
    if synchronous < _FULL:
        read = f"synchronous is {synchronous}"
        yield found("sqlite.synchronous", read, "PRAGMA synchronous = FULL")
    busy_ms = int(str(_pragma(connection, "busy_timeout")))
    if busy_ms < _BUSY_MS_MIN:
        read = f"busy_timeout is {busy_ms} ms"
        yield found("sqlite.busy_timeout", read, "PRAGMA busy_timeout = 5000")


def _journal_mode(connection: sa.Connection, path: str) -> str:
    """The journal mode. Raises an error with the cause if the file cannot even be read."""
    statement = "PRAGMA journal_mode"
    try:
        return str(connection.exec_driver_sql(statement).scalar_one())
    except sa.exc.OperationalError as error:
        if refused := unwritable(path):
            cause = read_only_error(path, refused)
            raise sa.exc.OperationalError(statement, None, cause) from error
        raise


def _pragma(connection: sa.Connection, name: str, *, column: int = 0) -> object:
    row = connection.exec_driver_sql(f"PRAGMA {name}").first()
    return None if row is None else row[column]
