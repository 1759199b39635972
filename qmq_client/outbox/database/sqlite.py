"""The outbox on SQLite.

Pitfalls handled here, each reproduced: `FOR UPDATE SKIP LOCKED` is silently ignored, so a claim is one
UPDATE … RETURNING; a transaction that read before it writes fails at once if another wrote in
between, so one of ours that will write begins IMMEDIATE.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.pool import StaticPool

from qmq_client.errors import ConfigurationError
from qmq_client.outbox.database.claiming import ClaimTerms, row_id, wanted_rows
from qmq_client.outbox.database.dialect import OutboxDialect
from qmq_client.outbox.database.placeholders import placeholders
from qmq_client.outbox.database.sqlite_quiet import QuietMoments
from qmq_client.outbox.database.sqlite_writable import refuse_what_cannot_be_written
from qmq_client.outbox.database.table_names import table_sql
from qmq_client.outbox.row import OutboxRow

#: `julianday` counts days since noon of 24 November 4714 BC; this is 1970. Its double is exact to
#: 0.05 ms, and `unixepoch('subsec')` needs a newer SQLite.
NOW_MS: Final = "CAST((julianday('now') - 2440587.5) * 86400000.0 + 0.5 AS INTEGER)"
#: The publisher tries again anyway; a longer wait would only delay its stop.
BUSY_MS_MAX: Final = 2_000
_ID_BYTES: Final = 16
#: The lowest byte of an error code is its kind. An error without a kind counts as well: a trigger
#: gives it when its own tables are gone.
_PRIMARY_CODE: Final = 0xFF
_REFUSING: Final = (sqlite3.SQLITE_CONSTRAINT, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_AUTH)


def make_dialect(engine: sa.Engine) -> SqliteDialect:
    """The dialect for this engine; refuses one whose threads see different databases."""
    is_in_memory = engine.url.database in (None, "", ":memory:")
    if is_in_memory and not isinstance(engine.pool, StaticPool):
        raise ConfigurationError(
            setting="engine",
            value=f"SQLite in memory with {type(engine.pool).__name__}",
            remedy="Every connection would have a database of its own. Use a file, or "
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
    def quiet_moment(self, *, waits: bool) -> Iterator[bool]:
        with self._quiet.moment(waits=waits) as is_quiet:
            yield is_quiet

    def after_fork(self) -> None:
        self._quiet.after_fork()

    def on_connect(self, connection: Any, dialect: sa.Dialect) -> None:
        """For connections of our own: a power cut may lose what they write, but never tear it.

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
        """Nothing to do: the INSERT takes the only write lock and holds it until COMMIT."""
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
    """The first value that this statement returns; for the driver's connection, or an adapter of it."""
    cursor = connection.cursor()
    cursor.execute(statement)
    row = cursor.fetchone()
    cursor.close()
    return row and row[0]


def _give_ids(
    connection: sa.Connection, outbox: sa.Table, row_ids: Sequence[int]
) -> dict[int, bytes]:
    """Replace ids that no statement could name, so that these rows can be parked like any damaged row.

    SQLite stores whatever it is given, even a text as an id. The record still carries the true one.
    """
    new_ids = {number: os.urandom(_ID_BYTES) for number in row_ids}
    for number, message_id in new_ids.items():
        connection.execute(
            sa.update(outbox).where(outbox.c.id == number).values(message_id=message_id)
        )
    return new_ids
