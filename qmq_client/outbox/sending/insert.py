"""The INSERT of outbox rows through the application's own connection.

A new row is already claimed: it carries the token of its process and falls due after the takeover
time, so the publisher and the watchdog share one protocol. One statement inserts any number of rows,
as text: SQLAlchemy would compile it again for each number, and drivers pass several parameter sets
one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Final

import sqlalchemy as sa

from qmq_client.errors import (
    AutocommitError,
    EncodingError,
    NoTransactionError,
    OutboxMissingError,
    OutboxRowLostError,
    TooLargeError,
)
from qmq_client.outbox.checking.rights import PRODUCER
from qmq_client.outbox.checking.schema import faults_of, missing_error
from qmq_client.outbox.committed.waiting import has_order_locks
from qmq_client.outbox.database.autocommit import begins_no_transaction, is_autocommit
from qmq_client.outbox.database.dialect import LAST_CHARACTER, OutboxDialect
from qmq_client.outbox.database.placeholders import placeholders
from qmq_client.outbox.database.table_names import in_own_schema
from qmq_client.outbox.row import OutboxRow, ids_text
from qmq_client.outbox.table import AS_NAMED, LIVE, Tables
from qmq_client.wire.shown import shorten

#: Rows in one statement: with five parameters each, far below every database's limit of parameters.
ROWS_PER_INSERT_MAX: Final = 1_000
#: How many statements are cached, one for each number of rows.
_KEPT_TEXTS: Final = 16
_COLUMNS: Final = (
    "message_id",
    "subject",
    "ordering_key",
    "record",
    "token",
    "state",
    "attempts",
    "due_at_ms",
    "created_at_ms",
)


class Inserts:
    """Writes the rows of one producer. Safe for any number of threads."""

    def __init__(
        self,
        engine: sa.Engine,
        dialect: OutboxDialect,
        tables: Tables,
        *,
        takeover_ms: int,
        is_ordered: bool,
        is_strict: bool,
    ) -> None:
        self._engine = engine
        self._dialect = dialect
        self._tables = tables
        self._takeover_ms = takeover_ms
        self._is_ordered = is_ordered
        self._is_strict = is_strict
        self._texts: dict[tuple[int, bool], str] = {}
        if engine.dialect.name == "sqlite":  # the schema is given, so no connection is needed
            in_own_schema(engine.dialect, tables)
        self._is_checked = False
        #: The longest record that one statement can carry; None if the server sets no limit.
        self._record_bytes_max: int | None = None
        #: The last ordering key that was checked against the connections' character set.
        self._last_character = LAST_CHARACTER

    @property
    def tables(self) -> Tables:
        """The tables with their schema-qualified names. Requires: the engine has connected."""
        return in_own_schema(self._engine.dialect, self._tables)

    def write(
        self,
        connection: sa.Connection,
        rows: Sequence[OutboxRow],
        token: bytes,
        *,
        fill_locks: Callable[[], object],
    ) -> None:
        """Write these rows in the connection's transaction.

        `fill_locks` inserts the rows of the lock table for ordering keys, on another connection.
        Raises before any of them is written: `AutocommitError`, `OutboxMissingError` for wrong tables,
        `InvalidMessageError` for a row that this server cannot take. Raises the database's own errors with
        a note that names the messages.
        """
        if is_autocommit(connection):
            raise AutocommitError(
                "the connection commits every statement by itself, so a rollback would leave the message: "
                "remove isolation_level='AUTOCOMMIT', begin a transaction, or use `send_now`"
            )
        if begins_no_transaction(connection):
            raise AutocommitError(
                "a COMMIT or ROLLBACK given as text ended the transaction, and SQLAlchemy has asyncpg begin no "
                "other, so every statement commits by itself and a rollback would leave the message: end the "
                "transaction by the session's or connection's own `commit()` or `rollback()`"
            )
        if not self._is_checked:
            self._check(connection, fill_locks)
        self._check_rows(rows)
        try:
            if self._is_strict:
                self._dialect.refuse_hidden(connection, self.tables.outbox)
            if self._is_ordered and any(row.ordering_key is not None for row in rows):
                self._lock_keys(connection, rows)
            for some in self._portions(rows):
                self._insert(connection, some, token)
        except sa.exc.DBAPIError as error:
            self._explain(error, rows)
            raise

    def _lock_keys(self, connection: sa.Connection, rows: Sequence[OutboxRow]) -> None:
        order_lock = self.tables.order_lock
        if not self._dialect.lock_keys(connection, order_lock, rows):
            self._is_checked = False  # the next send fills it
            raise OutboxMissingError(
                f"rows of {order_lock.fullname} are missing for this transaction, so the keys of its messages "
                "could not be locked. Repeat the transaction: they were filled just now, or will be by the "
                "next send. If that does not help, a temporary table of that name hides them"
            )

    def _insert(self, connection: sa.Connection, rows: Sequence[OutboxRow], token: bytes) -> None:
        skips_known = any(row.is_repeatable for row in rows)
        values: list[object] = []
        for row in rows:
            values += (row.message_id, row.subject, row.ordering_key, row.record, token)
        text = self._text(len(rows), skips_known=skips_known)
        written = connection.exec_driver_sql(text, tuple(values)).rowcount
        is_short = not skips_known and 0 <= written < len(rows)
        if is_short or (self._is_strict and not self._are_there(connection, rows)):
            raise OutboxRowLostError(
                f"{ids_text(rows)} written to {self.tables.outbox.fullname} is not there: a trigger or a "
                "rule of that table keeps rows out (`qmq doctor` looks for those)"
            )

    def _are_there(self, connection: sa.Connection, rows: Sequence[OutboxRow]) -> bool:
        number = self.tables.outbox.c.message_id
        query = sa.select(sa.func.count()).where(number.in_({row.message_id for row in rows}))
        found = connection.scalar(query, execution_options=AS_NAMED)
        return bool(found == len({row.message_id for row in rows}))

    def _text(self, count: int, *, skips_known: bool) -> str:
        text = self._texts.get((count, skips_known))
        if text is not None:
            return text
        quote = self._engine.dialect.identifier_preparer
        places = placeholders(self._engine.dialect)
        now_ms = self._dialect.now_ms
        made = f"{LIVE}, 0, {now_ms} + {self._takeover_ms}, {now_ms}"
        rows = ", ".join(
            f"({', '.join(next(places) for _ in range(5))}, {made})" for _ in range(count)
        )
        columns = ", ".join(quote.quote(name) for name in _COLUMNS)
        text = f"INSERT INTO {quote.format_table(self.tables.outbox)} ({columns}) VALUES {rows}"
        text += self._dialect.skip_known if skips_known else ""
        if len(self._texts) < _KEPT_TEXTS or count == 1:
            self._texts[count, skips_known] = text
        return text

    def _portions(self, rows: Sequence[OutboxRow]) -> Iterator[Sequence[OutboxRow]]:
        """The rows of each statement: one statement, unless the rows are very many or very large."""
        if not self._is_ordered and any(row.is_repeatable for row in rows):
            # All transactions use the same order, so two that write the same ids cannot deadlock.
            rows = sorted(rows, key=lambda row: row.message_id)
        first, portion_bytes = 0, 0
        for i, row in enumerate(rows):
            portion_bytes += len(row.record)
            is_large = portion_bytes > (self._record_bytes_max or portion_bytes)
            if i > first and (is_large or i - first == ROWS_PER_INSERT_MAX):
                yield rows[first:i]
                first, portion_bytes = i, len(row.record)
        yield rows[first:]

    def _check(self, connection: sa.Connection, fill_locks: Callable[[], object]) -> None:
        """Look at the tables once in this process, on the application's connection: reads only."""
        tables = self.tables
        needed = [tables.outbox, *([tables.order_lock] if self._is_ordered else [])]
        faults = faults_of(connection, self._dialect, tables, needed, PRODUCER, asks_rights=False)
        if faults is not None:
            raise missing_error(self._engine, faults)
        is_locking = self._is_ordered and connection.dialect.name != "sqlite"
        # Checked before any row is locked: on MySQL the lock of a missing row would prevent its insertion.
        if is_locking and (
            self._dialect.locks_what_it_reads(connection)
            or not has_order_locks(connection, tables.order_lock)
        ):
            fill_locks()
        self._record_bytes_max = self._dialect.record_bytes_max(connection)
        self._last_character = self._dialect.last_character(connection)
        self._is_checked = True

    def _check_rows(self, rows: Sequence[OutboxRow]) -> None:
        allowed = self._record_bytes_max
        for row in rows:
            if allowed is not None and len(row.record) > allowed:
                raise TooLargeError(
                    field="message",
                    limit=f"{allowed} bytes in one statement of this database",
                    value=f"{len(row.record)} bytes",
                    remedy="Raise max_allowed_packet on the server, or keep the content elsewhere and "
                    "send a reference to it.",
                )
            if row.ordering_key and max(row.ordering_key) > self._last_character:
                raise unencodable_key([row])

    def _explain(self, error: sa.exc.DBAPIError, rows: Sequence[OutboxRow]) -> None:
        """Add the messages to the error of an INSERT; raises another error if the table is missing."""
        outbox = self.tables.outbox
        note = f"while writing {ids_text(rows)} to {outbox.fullname}"
        # The error shows only one row of the statement, and no values, because these are message bodies.
        with suppress(AttributeError):
            error.statement = self._text(1, skips_known=False)
        error.hide_parameters = True
        error.params = None
        if self._dialect.is_table_missing(error):
            self._is_checked = False
            raise OutboxMissingError(
                f"{error.orig}, {note}. Where it was dropped, run `qmq db migrate`; where it has another "
                "schema, name that: Producer(…, tables=make_tables(metadata, schema=…))."
            ) from error
        error.add_note(note)


def unencodable_key(rows: Sequence[OutboxRow]) -> EncodingError:
    """The error for an ordering key that the connection's character set cannot encode."""
    keys = [row.ordering_key for row in rows if row.ordering_key and not row.ordering_key.isascii()]
    return EncodingError(
        field="key",
        limit="characters of the connection's character set, with order_by_key",
        value=shorten(keys[0] if keys else ""),
        remedy="Connect with charset=utf8mb4 (MySQL, MariaDB) or client_encoding=utf8 "
        "(PostgreSQL), or choose another key.",
    )


def closed_error(error: sa.exc.InvalidRequestError) -> NoTransactionError:
    """The error for a session whose transaction accepts no more statements."""
    return NoTransactionError(
        f"the session's transaction accepts no more statements: {error}. Send before the commit, and inside an "
        "`after_begin` listener with `session=connection`, the event's connection"
    )
