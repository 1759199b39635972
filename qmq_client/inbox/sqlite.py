"""The inbox on SQLite.

The two statements for every message go to the driver directly: through SQLAlchemy they took a
quarter of the processor time of a small effect (measured: 4.0 against 5.2 thousand effects per
second of it). An asynchronous driver can only be reached through SQLAlchemy. If a transaction reads
before it writes, it fails at once when another wrote in between ("database is locked"). So this one
begins IMMEDIATE: writers queue at the begin, and two deliveries of one message can never both find
it new.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import sqlalchemy as sa

from qmq_client.errors import InboxTransactionError
from qmq_client.inbox.dialect import Noted
from qmq_client.inbox.statements import (
    NoteTexts,
    autocommit_error,
    in_statements,
    of_one_group,
    pairs,
)
from qmq_client.outbox.database.driver import driver_of, root_engine
from qmq_client.outbox.database.sqlite import NOW_MS, end_left_transactions
from qmq_client.outbox.database.sqlite_turns import TURNS

#: A savepoint around the handler's work: no COMMIT or ROLLBACK of any kind leaves it in place.
_MARK: Final = "qmq_inbox"
_Execute = Callable[..., Any]


def make_dialect(engine: sa.Engine, inbox: sa.Table) -> SqliteInboxDialect:
    """The dialect for the inbox table of this engine."""
    end_left_transactions(root_engine(engine))
    execute = _through_sqlalchemy if engine.dialect.is_async else _to_the_driver
    return SqliteInboxDialect(engine.dialect.identifier_preparer.format_table(inbox), execute)


class SqliteInboxDialect:
    """See `InboxDialect`."""

    purge_options: Mapping[str, Any] = {}

    def __init__(self, table: str, execute: _Execute) -> None:
        """Requires: `table` is quoted."""
        self._execute = execute
        self._texts = NoteTexts(
            table,
            placeholder="?",
            now_ms=NOW_MS,
            ending=" ON CONFLICT DO NOTHING RETURNING message_id",
        )
        self._purge_sql = (
            f"DELETE FROM {table} WHERE (consumer_group, message_id) IN ("
            f"SELECT consumer_group, message_id FROM {table} "
            f"WHERE received_at_ms < {NOW_MS} - ? {{of_group}}ORDER BY received_at_ms LIMIT ?)"
        )

    def begin(self, connection: sa.Connection) -> None:
        driver = driver_of(connection)
        if driver.in_transaction:
            return
        if driver.isolation_level is None:
            raise autocommit_error()
        if not connection.dialect.is_async:  # whose loop would stand still
            TURNS.of(connection.engine).let_the_publisher_go_first()
        self._execute(connection, "BEGIN IMMEDIATE")

    def insert(self, connection: sa.Connection, group: str, message_ids: Sequence[bytes]) -> Noted:
        new: set[bytes] = set()
        for ids in in_statements(message_ids):
            text, values = self._texts.insert(len(ids)), pairs(group, ids)
            rows = self._execute(connection, text, values).fetchall()
            new.update([row[0] for row in rows])
            self._check_known(connection, group, ids)
        self._execute(connection, f"SAVEPOINT {_MARK}")
        return Noted(new=new)

    def _check_known(self, connection: sa.Connection, group: str, ids: Sequence[bytes]) -> None:
        """Raise `InboxRowLostError` for ids that are not there now: a trigger kept them out, or altered them.

        `RETURNING` does not show what a trigger did to a row after its INSERT.
        """
        found = self._execute(connection, self._texts.find(len(ids)), (group, *ids)).fetchall()
        known = {row[0] for row in found}
        if lost := [one for one in ids if one not in known]:
            raise self._texts.refuse(lost)

    def confirm(self, connection: sa.Connection, _: Noted) -> None:
        try:
            self._execute(connection, f"RELEASE {_MARK}")
        except sa.exc.OperationalError as error:
            raise InboxTransactionError from error

    def purge(
        self, connection: sa.Connection, group: str | None, *, older_than_ms: int, limit: int
    ) -> int:
        of_group, groups = of_one_group(group, "?")
        sql = self._purge_sql.format(of_group=of_group)
        return connection.exec_driver_sql(sql, (older_than_ms, *groups, limit)).rowcount


def _to_the_driver(connection: sa.Connection, sql: str, values: Sequence[object] = ()) -> Any:
    try:
        return driver_of(connection).execute(sql, values)
    except sqlite3.OperationalError as error:  # as SQLAlchemy, which was passed by, would tell it
        raise sa.exc.OperationalError(sql, None, error) from error


def _through_sqlalchemy(connection: sa.Connection, sql: str, values: Sequence[object] = ()) -> Any:
    return connection.exec_driver_sql(sql, tuple(values))
