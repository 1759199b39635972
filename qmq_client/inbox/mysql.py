"""The inbox on MySQL and MariaDB: two statements before the handler and one after it, besides COMMIT.

A plain INSERT of all ids, and a query for the known ones only if it meets a known row. The error
alone is no proof: a trigger may have replaced a new id by another one, or another unique key of the
table refused it. `INSERT IGNORE` would hide other faults, and `ON DUPLICATE KEY UPDATE` does not
say which rows were there.

An INSERT without an error is no proof either: a trigger may have stored another id, or another
group, and then the next copy of the message would not be recognized. MariaDB returns what it has
stored; on MySQL one more statement reads it back.

A deadlock or a DDL statement ends the transaction without the notice of a handler that swallows the
error. The savepoint around the handler's work is gone then, and its RELEASE fails. Two consumers
that note the same ids can deadlock; the server undoes one of them, nothing of it is acked, and its
message comes again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
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
from qmq_client.outbox.committed.deletes import delete_by
from qmq_client.outbox.database.dialect import dialect_of
from qmq_client.outbox.database.driver import error_number
from qmq_client.outbox.database.link import link_of
from qmq_client.outbox.database.mysql import NOW_MS
from qmq_client.outbox.table import AS_NAMED

_MARK: Final = "qmq_inbox"
_KNOWN_ID: Final = 1062  # ER_DUP_ENTRY


def make_dialect(engine: sa.Engine, inbox: sa.Table) -> MySqlInboxDialect:
    """The dialect for the inbox table of this engine; refuses drivers that the outbox refuses."""
    return MySqlInboxDialect(engine, inbox)


class MySqlInboxDialect:
    """See `InboxDialect`."""

    #: At SERIALIZABLE its look would keep consumers from noting anything.
    purge_options: Mapping[str, Any] = {"isolation_level": "READ COMMITTED"}

    def __init__(self, engine: sa.Engine, inbox: sa.Table) -> None:
        self._outbox_dialect = dialect_of(engine)
        self._inbox = inbox
        self._table = engine.dialect.identifier_preparer.format_table(inbox)
        self._texts = NoteTexts(self._table, placeholder="%s", now_ms=NOW_MS)
        self._returning = NoteTexts(
            self._table,
            placeholder="%s",
            now_ms=NOW_MS,
            ending=" RETURNING consumer_group, message_id",
        )
        self._old_sql = (
            f"SELECT consumer_group, message_id FROM {self._table} "
            f"WHERE received_at_ms < {NOW_MS} - %s {{of_group}}ORDER BY received_at_ms LIMIT %s"
        )

    def begin(self, connection: sa.Connection) -> None:
        if not self._outbox_dialect.is_transactional(link_of(connection)):
            raise autocommit_error()

    def insert(self, connection: sa.Connection, group: str, message_ids: Sequence[bytes]) -> Noted:
        new: set[bytes] = set()
        for ids in in_statements(message_ids):
            new |= self._insert_once(connection, group, ids)
        connection.exec_driver_sql(f"SAVEPOINT {_MARK}")
        return Noted(new=new)

    def _insert_once(
        self, connection: sa.Connection, group: str, ids: Sequence[bytes]
    ) -> set[bytes]:
        if self._try(connection, group, ids):
            return set(ids)
        if len(ids) == 1:
            self._see(connection, group, ids[0])
            return set()
        # What this read cannot see yet (its snapshot is older) is found again below.
        known = set(connection.scalars(self._find(group, ids), execution_options=AS_NAMED))
        left = [one for one in ids if one not in known]
        if not left or self._try(connection, group, left):
            return set(left)
        new = set()
        for one in left:
            if self._try(connection, group, [one]):
                new.add(one)
            else:
                self._see(connection, group, one)
        return new

    def _see(self, connection: sa.Connection, group: str, message_id: bytes) -> None:
        """Raise `InboxRowLostError` unless this id, whose INSERT met a row, is there.

        The INSERT has locked the row that it met, so this locking read waits for nobody. A plain
        read may use a snapshot that does not have the row yet.
        """
        here = self._find(group, [message_id]).with_for_update(read=True)
        if connection.scalar(here, execution_options=AS_NAMED) is None:
            raise self._texts.refuse([message_id])

    def _find(self, group: str, ids: Sequence[bytes]) -> sa.Select[Any]:
        columns = self._inbox.c
        return sa.select(columns.message_id).where(
            columns.consumer_group == group, columns.message_id.in_(ids)
        )

    def _try(self, connection: sa.Connection, group: str, ids: Sequence[bytes]) -> bool:
        """Insert all of these, or none if one of them is known; whether they were inserted.

        Waits for another transaction that is inserting one of them. The server undoes the whole
        statement and leaves the transaction as it was.
        """
        dialect: Any = connection.dialect
        texts = self._returning if dialect.is_mariadb else self._texts
        try:
            done = connection.exec_driver_sql(texts.insert(len(ids)), pairs(group, ids))
        except sa.exc.IntegrityError as error:
            if error_number(error.orig) == _KNOWN_ID:
                return False
            raise
        if dialect.is_mariadb:
            stored = {message_id for of_group, message_id in done if of_group == group}
        else:
            stored = set(connection.scalars(self._find(group, ids), execution_options=AS_NAMED))
        # A trigger may replace an id, and on MariaDB skip it without an error.
        if lost := [one for one in ids if one not in stored]:
            raise self._texts.refuse(lost)
        return True

    def confirm(self, connection: sa.Connection, _: Noted) -> None:
        try:
            connection.exec_driver_sql(f"RELEASE SAVEPOINT {_MARK}")
        except sa.exc.DBAPIError as error:
            if error.connection_invalidated:
                raise
            raise InboxTransactionError from error

    def purge(
        self, connection: sa.Connection, group: str | None, *, older_than_ms: int, limit: int
    ) -> int:
        of_group, groups = of_one_group(group, "%s")
        sql = self._old_sql.format(of_group=of_group)
        # In the order in which consumers note them, so that no two can deadlock.
        old = sorted(map(tuple, connection.exec_driver_sql(sql, (older_than_ms, *groups, limit))))
        return sum(
            delete_by(
                connection,
                self._inbox.c.message_id,
                ids,
                where={"consumer_group": name},
                # Asked again: a consumer may have noted it anew after another purge deleted it.
                below={"received_at_ms": f"{NOW_MS} - {older_than_ms:d}"},
            )
            for name, rows in groupby(old, itemgetter(0))
            for ids in in_statements([message_id for _, message_id in rows])
        )
