"""The inbox on PostgreSQL: one statement before the handler and one after it, besides BEGIN and COMMIT.

If some ids were not new, one more statement checks that they are really there, and not skipped by a
trigger. New ids are counted in the statement after the handler, because a trigger may have altered
or removed them. A deferred trigger is run before that count.

After an error that a handler swallowed, COMMIT returns normally and stores nothing; and after a
COMMIT by the handler, the rest would be another transaction. Asking the server for the
transaction's number reveals both: it refuses, or gives another number. A savepoint would work too,
but costs one more statement, and an extra transaction number.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from qmq_client.errors import InboxTransactionError
from qmq_client.inbox.dialect import InboxDialect, Noted, in_statements
from qmq_client.outbox.database.dialect import error_code
from qmq_client.outbox.database.postgresql import NOW_MS

#: Triggers on the inbox that may wait for the COMMIT; triggers of foreign keys do not change the inbox.
_DEFERRABLE = (
    "FROM pg_catalog.pg_trigger JOIN pg_catalog.pg_class ON pg_class.oid = tgrelid "
    "JOIN pg_catalog.pg_namespace ON pg_namespace.oid = relnamespace "
    "WHERE tgrelid = found.place AND tgdeferrable AND NOT tgisinternal AND tgenabled <> 'D'"
)
_RETURNING = " ON CONFLICT DO NOTHING RETURNING message_id, txid_current()"
_IN_FAILED_TRANSACTION = "25P02"


def make_dialect(engine: sa.Engine, inbox: sa.Table) -> PostgresInboxDialect:
    """The dialect for the inbox table of this engine."""
    return PostgresInboxDialect(engine, inbox)


class PostgresInboxDialect(InboxDialect):
    """See `InboxDialect`. The mark is the transaction's number; None without new ids."""

    now_ms = NOW_MS

    def insert(self, connection: sa.Connection, group: str, message_ids: Sequence[bytes]) -> Noted:
        new: set[bytes] = set()
        number: int | None = None
        for ids in in_statements(message_ids):
            rows = self.run_insert(connection, group, ids, _RETURNING)
            new.update([bytes(row[0]) for row in rows])
            if old := [one for one in ids if one not in new]:
                self.check_known(connection, group, old)
            number = rows[0][1] if rows else number
        return Noted(new=new, mark=number)

    def confirm(self, connection: sa.Connection, group: str, noted: Noted) -> None:
        if noted.mark is None:
            return  # no id is new, so nothing must be stored together
        for ids in in_statements(sorted(noted.new)):
            values = (group, *ids)
            found = f"SELECT count(*) AS n, max(tableoid) AS place FROM {self.name} {self.where(len(ids))}"
            sql = (
                f"SELECT txid_current(), n, EXISTS(SELECT 1 {_DEFERRABLE}) FROM ({found}) AS found"
            )
            try:
                number, count, is_to_change = connection.exec_driver_sql(sql, values).one()
            except sa.exc.DBAPIError as error:
                if error_code(error.orig) != _IN_FAILED_TRANSACTION:
                    raise
                raise InboxTransactionError from error
            if number != noted.mark:
                raise InboxTransactionError
            if is_to_change:
                _run_deferred_triggers(connection, found, values)
            if is_to_change or count < len(ids):
                self.check_known(connection, group, ids)

    def purge(
        self, connection: sa.Connection, group: str | None, *, older_than_ms: int, limit: int
    ) -> int:
        old, parameters = self.old("ctid", group, older_than_ms, limit)
        # A row that another purge deletes meanwhile no longer counts, and its place is not reused while
        # this statement may see it.
        sql = f"DELETE FROM {self.name} WHERE ctid = ANY (ARRAY({old}))"
        return connection.exec_driver_sql(sql, parameters).rowcount


def _run_deferred_triggers(
    connection: sa.Connection, found: str, values: tuple[object, ...]
) -> None:
    """Run deferred triggers now instead of in the COMMIT, after which nothing can be refused.

    None can be added until then, because that needs a lock that conflicts with the INSERT.
    """
    quote = connection.dialect.identifier_preparer.quote_identifier
    query = (
        f"SELECT nspname, tgname FROM ({found}) AS found, "
        f"LATERAL (SELECT nspname, tgname {_DEFERRABLE}) AS waiting"
    )
    names = connection.exec_driver_sql(query, values).all()
    marked = ", ".join(f"{quote(schema)}.{quote(name)}" for schema, name in names)
    connection.exec_driver_sql(f"SET CONSTRAINTS {marked} IMMEDIATE")
