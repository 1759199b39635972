"""The inbox on PostgreSQL: one statement before the handler and one after it, besides BEGIN and COMMIT.

After an error that a handler swallowed, COMMIT returns normally and stores nothing, and after a COMMIT
of its own the rest would be another transaction. Both show when the server is asked for the number of
the transaction: it refuses, or gives another one. A savepoint would tell as much, for one statement
more and a number of its own for every transaction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import sqlalchemy as sa

from qmq_client.errors import AutocommitError, InboxTransactionError
from qmq_client.inbox.dialect import Noted
from qmq_client.outbox.database.dialect import dialect_of
from qmq_client.outbox.database.postgresql import NOW_MS

#: Two parameters each; the protocol's limit is 65,535.
_IDS_PER_STATEMENT_MAX: Final = 500


def make_dialect(engine: sa.Engine, inbox: sa.Table) -> PostgresInboxDialect:
    """The dialect for the inbox table of this engine; refuses drivers that the outbox refuses."""
    return PostgresInboxDialect(engine, inbox)


class PostgresInboxDialect:
    """See `InboxDialect`."""

    purge_options: Mapping[str, Any] = {"isolation_level": "READ COMMITTED"}

    def __init__(self, engine: sa.Engine, inbox: sa.Table) -> None:
        self._outbox_dialect = dialect_of(engine)
        self._table = table = engine.dialect.identifier_preparer.format_table(inbox)
        self._insert_sql = lru_cache(maxsize=_IDS_PER_STATEMENT_MAX)(self._make_insert_sql)
        self._purge_sql = (
            f"DELETE FROM {table} WHERE ctid = ANY (ARRAY("
            f"SELECT ctid FROM {table} WHERE received_at_ms < {NOW_MS} - CAST(%s AS bigint) "
            "AND consumer_group = %s ORDER BY received_at_ms LIMIT %s FOR UPDATE SKIP LOCKED))"
        )

    def begin(self, connection: sa.Connection) -> None:
        if not self._outbox_dialect.is_transactional(connection):
            raise AutocommitError(
                "the inbox's connection commits every statement by itself; "
                "remove isolation_level='AUTOCOMMIT' from its engine"
            )

    def insert(self, connection: sa.Connection, group: str, message_ids: Sequence[bytes]) -> Noted:
        new: set[bytes] = set()
        number: int | None = None
        for first in range(0, len(message_ids), _IDS_PER_STATEMENT_MAX):
            ids = message_ids[first : first + _IDS_PER_STATEMENT_MAX]
            values: list[object] = []
            for message_id in ids:
                values += (group, message_id)
            rows = connection.exec_driver_sql(self._insert_sql(len(ids)), tuple(values)).all()
            new.update([bytes(row[0]) for row in rows])
            number = rows[0][1] if rows else number
        return Noted(new=new, mark=number)

    def confirm(self, connection: sa.Connection, noted: Noted) -> None:
        if noted.mark is None:
            return  # nothing was new, so there is nothing that must be stored together
        try:
            number = connection.exec_driver_sql("SELECT txid_current()").scalar_one()
        except sa.exc.DBAPIError as error:
            if error.connection_invalidated:
                raise
            raise InboxTransactionError from error
        if number != noted.mark:
            raise InboxTransactionError

    def purge(
        self, connection: sa.Connection, group: str, *, older_than_ms: int, limit: int
    ) -> int:
        deleted = connection.exec_driver_sql(self._purge_sql, (older_than_ms, group, limit))
        return deleted.rowcount

    def _make_insert_sql(self, count: int) -> str:
        rows = ", ".join([f"(%s, %s, {NOW_MS})"] * count)
        return (
            f"INSERT INTO {self._table} (consumer_group, message_id, received_at_ms) "
            f"VALUES {rows} ON CONFLICT DO NOTHING RETURNING message_id, txid_current()"
        )
