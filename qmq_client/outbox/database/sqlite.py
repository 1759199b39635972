"""The outbox on SQLite.

Pitfalls handled here, each reproduced: in the driver's own transaction mode a SAVEPOINT as the
first statement commits by itself at its release, so an explicit BEGIN precedes it; `FOR UPDATE SKIP
LOCKED` is silently ignored, so a claim is one UPDATE … RETURNING; a transaction that read before it
writes fails at once if another wrote in between, so a transaction that will write begins IMMEDIATE.
"""

from __future__ import annotations

import asyncio
import os
import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.pool import StaticPool, reset_rollback

from qmq_client.errors import ConfigurationError
from qmq_client.outbox.database.blocking import blocking_engine
from qmq_client.outbox.database.claiming import ClaimTerms, row_id, wanted_rows
from qmq_client.outbox.database.dialect import BEGIN_OPTION, BEGIN_TO_WRITE
from qmq_client.outbox.database.driver import driver_of, root_engine
from qmq_client.outbox.database.link import Link, find_link, leave_out
from qmq_client.outbox.database.savepoint_names import folded_name
from qmq_client.outbox.database.shared_connection import shared_connection
from qmq_client.outbox.database.sqlite_turns import TURNS
from qmq_client.outbox.database.sqlite_writable import refuse_what_cannot_be_written
from qmq_client.outbox.database.table_names import table_sql
from qmq_client.outbox.row import OutboxRow
from qmq_client.outbox.table import refuse_autocommit_of_python

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
_BEGIN: Final = "BEGIN"
_SAVEPOINT: Final = re.compile(r"\s*SAVEPOINT\b", re.IGNORECASE)
#: Pools inherited through a fork. SQLite forbids even closing such a connection in the child.
_LEFT_TO_THE_PARENT: Final[list[sa.Pool]] = []


def make_dialect(engine: sa.Engine) -> SqliteDialect:
    """The dialect for this engine; refuses one whose threads see different databases."""
    if isinstance(engine.pool, StaticPool):
        return SqliteDialect(is_shared=True)
    if engine.url.database in (None, "", ":memory:"):
        raise ConfigurationError(
            setting="engine",
            value=f"SQLite in memory with {type(engine.pool).__name__}",
            remedy="Every connection would have a database of its own. Use a file, or "
            "create_engine(..., poolclass=StaticPool, "
            'connect_args={"check_same_thread": False}).',
        )
    return SqliteDialect(is_shared=False)


