"""The outbox on SQLite, a file or a database in memory.

Pitfalls handled here, each reproduced: `FOR UPDATE SKIP LOCKED` is silently ignored, so a claim is one
UPDATE … RETURNING; a transaction that read before it writes fails at once if another wrote in
between, so the store's transactions that write begin IMMEDIATE.

A transaction that has read fails at its first write if another one wrote in between. So deletes of
the publisher wait for a *quiet moment* in which the application uses no connection to the file, and
an application that takes a connection during it waits for its end.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.pool import StaticPool

from qmq_client.clock import SYSTEM_CLOCK
from qmq_client.errors import ConfigurationError
from qmq_client.outbox.database.claiming import ClaimTerms, row_id, wanted_rows
from qmq_client.outbox.database.dialect import OutboxDialect
from qmq_client.outbox.database.placeholders import placeholders
from qmq_client.outbox.database.table_names import table_sql
from qmq_client.outbox.row import OutboxRow

#: Journals that stay between transactions, by mode, with their suffix. In other modes each
#: transaction creates one.
_JOURNALS: Final = {
    "wal": ("-wal", "-shm"),
    "truncate": ("-journal",),
    "persist": ("-journal",),
    "memory": (),
    "off": (),
}


def unwritable(path: str, journal_mode: str = "") -> str | None:
    """The file or directory that a COMMIT must write and this process may not; None without one.

    SQLite itself reports it only when a row is written, which may be long after the start. A
    journal is created in the directory, unless its mode keeps one there, or keeps it in memory.
    """
    journals = [path + end for end in _JOURNALS.get(journal_mode, ())]
    for each in (path, *journals):
        if os.path.exists(each) and not _may(each, os.W_OK):
            return each
    if journal_mode in _JOURNALS and all(map(os.path.exists, journals)):
        return None
    directory = os.path.dirname(path)
    return None if _may(directory, os.W_OK | os.X_OK) else directory


def read_only_error(path: str, refused: str) -> sqlite3.OperationalError:
    """The error for a file whose rows cannot be claimed, given the path from `unwritable`."""
    return sqlite3.OperationalError(
        f"{path} is read-only here, because {refused} is not writable for this user: no row can be "
        "claimed. Allow it to write the file and its directory"
    )


def _may(path: str, mode: int) -> bool:
    return os.access(path, mode, effective_ids=os.access in os.supports_effective_ids)


def refuse_what_cannot_be_written(connection: Any) -> None:
    """Refuse read-only files before anything is claimed, as replicas are refused.

    `connection`: of the driver, or SQLAlchemy's adapter of an asynchronous one.
    """
    cursor = connection.cursor()
    cursor.execute("PRAGMA database_list")
    path = cursor.fetchone()[2]
    mode = ""
    with suppress(sqlite3.OperationalError):  # even a read may need to create a log
        cursor.execute("PRAGMA journal_mode")
        mode = cursor.fetchone()[0]
    cursor.close()
    if path and (refused := unwritable(path, mode)):
        connection.close()
        raise read_only_error(path, refused)


#: Longest wait of an application, and the interval of its checks. A delete takes a millisecond, or
#: longer on a slow disk.
_LOOKS_MAX: Final = 500
_LOOK_S: Final = 0.001


class QuietMoments:
    """The quiet moments of one engine of the application. Safe for any number of threads."""

    def __init__(self, engine: sa.Engine) -> None:
        #: Threads that are in a quiet moment now; changed in single steps.
        self._inside: dict[object, int] = {}
        #: Connections in use. The pool has its own count, behind a lock that the application may hold.
        self._in_use: dict[object, None] = {}
        event.listen(engine, "checkout", self._on_checkout)
        event.listen(engine, "checkin", self._on_checkin)
        event.listen(engine, "detach", self._on_checkin)

    @contextmanager
    def moment(self) -> Iterator[bool]:
        """Whether no connection is in use; the application's check-outs within the block wait for a short time."""
        mine = object()
        try:
            # Set before the check, so that a concurrent check-out is seen or waits.
            self._inside[mine] = threading.get_ident()
            yield not self._in_use
        finally:
            self._inside.pop(mine, None)

    def after_fork(self) -> None:
        """In a forked child: forget the parent's threads."""
        self._inside.clear()
        self._in_use.clear()

    def _on_checkin(self, _: object, entry: object) -> None:
        self._in_use.pop(entry, None)

    def _on_checkout(self, _: object, entry: object, __: object) -> None:
        self._in_use[entry] = None
        here = threading.get_ident()
        for _look in range(_LOOKS_MAX):
            if all(thread == here for thread in self._inside.copy().values()):
                return
            SYSTEM_CLOCK.sleep(_LOOK_S)


#: `julianday` counts days since noon of 24 November 4714 BC; this is 1970. Its double is exact to
#: 0.05 ms, and `unixepoch('subsec')` needs a newer SQLite.
NOW_MS: Final = "CAST((julianday('now') - 2440587.5) * 86400000.0 + 0.5 AS INTEGER)"
#: The publisher tries again anyway; a longer wait would only delay its stop.
BUSY_MS_MAX: Final = 2_000
_ID_BYTES: Final = 16
#: The lowest byte of an error code is its kind. An error without a kind counts as well: a trigger
#: raises one if its own tables are missing.
_PRIMARY_CODE: Final = 0xFF
_REFUSING: Final = (sqlite3.SQLITE_CONSTRAINT, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_AUTH)


