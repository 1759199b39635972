"""The inbox on SQLite: one statement with BEGIN IMMEDIATE, and its pitfalls.

A transaction that reads before it writes fails at once ("database is locked") if another one wrote
in between. So this one starts with BEGIN IMMEDIATE: writers queue there, and two deliveries of one
message can never both find it new.

Statements go through SQLAlchemy. Without SQLAlchemy, a handled message took 450 µs of processor
time instead of 535 (file with a write-ahead log, a handler of one UPDATE), which is too small a
gain for a second code path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import sqlalchemy as sa

from qmq_client.inbox.dialect import InboxDialect, Noted, in_statements
from qmq_client.outbox.database.autocommit import in_transaction
from qmq_client.outbox.database.sqlite import NOW_MS
from qmq_client.outbox.table import refuse_autocommit_of_python

_RETURNING: Final = " ON CONFLICT DO NOTHING RETURNING message_id"


def make_dialect(engine: sa.Engine, inbox: sa.Table) -> SqliteInboxDialect:
    """The dialect for the inbox table of this engine."""
    return SqliteInboxDialect(engine, inbox)


class SqliteInboxDialect(InboxDialect):
    """See `InboxDialect`."""

    now_ms = NOW_MS
    purge_options: Mapping[str, Any] = {}

    def _first_schema(self) -> str:
        return "main"

    def begin(self, connection: sa.Connection) -> None:
        refuse_autocommit_of_python(connection.connection.driver_connection)
        if not in_transaction(connection):
            super().begin(connection)
            connection.exec_driver_sql("BEGIN IMMEDIATE")

    def insert(self, connection: sa.Connection, group: str, message_ids: Sequence[bytes]) -> Noted:
        new: set[bytes] = set()
        for ids in in_statements(message_ids):
            new.update(row[0] for row in self.run_insert(connection, group, ids, _RETURNING))
            # `RETURNING` does not show what a trigger did to a row after its INSERT.
            self.check_known(connection, group, ids)
        self.set_savepoint(connection)
        return Noted(new=new)

    def undo_failed_commit(self, connection: sa.Connection) -> None:
        """Roll back: SQLite keeps the transaction open, while SQLAlchemy treats it as ended.

        Otherwise the next user of the connection would commit it.
        """
        if not connection.invalidated and in_transaction(connection):
            connection.connection.rollback()

    def purge(
        self, connection: sa.Connection, group: str | None, *, older_than_ms: int, limit: int
    ) -> int:
        old, parameters = self.old("rowid", group, older_than_ms, limit)
        sql = f"DELETE FROM {self.name} WHERE rowid IN ({old})"
        return connection.exec_driver_sql(sql, parameters).rowcount
