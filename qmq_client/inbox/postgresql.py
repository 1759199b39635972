"""The inbox on PostgreSQL: one statement before the handler and one after it, besides BEGIN and COMMIT.

If some ids were not new, one more statement checks that they are really there, and not skipped by a
trigger. New ids are looked for in the statement after the handler: a trigger may have altered or
removed them. If one waits for the COMMIT to do so, it is run before that look.

After an error that a handler swallowed, COMMIT returns normally and stores nothing; and after a
COMMIT by the handler, the rest would be another transaction. Asking the server for the
transaction's number reveals both: it refuses, or gives another number. A savepoint would do as
well, but costs one more statement, and a number of its own for every transaction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
from qmq_client.outbox.database.dialect import dialect_of
from qmq_client.outbox.database.link import link_of
from qmq_client.outbox.database.postgresql import NOW_MS
from qmq_client.outbox.database.table_names import table_sql, table_text

#: Triggers on one table that may wait for the COMMIT; those of foreign keys change nothing there.
_DEFERRABLE = (
    "FROM pg_trigger JOIN pg_class ON pg_class.oid = tgrelid WHERE tgrelid = to_regclass(%s) "
    "AND tgdeferrable AND NOT tgisinternal AND tgenabled <> 'D'"
)
_TRIGGER_NAMES = "CAST(CAST(relnamespace AS regnamespace) AS text) || '.' || quote_ident(tgname)"


def make_dialect(engine: sa.Engine, inbox: sa.Table) -> PostgresInboxDialect:
    """The dialect for the inbox table of this engine; refuses drivers that the outbox refuses."""
    return PostgresInboxDialect(engine, inbox)


@dataclass(frozen=True, slots=True)
class _Mark:
    """Identifies the transaction later, and names the ids it has noted."""

    #: None if nothing was new.
    number: int | None
    group: str


class PostgresInboxDialect:
    """See `InboxDialect`."""

    purge_options: Mapping[str, Any] = {"isolation_level": "READ COMMITTED"}

    def __init__(self, engine: sa.Engine, inbox: sa.Table) -> None:
        self._outbox_dialect = dialect_of(engine)
        table = table_sql(engine, inbox)
        self._texts = NoteTexts(
            table,
            placeholder="%s",
            now_ms=NOW_MS,
            ending=" ON CONFLICT DO NOTHING RETURNING message_id, txid_current()",
        )
        self._name = table_text(engine, inbox)
        self._confirm_sql = (
            f"SELECT txid_current(), ARRAY(SELECT message_id FROM {table} "
            "WHERE consumer_group = %s AND message_id = ANY(%s)), "
            f"EXISTS(SELECT {_DEFERRABLE})"
        )
        # A row that another purge deletes meanwhile no longer counts, and its place is not reused while
        # this statement may see it.
        self._purge_sql = (
            f"DELETE FROM {table} WHERE ctid = ANY (ARRAY("
            f"SELECT ctid FROM {table} WHERE received_at_ms < {NOW_MS} - CAST(%s AS bigint) "
            "{of_group}ORDER BY received_at_ms LIMIT %s))"
        )

    def begin(self, connection: sa.Connection) -> None:
        if not self._outbox_dialect.is_transactional(link_of(connection)):
            raise autocommit_error()

    def insert(self, connection: sa.Connection, group: str, message_ids: Sequence[bytes]) -> Noted:
        new: set[bytes] = set()
        number: int | None = None
        for ids in in_statements(message_ids):
            text, values = self._texts.insert(len(ids)), pairs(group, ids)
            rows = connection.exec_driver_sql(text, values).all()
            new.update([bytes(row[0]) for row in rows])
            if old := [one for one in ids if one not in new]:
                self._check_known(connection, group, old)
            number = rows[0][1] if rows else number
        return Noted(new=new, mark=_Mark(number, group))

    def _check_known(self, connection: sa.Connection, group: str, ids: Sequence[bytes]) -> None:
        """Raise `InboxRowLostError` for ids that are neither new nor were there before: a trigger kept them out."""
        found = connection.exec_driver_sql(self._texts.find(len(ids)), (group, *ids))
        known = {bytes(row[0]) for row in found}
        if lost := [one for one in ids if one not in known]:
            raise self._texts.refuse(lost)

    def confirm(self, connection: sa.Connection, noted: Noted) -> None:
        mark = noted.mark
        if not isinstance(mark, _Mark) or mark.number is None:
            return  # nothing was new, so there is nothing that must be stored together
        values = (mark.group, list(noted.new), self._name)
        try:
            number, stored, is_to_change = connection.exec_driver_sql(
                self._confirm_sql, values
            ).one()
        except sa.exc.DBAPIError as error:
            if error.connection_invalidated:
                raise
            raise InboxTransactionError from error
        if number != mark.number:
            raise InboxTransactionError
        if is_to_change:
            self._run_deferred_triggers(connection)
            stored = connection.exec_driver_sql(self._confirm_sql, values).one()[1]
        if lost := noted.new.difference(map(bytes, stored)):
            raise self._texts.refuse(sorted(lost))

    def _run_deferred_triggers(self, connection: sa.Connection) -> None:
        """Now instead of in the COMMIT, behind which nothing can be refused.

        Nobody can add one until then: that takes a lock which our INSERT keeps from everybody.
        """
        query = f"SELECT {_TRIGGER_NAMES} {_DEFERRABLE}"
        names = connection.exec_driver_sql(query, (self._name,)).scalars().all()
        marked = ", ".join(names).replace("%", "%%")
        connection.exec_driver_sql(f"SET CONSTRAINTS {marked} IMMEDIATE")

    def purge(
        self, connection: sa.Connection, group: str | None, *, older_than_ms: int, limit: int
    ) -> int:
        of_group, groups = of_one_group(group, "%s")
        sql = self._purge_sql.format(of_group=of_group)
        return connection.exec_driver_sql(sql, (older_than_ms, *groups, limit)).rowcount
