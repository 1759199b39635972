"""The inbox on SQLite.

The two statements of every message go to the driver itself: through SQLAlchemy they took a quarter of
the processor time of a small effect (measured: 4.0 against 5.2 thousand effects per second of it). An
asynchronous driver can only be asked through SQLAlchemy. A transaction that read before it writes fails at once when another wrote in between ("database is
locked"), so this one begins IMMEDIATE; writers stand in line at the begin, and two deliveries of one
message can never both find it new.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import sqlalchemy as sa

from qmq_client.errors import AutocommitError, InboxTransactionError
from qmq_client.inbox.dialect import Noted
from qmq_client.outbox.database.driver import driver_of
from qmq_client.outbox.database.sqlite import NOW_MS

#: Three parameters each would still be far below the 32,766 that SQLite takes.
_IDS_PER_STATEMENT_MAX: Final = 500
#: A savepoint around the handler's work: no COMMIT or ROLLBACK, by whatever way, leaves it in place.
_MARK: Final = "qmq_inbox"
_Execute = Callable[..., Any]


def make_dialect(engine: sa.Engine, inbox: sa.Table) -> SqliteInboxDialect:
    """The dialect for the inbox table of this engine."""
    execute = _through_sqlalchemy if engine.dialect.is_async else _to_the_driver
    return SqliteInboxDialect(engine.dialect.identifier_preparer.format_table(inbox), execute)


class SqliteInboxDialect:
    """See `InboxDialect`."""

    purge_options: Mapping[str, Any] = {}

    def __init__(self, table: str, execute: _Execute) -> None:
        """Requires: `table` is quoted."""
        self._table = table
        self._execute = execute
        self._insert_sql = lru_cache(maxsize=_IDS_PER_STATEMENT_MAX)(self._make_insert_sql)
        self._purge_sql = (
            f"DELETE FROM {table} WHERE (consumer_group, message_id) IN ("
            f"SELECT consumer_group, message_id FROM {table} "
            f"WHERE received_at_ms < {NOW_MS} - ? AND consumer_group = ? "
            "ORDER BY received_at_ms LIMIT ?)"
        )

    def begin(self, connection: sa.Connection) -> None:
        driver = driver_of(connection)
        if driver.in_transaction:
            return
        if driver.isolation_level is None:
            raise AutocommitError(
                "the inbox's connection commits every statement by itself; "
                "remove isolation_level='AUTOCOMMIT' from its engine"
            )
        self._execute(connection, "BEGIN IMMEDIATE")

    def insert(self, connection: sa.Connection, group: str, message_ids: Sequence[bytes]) -> Noted:
        new: set[bytes] = set()
        for first in range(0, len(message_ids), _IDS_PER_STATEMENT_MAX):
            ids = message_ids[first : first + _IDS_PER_STATEMENT_MAX]
            values: list[object] = []
            for message_id in ids:
                values += (group, message_id)
            rows = self._execute(connection, self._insert_sql(len(ids)), tuple(values)).fetchall()
            new.update([row[0] for row in rows])
        self._execute(connection, f"SAVEPOINT {_MARK}")
        return Noted(new=new)

    def confirm(self, connection: sa.Connection, _: Noted) -> None:
        try:
            self._execute(connection, f"RELEASE {_MARK}")
        except (sqlite3.OperationalError, sa.exc.OperationalError) as error:
            raise InboxTransactionError from error

    def purge(
        self, connection: sa.Connection, group: str, *, older_than_ms: int, limit: int
    ) -> int:
        deleted = connection.exec_driver_sql(self._purge_sql, (older_than_ms, group, limit))
        return deleted.rowcount

    def _make_insert_sql(self, count: int) -> str:
        rows = ", ".join([f"(?, ?, {NOW_MS})"] * count)
        return (
            f"INSERT INTO {self._table} (consumer_group, message_id, received_at_ms) "
            f"VALUES {rows} ON CONFLICT DO NOTHING RETURNING message_id"
        )


def _to_the_driver(connection: sa.Connection, sql: str, values: Sequence[object] = ()) -> Any:
    return driver_of(connection).execute(sql, values)


def _through_sqlalchemy(connection: sa.Connection, sql: str, values: Sequence[object] = ()) -> Any:
    return connection.exec_driver_sql(sql, tuple(values))
