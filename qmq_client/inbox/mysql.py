"""The inbox on MySQL and MariaDB: three statements before the handler and one after it, besides COMMIT.

A plain INSERT writes all ids. Only if it meets a known row, a query reads the known ids. The error
alone proves nothing: a trigger may have replaced a new id by another one, or another unique key of
the table may have refused it. `INSERT IGNORE` would hide other faults, and `ON DUPLICATE KEY
UPDATE` does not say which rows existed.

An INSERT without an error proves nothing either: a trigger may have stored another id, or another
group, and then the next copy of the message would not be recognized. MariaDB returns the rows that
it stored; on MySQL one more statement reads them back.

A temporary table of the same name hides the inbox from its connection, even under the qualified
name, until the connection is closed. Other connections do not see the ids in it. Only the
definition of the table reveals it, so the definition is read first.

A deadlock or a DDL statement ends the transaction; a handler that swallows the error does not
notice. The savepoint around the handler's work is then gone, and its RELEASE fails. Two consumers
that insert the same ids can deadlock: the server rolls one of them back, none of its messages is
acked, and they are delivered again.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, Final

import sqlalchemy as sa

from qmq_client.errors import OutboxMissingError
from qmq_client.inbox.dialect import InboxDialect, Noted, in_statements
from qmq_client.outbox.committed.deletes import delete_by
from qmq_client.outbox.database.dialect import error_code
from qmq_client.outbox.database.mysql import NOW_MS, is_temporary
from qmq_client.outbox.database.table_names import table_text

_KNOWN_ID: Final = 1062  # ER_DUP_ENTRY
_RETURNING: Final = " RETURNING consumer_group, message_id"
#: The INSERT has locked the row that it met, so a read that locks does not wait. A plain one may use
#: a snapshot that does not have the row yet.
_AS_LOCKED: Final = " LOCK IN SHARE MODE"


def make_dialect(engine: sa.Engine, inbox: sa.Table) -> MySqlInboxDialect:
    """The dialect for the inbox table of this engine."""
    return MySqlInboxDialect(engine, inbox)


class MySqlInboxDialect(InboxDialect):
    """See `InboxDialect`."""

    now_ms = NOW_MS

    def insert(self, connection: sa.Connection, group: str, message_ids: Sequence[bytes]) -> Noted:
        self._refuse_temporary(connection)
        new: set[bytes] = set()
        for ids in in_statements(message_ids):
            new |= self._insert_once(connection, group, ids)
        self.set_savepoint(connection)
        return Noted(new=new)

    def _refuse_temporary(self, connection: sa.Connection) -> None:
        if is_temporary(connection, self.name):
            connection.invalidate()  # drops the temporary table: the next delivery finds the inbox
            table = table_text(connection, self.table)
            raise OutboxMissingError(
                f"a temporary table hid {table} on this connection, which was closed. "
                f"DROP TEMPORARY TABLE {table} where it was created, or give it another name"
            )

    def _insert_once(
        self, connection: sa.Connection, group: str, ids: Sequence[bytes]
    ) -> set[bytes]:
        if self._try(connection, group, ids):
            return set(ids)
        if len(ids) == 1:
            self.check_known(connection, group, ids, _AS_LOCKED)
            return set()
        # This read may miss known ids if its snapshot is older; the INSERTs below find them.
        known = self.known(connection, group, ids)
        left = [one for one in ids if one not in known]
        if not left or self._try(connection, group, left):
            return set(left)
        new = set()
        for one in left:
            if self._try(connection, group, [one]):
                new.add(one)
            else:
                self.check_known(connection, group, [one], _AS_LOCKED)
        return new

    def _try(self, connection: sa.Connection, group: str, ids: Sequence[bytes]) -> bool:
        """Insert all of these ids, or none if one is known; returns whether they were inserted.

        Waits for another transaction that is inserting one of them. A refused INSERT is undone as a
        whole and does not end the transaction.
        """
        dialect: Any = connection.dialect
        try:
            ending = _RETURNING if dialect.is_mariadb else ""
            done = self.run_insert(connection, group, ids, ending)
        except sa.exc.IntegrityError as error:
            if error_code(error.orig) == _KNOWN_ID:
                return False
            raise
        # A trigger may replace an id, and on MariaDB skip it without an error.
        if not dialect.is_mariadb:
            self.check_known(connection, group, ids)
            return True
        stored = {message_id for of_group, message_id in done if of_group == group}
        if lost := [one for one in ids if one not in stored]:
            raise self.refuse(lost)
        return True

    def purge(
        self, connection: sa.Connection, group: str | None, *, older_than_ms: int, limit: int
    ) -> int:
        sql, parameters = self.old("consumer_group, message_id", group, older_than_ms, limit)
        # Deleted in the order in which consumers insert them, so that the two cannot deadlock.
        old = sorted(map(tuple, connection.exec_driver_sql(sql, parameters)))
        return sum(
            delete_by(
                connection,
                self.table.c.message_id,
                ids,
                where={"consumer_group": name},
                # Checked again: it may have been purged and inserted again meanwhile.
                below={"received_at_ms": f"{NOW_MS} - {older_than_ms:d}"},
            )
            for name, rows in groupby(old, itemgetter(0))
            for ids in in_statements([message_id for _, message_id in rows])
        )
