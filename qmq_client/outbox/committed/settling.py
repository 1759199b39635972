"""Settles rows after an attempt: deletes or keeps them, returns them, or parks them.

Every statement names the rows and the token, so an owner whose claim has expired changes none.

A trigger, rule, row security or foreign key may keep a row from being deleted, with an error or
silently. The broker has the message, so an unchanged row would be sent again at the end of each
lease, and as a new message once the broker has forgotten its id. So the row is marked as sent: it is
never claimed and holds up no other row of its ordering key; `qmq doctor` finds it by its error.
Maintenance retries its deletion later, so once the cause is gone, the row is deleted. See
`docs/decisions/0022-rows-that-stay.md`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import sqlalchemy as sa

from qmq_client.outbox.committed.deletes import chunks, delete_by, delete_pieces, has_pieces
from qmq_client.outbox.row import FailedRow, OutboxRow, ParkedRow
from qmq_client.outbox.table import LIVE, PARKED, SENT


class Settling:
    """The statements for one outbox; each runs on the given connection."""

    def __init__(
        self, outbox: sa.Table, now_ms: sa.ColumnElement[int], is_refused: Refuses
    ) -> None:
        """`is_refused`: see `OutboxDialect`."""
        self._outbox = outbox
        self._now_ms = now_ms
        #: Handles rows that the database keeps.
        self.undeleted = Undeleted(outbox, now_ms, is_refused)

    def remove(
        self,
        connection: sa.Connection,
        message_ids: Sequence[bytes],
        token: bytes,
        keep_ms: int | None,
        claimed: Sequence[OutboxRow] = (),
        *,
        is_wary: bool = False,
    ) -> int:
        """Delete rows that the broker has, or keep them for an audit; returns how many.

        `claimed`: the rows from the claim with this token, if any; they are found faster.
        `is_wary`: the deletion was refused before; find the refused rows and mark them.
        """
        if keep_ms is not None:
            return self._keep(connection, message_ids, token, keep_ms)
        columns, token_is = self._outbox.c, {"token": token}
        if is_wary:
            return self.undeleted.delete_what_can_be(
                connection, columns.message_id, message_ids, token_is
            )
        removed = self._delete(connection, message_ids, token, claimed)
        if removed < len(message_ids):
            # Mostly they belong to another owner by now. Rows that this publisher still owns were kept by the database.
            removed += self.undeleted.mark(connection, columns.message_id, message_ids, token_is)
        return removed

    def purge(
        self, connection: sa.Connection, row_ids: Sequence[int], *, is_wary: bool = False
    ) -> int:
        """Delete kept rows whose time is over, by their numbers; returns how many.

        A row that stays counts too: it is tried again later, so that it blocks no other.
        """
        number, state_is = self._outbox.c.id, {"state": SENT}
        if is_wary:
            return self.undeleted.delete_what_can_be(connection, number, row_ids, state_is)
        deleted = sum(delete_by(connection, number, ids) for ids in chunks(row_ids))
        if deleted < len(row_ids):
            deleted += self.undeleted.mark(connection, number, row_ids, state_is)
        return deleted

    def give_back(
        self, connection: sa.Connection, failed: Sequence[FailedRow], token: bytes
    ) -> int:
        """Release rows until later; returns how many."""
        if not failed:
            return 0
        query = self._update_one().values(
            attempts=self._outbox.c.attempts + sa.bindparam("attempt", type_=sa.Integer()),
            due_at_ms=self._now_ms + sa.bindparam("delay_ms"),
            last_error=sa.bindparam("error"),
            token=None,
        )
        rows = [
            {
                "id_": row.message_id,
                "token_": token,
                "attempt": int(row.is_attempt),
                "delay_ms": row.delay_ms,
                "error": row.error,
            }
            for row in failed
        ]
        return connection.execute(query, rows).rowcount

    def park(self, connection: sa.Connection, parked: Sequence[ParkedRow], token: bytes) -> int:
        """Park rows for a person; returns how many."""
        if not parked:
            return 0
        query = self._update_one().values(
            attempts=self._outbox.c.attempts + 1,
            state=PARKED,
            last_error=sa.bindparam("error"),
            token=None,
        )
        rows = [{"id_": row.message_id, "token_": token, "error": row.error} for row in parked]
        return connection.execute(query, rows).rowcount

    def _delete(
        self,
        connection: sa.Connection,
        message_ids: Sequence[bytes],
        token: bytes,
        claimed: Sequence[OutboxRow],
    ) -> int:
        # The state is left out: only live rows have a token, and with `state = 0` SQLite would
        # search a few hundred ids by scanning every live row of the state index.
        if claimed and has_pieces(connection):
            sent = set(message_ids)
            numbers = [
                row.number for row in claimed if row.message_id in sent and row.number is not None
            ]
            if len(numbers) == len(sent):
                return delete_pieces(connection, self._outbox, numbers, token)
        column = self._outbox.c.message_id
        return sum(
            delete_by(connection, column, ids, where={"token": token})
            for ids in chunks(message_ids)
        )

    def _keep(
        self,
        connection: sa.Connection,
        message_ids: Sequence[bytes],
        token: bytes,
        keep_ms: int,
    ) -> int:
        columns = self._outbox.c
        keep = sa.update(self._outbox).values(
            state=SENT, due_at_ms=self._now_ms + keep_ms, token=None, last_error=None
        )
        return sum(
            connection.execute(
                keep.where(columns.message_id.in_(ids), columns.token == token)
            ).rowcount
            for ids in chunks(message_ids)
        )

    def _update_one(self) -> sa.Update:
        columns = self._outbox.c
        return sa.update(self._outbox).where(
            columns.message_id == sa.bindparam("id_"),
            columns.token == sa.bindparam("token_"),
            columns.state == LIVE,
        )


_log = logging.getLogger("qmq.outbox")

#: Interval of further deletions: short enough after the cause is fixed, with only one or two
#: statements for each row until then.
AGAIN_MS: Final = 3_600_000
#: The beginning of such a row's error.
UNDELETED: Final = "accepted by the broker, and not deleted by the database"
_SILENTLY: Final = "no error; a trigger, a rule or row security keeps the row"
_REASON_CHARACTERS_MAX: Final = 300

#: Whether an error of the database refuses these rows permanently.
Refuses = Callable[[sa.exc.DBAPIError], bool]


class Undeleted:
    """The statements for one outbox; each runs on the given connection."""

    def __init__(
        self, outbox: sa.Table, now_ms: sa.ColumnElement[int], is_refused: Refuses
    ) -> None:
        self._outbox = outbox
        self._now_ms = now_ms
        self._is_refused = is_refused
        #: Rows that were marked so far. A row that stays counts once, also after retries by any process.
        self.count = 0

    def delete_what_can_be(
        self,
        connection: sa.Connection,
        column: sa.Column[Any],
        values: Sequence[Any],
        where: Mapping[str, object],
    ) -> int:
        """Delete these rows after the database refused some of them, and mark the rest; returns how many were changed.

        Halves a refused group until only the refused rows are left. `where`: further columns and their
        values.
        """
        if connection.dialect.name == "postgresql":
            # Constraints that would fail only at the COMMIT, for all rows, are checked here.
            connection.exec_driver_sql("SET CONSTRAINTS ALL IMMEDIATE")
        changed = 0
        groups = deque(chunks(values))
        while groups:
            group = groups.popleft()
            try:
                with connection.begin_nested():
                    deleted = delete_by(connection, column, group, where=where)
            except sa.exc.DBAPIError as error:
                if not self._is_refused(error):
                    raise
                middle = len(group) // 2
                if middle:
                    groups.extendleft((group[middle:], group[:middle]))
                else:
                    changed += self.mark(connection, column, group, where, str(error.orig))
                continue
            changed += deleted
            if deleted < len(group):
                changed += self.mark(connection, column, group, where)
        return changed

    def mark(
        self,
        connection: sa.Connection,
        column: sa.Column[Any],
        values: Sequence[Any],
        where: Mapping[str, object],
        reason: str = _SILENTLY,
    ) -> int:
        """Mark the existing ones of these rows; returns how many."""
        columns = self._outbox.c
        text = f"{UNDELETED}: {_plain(reason)}"
        update = sa.update(self._outbox).values(
            state=SENT, due_at_ms=self._now_ms + AGAIN_MS, token=None, last_error=text
        )
        count = sa.select(sa.func.count()).select_from(self._outbox)
        conditions = [columns[name] == value for name, value in where.items()]
        known = marked = 0
        for some in chunks(values):
            here = (column.in_(some), *conditions)
            is_known = columns.last_error.startswith(UNDELETED)
            known += connection.scalar(count.where(*here, is_known)) or 0
            marked += connection.execute(update.where(*here)).rowcount
        self._log_new(max(0, marked - known), text)  # a known one may be gone by now
        return marked

    def _log_new(self, new: int, text: str) -> None:
        """Log when the number of rows has doubled, so that many rows make few lines."""
        before, self.count = self.count, self.count + new
        if self.count.bit_length() > before.bit_length():
            _log.error(
                "%d rows of %s are %s. `qmq doctor` looks for the cause",
                self.count,
                self._outbox.fullname,
                text,
            )


def _plain(reason: str) -> str:
    """The error as one line of text that every database accepts."""
    line = " ".join(reason.replace("\0", " ").split())
    return line.encode("ascii", "backslashreplace").decode("ascii")[:_REASON_CHARACTERS_MAX]
