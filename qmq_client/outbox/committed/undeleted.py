"""Rows that the database does not delete: marked as sent, and their deletion tried again later.

A trigger, rule, row security or foreign key may keep a row from being deleted, with an error or
silently. The broker has the message, so leaving the row as it is would send it again at the end of
each lease, forever, and beyond the broker's memory as a new message. A row marked as sent is
claimed by nobody and holds up no other row of its ordering key; `qmq doctor` finds it by its error.
The chores retry its deletion when its time has come, so once the cause is gone, the row goes too.

See `docs/decisions/0022-rows-that-stay.md`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import sqlalchemy as sa

from qmq_client.outbox.committed.deletes import chunks, delete_by
from qmq_client.outbox.table import SENT

_log = logging.getLogger("qmq.outbox")

#: Time until the deletion is tried again: short enough after the cause is fixed, and until then
#: only one or two statements for each row in this time.
AGAIN_MS: Final = 3_600_000
#: The beginning of such a row's error.
UNDELETED: Final = "accepted by the broker, and not deleted by the database"
_SILENTLY: Final = "no error; a trigger, a rule or row security keeps the row"
_REASON_CHARACTERS_MAX: Final = 300

#: Whether an error of the database refuses these rows, and would again.
Refuses = Callable[[sa.exc.DBAPIError], bool]


class Undeleted:
    """The statements for one outbox, each on the connection it is given."""

    def __init__(
        self, outbox: sa.Table, now_ms: sa.ColumnElement[int], is_refused: Refuses
    ) -> None:
        self._outbox = outbox
        self._now_ms = now_ms
        self._is_refused = is_refused
        #: Rows that were marked so far. A row that stays counts once, however often and by whichever
        #: process its deletion is retried.
        self.count = 0

    def delete_what_can_be(
        self,
        connection: sa.Connection,
        column: sa.Column[Any],
        values: Sequence[Any],
        where: Mapping[str, object],
    ) -> int:
        """Delete these rows after the database refused some of them, and mark the rest; how many were changed.

        Halves a refused group until the bad rows stand alone. `where`: further columns and their
        values.
        """
        if connection.dialect.name == "postgresql":
            # What would be refused only at the COMMIT, and so for all rows, is checked here.
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
        """Mark those of these rows that still exist; how many."""
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
        self._tell(max(0, marked - known), text)  # a known one may be gone by now
        return marked

    def _tell(self, new: int, text: str) -> None:
        """Log when their number has doubled, so that many rows make few lines."""
        before, self.count = self.count, self.count + new
        if self.count.bit_length() > before.bit_length():
            _log.error(
                "%d rows of %s are %s. `qmq doctor` looks for the cause",
                self.count,
                self._outbox.fullname,
                text,
            )


def _plain(reason: str) -> str:
    """A text that every database accepts, in one line."""
    line = " ".join(reason.replace("\0", " ").split())
    return line.encode("ascii", "backslashreplace").decode("ascii")[:_REASON_CHARACTERS_MAX]