class SqliteDialect:
    """See `OutboxDialect`."""

    now_ms = NOW_MS
    #: Not used: a file always answers, and its locks have a time-out.
    transaction_s_max = 60.0
    statement_s_max: float | None = None
    idle_rollbacks = None

    def __init__(self, *, is_shared: bool) -> None:
        #: In memory: application and publisher share one connection.
        self._is_shared = is_shared

    def prepare_application(self, engine: sa.Engine) -> None:
        end_left_transactions(engine)
        if not engine.dialect.is_async:
            TURNS.close_before_forks(engine)

    def before_statement(
        self, connection: sa.Connection, link: Link, cursor: Any, statement: str
    ) -> None:
        """Really begin, where the driver would wait, with the transaction's first statement.

        Leaves alone a BEGIN of the application, and an engine that begins by itself or is in
        AUTOCOMMIT (`isolation_level` None); for these it only notes that a savepoint begins.
        """
        if link.driver.isolation_level is None:
            if not link.driver.in_transaction:
                link.is_begun_by_savepoint = _SAVEPOINT.match(statement) is not None
            return
        # No regular expression: fetching that part of Python behind a commit costs as much as the BEGIN.
        if not link.is_begun or statement.lstrip()[: len(_BEGIN)].upper() == _BEGIN:
            return
        if not link.driver.in_transaction:
            is_to_write = connection.get_execution_options().get(BEGIN_OPTION) == BEGIN_TO_WRITE
            if is_to_write and not connection.engine.dialect.is_async:
                TURNS.of(connection.engine).let_the_publisher_go_first()
            # Straight to the driver: through SQLAlchemy it would take ten times longer.
            cursor.execute("BEGIN IMMEDIATE" if is_to_write else "BEGIN")
        link.was_open = True

    def note_answer(self, link: Link, statement: str) -> None:
        link.was_open = link.is_begun and link.driver.in_transaction

    def is_transactional(self, link: Link) -> bool:
        if link.driver.in_transaction:
            link.was_open = True
            return not link.is_begun_by_savepoint
        return link.driver.isolation_level is not None  # it begins with its first statement

    def is_table_missing(self, error: sa.exc.DBAPIError) -> bool:
        text = str(error.orig)
        return "no such table" in text or "has no column named" in text

    def is_overtaken(self, error: sa.exc.DBAPIError) -> bool:
        return getattr(error.orig, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY_SNAPSHOT

    def is_refused(self, error: sa.exc.DBAPIError) -> bool:
        code = getattr(error.orig, "sqlite_errorcode", None)
        return code is not None and code & _PRIMARY_CODE in _REFUSING

    def is_in_transaction(self, link: Link) -> bool:
        return link.driver.in_transaction or not link.was_open

    can_commit = is_in_transaction

    def is_busy(self, _: Link) -> bool:
        return False  # statements beside an open result are no trouble here

    def can_encode(self, _: Link, __: str) -> bool:
        return True

    def undoes_transaction(self, link: Link, _: BaseException | None) -> bool:
        return not self.is_in_transaction(link)

    def savepoint_name(self, text: str) -> str:
        return folded_name(text)

    def lock_keys(
        self, connection: sa.Connection, order_lock: sa.Table, rows: Sequence[OutboxRow]
    ) -> None:
        """Nothing: the INSERT takes the only write lock and holds it until COMMIT."""

    def record_bytes_max(self, _: sa.Connection) -> int | None:
        return None

    def faults(self, _: sa.Connection, __: Sequence[sa.Table]) -> list[str]:
        return []

    def open_sibling(self, engine: sa.Engine) -> sa.Engine:
        if self._is_shared:
            shared_connection(engine.pool)
            return engine
        if engine.dialect.is_async:
            url = engine.url.set(drivername="sqlite+pysqlite")
            sibling = blocking_engine(
                engine, url, connect_args={"check_same_thread": False}, hide_parameters=True
            )
        else:
            # Errors are logged, so they must not contain a token or a record.
            sibling = sa.Engine(
                engine.pool.recreate(), engine.dialect, engine.url, hide_parameters=True
            )
        event.listen(sibling, "connect", refuse_what_cannot_be_written)
        event.listen(sibling, "connect", _relax)
        event.listen(sibling, "connect", lambda _, entry: leave_out(entry))
        TURNS.close_before_forks(sibling)
        return sibling

    def close_sibling(self, sibling: sa.Engine) -> None:
        if not self._is_shared:
            with TURNS.of(sibling).taken():
                sibling.dispose()

    @contextmanager
    def write(self, sibling: sa.Engine) -> Iterator[sa.Connection]:
        with self._connect(sibling) as connection, connection.begin():
            if find_link(connection.connection) is None:  # else `before_statement` begins
                connection.exec_driver_sql("BEGIN IMMEDIATE")
            yield connection

    @contextmanager
    def read(self, sibling: sa.Engine) -> Iterator[sa.Connection]:
        with self._connect(sibling) as connection:
            yield connection

    @contextmanager
    def _connect(self, sibling: sa.Engine) -> Iterator[sa.Connection]:
        with TURNS.of(sibling).taken():
            if not self._is_shared:
                with sibling.connect() as connection:
                    yield connection.execution_options(**{BEGIN_OPTION: BEGIN_TO_WRITE})
                return
            # The gate is left after the connection is back, because returning it rolls back.
            with shared_connection(sibling.pool).enter(), sibling.connect() as connection:
                refuse_autocommit_of_python(driver_of(connection))
                yield connection.execution_options(**{BEGIN_OPTION: BEGIN_TO_WRITE})

    def claim(
        self, connection: sa.Connection, outbox: sa.Table, terms: ClaimTerms
    ) -> list[OutboxRow]:
        table = table_sql(connection, outbox)
        wanted = wanted_rows(NOW_MS, terms.keys, "?")
        sized = (
            f"(SELECT id, due_at_ms, length(record) AS record_bytes FROM {table} "
            f"WHERE {wanted.text} LIMIT ?)"
        )
        # As bytes: the driver refuses a whole result if one text in it is damaged; so the row can be read,
        # recognized by its checksum, and parked alone.
        taken = connection.exec_driver_sql(
            f"UPDATE {table} SET token = ?, due_at_ms = {NOW_MS} + ? WHERE id IN ("
            f"{wanted.fitting(sized, terms.bytes_max)}) "
            "RETURNING id, CAST(message_id AS BLOB), typeof(message_id) <> 'blob', "
            "CAST(subject AS BLOB), CAST(ordering_key AS BLOB), CAST(record AS BLOB), "
            "CAST(attempts AS INTEGER)",
            (terms.token, terms.lease_ms, *wanted.parameters, terms.limit),
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

    def reclaim(
        self,
        connection: sa.Connection,
        outbox: sa.Table,
        message_ids: Sequence[bytes],
        *,
        token: bytes,
        lease_ms: int,
    ) -> set[bytes]:
        now_ms = sa.literal_column(NOW_MS, sa.BigInteger())
        owned = connection.execute(
            sa.update(outbox)
            .where(
                outbox.c.message_id.in_(message_ids),
                outbox.c.token == token,  # and so live; see `OutboxStore._delete`
            )
            .values(due_at_ms=now_ms + lease_ms)
            .returning(outbox.c.message_id)
        )
        return set(owned.scalars())

    def after_fork(self, engine: sa.Engine) -> None:
        if not self._is_shared:
            _LEFT_TO_THE_PARENT.append(engine.pool)
            engine.dispose(close=False)


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


def end_left_transactions(engine: sa.Engine) -> None:
    """Make sure that no connection of this engine keeps a transaction, and the lock, that its user has left.

    Safe to repeat.
    """
    _listen(engine, "close", _end_before_close)
    if engine.dialect.is_async or engine.pool._reset_on_return is not reset_rollback:
        _listen(engine, "reset", _end_for_certain)
    else:  # the pool's own ROLLBACK is passed over behind a failed COMMIT only
        _listen(engine, "handle_error", _look_from_now_on)


def _listen(engine: sa.Engine, name: str, listener: Any) -> None:
    if not event.contains(engine, name, listener):
        event.listen(engine, name, listener)


def _look_from_now_on(context: sa.engine.ExceptionContext) -> None:
    """After an error that is no statement's: a COMMIT may have failed, so check from now on.

    Not from the start: having a listener costs each transaction as much as its BEGIN.
    """
    if context.statement is None and context.engine is not None:
        _listen(root_engine(context.engine), "reset", _end_for_certain)


def _end_for_certain(driver: Any, _: Any, state: Any) -> None:
    """When a connection goes back to its pool, end the transaction that a failed COMMIT left open.

    SQLAlchemy takes a failed commit for the end and sends no ROLLBACK; on SQLite the next user of
    the connection would commit what the failed transaction had written.
    """
    if not state.terminate_only and getattr(driver, "driver_connection", driver).in_transaction:
        driver.rollback()


def _end_before_close(driver: Any, _: Any) -> None:
    """Before a connection is closed, perhaps in the middle of a statement, end its transaction.

    SQLite keeps the transaction of a closed connection, and the only write lock, while one of its
    cursors still has rows to give. The cursor of a task that was cancelled in an INSERT … RETURNING
    is such a cursor, and stays in a reference cycle until Python collects garbage.
    """
    with suppress(Exception):  # closed already, or another thread's: the close goes on
        if (awaited := getattr(driver, "driver_connection", driver)) is driver:
            driver.rollback()
        else:
            _ask_for_rollback(awaited)


def _ask_for_rollback(driver: Any) -> None:
    """Queue it on the thread of aiosqlite's connection, before the close, without awaiting it.

    An await here could be cancelled again, and the connection would never be closed. The state of
    the transaction is not checked either: its BEGIN may still wait for that thread.
    """
    asyncio.get_running_loop()  # raises without one, where there is nobody to answer to
    rollback = driver.rollback()
    answer = rollback.send(None)
    answer.add_done_callback(lambda _: answer.cancelled() or answer.exception())
    rollback.close()


def _relax(driver: Any, _: Any) -> None:
    """For connections of the sibling: a power cut may lose what they write, but never tear it.

    That holds only with a write-ahead log; otherwise `synchronous` stays as it is.
    """
    refuse_autocommit_of_python(driver)
    cursor = driver.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {BUSY_MS_MAX}")
    if cursor.execute("PRAGMA journal_mode").fetchone()[0] == "wal":
        cursor.execute("PRAGMA synchronous = NORMAL")
    cursor.close()