def make_dialect(engine: sa.Engine) -> SqliteDialect:
    """The dialect for this engine; refuses one whose threads see different databases."""
    is_in_memory = engine.url.database in (None, "", ":memory:")
    if is_in_memory and not isinstance(engine.pool, StaticPool):
        raise ConfigurationError(
            setting="engine",
            value=f"SQLite in memory with {type(engine.pool).__name__}",
            remedy="Every connection would have a separate database. Use a file, or "
            "create_engine(..., poolclass=StaticPool, "
            'connect_args={"check_same_thread": False}).',
        )
    return SqliteDialect(QuietMoments(engine))


class SqliteDialect(OutboxDialect):
    """See `OutboxDialect`."""

    now_ms = NOW_MS

    def __init__(self, quiet: QuietMoments) -> None:
        super().__init__()
        self._quiet = quiet

    @contextmanager
    def quiet_moment(self) -> Iterator[bool]:
        with self._quiet.moment() as is_quiet:
            yield is_quiet

    def after_fork(self) -> None:
        self._quiet.after_fork()

    def on_connect(self, connection: Any, dialect: sa.Dialect) -> None:
        """For connections of the store: a power cut may lose their commits, but not tear them.

        That holds only with a write-ahead log; otherwise `synchronous` stays as it is.
        """
        refuse_what_cannot_be_written(connection)
        _run(connection, f"PRAGMA busy_timeout = {BUSY_MS_MAX}")
        if _run(connection, "PRAGMA journal_mode") == "wal":
            _run(connection, "PRAGMA synchronous = NORMAL")

    def begin(self, connection: sa.Connection, *, is_to_write: bool) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE" if is_to_write else "BEGIN")

    def binary(self, value: bytes) -> str:
        return f"X'{value.hex()}'"

    def lock_keys(
        self, connection: sa.Connection, order_lock: sa.Table, rows: Sequence[OutboxRow]
    ) -> bool:
        """Does nothing: the INSERT takes the only write lock and holds it until COMMIT."""
        return True

    def is_table_missing(self, error: sa.exc.DBAPIError) -> bool:
        text = str(error.orig)
        return "no such table" in text or "has no column named" in text

    def is_refused(self, error: sa.exc.DBAPIError) -> bool:
        code = getattr(error.orig, "sqlite_errorcode", None)
        return code is not None and code & _PRIMARY_CODE in _REFUSING

    def faults(self, _: sa.Connection, __: Sequence[sa.Table]) -> list[str]:
        return []

    def claim(
        self, connection: sa.Connection, outbox: sa.Table, terms: ClaimTerms
    ) -> list[OutboxRow]:
        table = table_sql(connection, outbox)
        places = placeholders(connection.dialect)
        wanted = wanted_rows(NOW_MS, terms.keys, places)
        sized = (
            f"(SELECT id, due_at_ms, length(record) AS record_bytes FROM {table} "
            f"WHERE {wanted.text} LIMIT {terms.limit:d})"
        )
        # As bytes: the driver refuses a whole result if one text in it is damaged; so the row can be read,
        # recognized by its checksum, and parked alone.
        taken = connection.exec_driver_sql(
            f"UPDATE {table} SET token = {self.binary(terms.token)}, "
            f"due_at_ms = {NOW_MS} + {terms.lease_ms:d} WHERE id IN ("
            f"{wanted.fitting(sized, terms.bytes_max)}) "
            "RETURNING id, CAST(message_id AS BLOB), typeof(message_id) <> 'blob', "
            "CAST(subject AS BLOB), CAST(ordering_key AS BLOB), CAST(record AS BLOB), "
            "CAST(attempts AS INTEGER)",
            wanted.parameters,
        ).all()
        new_ids = _give_ids(connection, outbox, [row[0] for row in taken if row[2]])
        # RETURNING has no order of its own.
        return [
            OutboxRow(
                message_id=new_ids.get(number, message_id),
                subject=subject.decode(errors="replace"),
                ordering_key=key and key.decode(errors="replace"),
                record=record,
                attempts=attempts,
            )
            for number, message_id, _, subject, key, record, attempts in sorted(taken, key=row_id)
        ]


def _run(connection: Any, statement: str) -> Any:
    """The first value of this statement, on the driver's connection or an adapter of it."""
    cursor = connection.cursor()
    cursor.execute(statement)
    row = cursor.fetchone()
    cursor.close()
    return row and row[0]


def _give_ids(
    connection: sa.Connection, outbox: sa.Table, row_ids: Sequence[int]
) -> dict[int, bytes]:
    """Replace ids that cannot be used in statements, so that these rows can be parked like any damaged row.

    SQLite stores any value, even a text as an id. The record still has the correct one.
    """
    new_ids = {number: os.urandom(_ID_BYTES) for number in row_ids}
    for number, message_id in new_ids.items():
        connection.execute(
            sa.update(outbox).where(outbox.c.id == number).values(message_id=message_id)
        )
    return new_ids
