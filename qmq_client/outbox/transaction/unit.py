"""The messages of one database transaction, from the send to its end.

::

    send ──▶ rows (not written) ──before_commit──▶ one INSERT ──COMMIT──▶ handed over
                  │                                    │
                  └── cut back by ROLLBACK TO ─────────┴── dropped by ROLLBACK

Rows are kept in the order of their sends. A savepoint is a mark in that order: rolling back to it
cuts the list there, releasing it forgets the mark. So a message belongs to exactly the savepoints
that were open when it was sent, whoever made them. Rows are written as late as the commit, so a
rolled back savepoint costs no statement; when many wait they are written early, and then the
publisher is told to look before it sends, because somebody may have undone them behind our back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec
import sqlalchemy as sa

from qmq_client.errors import OutboxError, OutboxRowLostError
from qmq_client.outbox.database.link import Link
from qmq_client.outbox.row import Ending, OutboxRow
from qmq_client.outbox.table import AS_NAMED, LIVE, PARKED
from qmq_client.outbox.transaction.handoff import HandOver
from qmq_client.outbox.transaction.insert import check_row, ids_text, insert_rows, lock_keys
from qmq_client.outbox.transaction.outlet import Outlet
from qmq_client.outbox.transaction.statements import (
    SavepointText,
    is_plain,
    savepoint_text,
)

#: How long after a row's time its owner may still wait for the answer to its last request,
#: and the request may still arrive: twice as long as one waits for an answer.
UNDER_WAY_MS: Final = 60_000
#: Rows in one INSERT, and how many may wait for it: one statement for nearly every transaction, and
#: far below every database's limit of parameters.
ROWS_PER_INSERT_MAX: Final = 100
#: Ids in one query for written rows; databases take some ten thousand parameters.
_IDS_PER_LOOK: Final = 1_000


@dataclass(slots=True)
class _Mark:
    """A savepoint: the state before it."""

    name: str
    row_count: int
    #: Rows from before that are written inside it become unwritten again when it is rolled back.
    written: int
    #: Rows cancelled inside it are back when it is rolled back.
    cancelled: frozenset[int] = frozenset()


#: A statement on a savepoint; rows, number of written ones, savepoints, cancelled rows before it.
_Before = tuple[str, list[tuple[Outlet, OutboxRow]], int, tuple[_Mark, ...], frozenset[int]]


# One for each transaction with messages, so it is made in a tenth of a plain object's time.
class Unit(msgspec.Struct, eq=False):
    """Messages of one transaction of one connection. Used by one thread at a time."""

    _link: Link
    _rows: list[tuple[Outlet, OutboxRow]] = []
    #: Number of written rows.
    _written: int = 0
    _unwritten_bytes: int = 0
    #: Whether some were sent with an ordering key.
    _has_keys: bool = False
    _written_at_s: float = 0.0
    _marks: tuple[_Mark, ...] = ()
    _was_written_early: bool = False
    #: Rows of this transaction that it deleted again, by their place: a dedupe key gives the same id to
    #: what is sent afterwards.
    _cancelled: frozenset[int] = frozenset()
    #: Written rows may be gone: check before the commit.
    _must_look: bool = False
    #: The state before the last statement on a savepoint, in case that one fails.
    _before_text: _Before | None = None
    _is_strict: bool = False
    #: Rows wait that should be written as soon as a statement can be executed.
    _is_overdue: bool = False
    _is_writing: bool = False
    #: Of those who wait for what becomes of a message.
    endings: tuple[Ending, ...] = ()
    #: A statement of this transaction failed, whatever the application made of it.
    is_suspect: bool = False
    #: The transaction was ended behind SQLAlchemy's back.
    is_lost: bool = False
    #: What is executed from now on ends the transaction, in two phases.
    is_ending: bool = False

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, connection: sa.Connection, outlet: Outlet, rows: list[OutboxRow]) -> None:
        """Note messages; writes if too much waits.

        Raises `InvalidMessageError` for a message that cannot be written, before noting any.
        """
        for row in rows:
            if row.ordering_key is not None or outlet.record_bytes_max is not None:
                check_row(outlet, self._link, row)
        if outlet.is_strict:
            self._is_strict = True
        for row in rows:
            if row.ordering_key is not None:
                self._has_keys = True
            self._unwritten_bytes += len(row.record)
            self._rows.append((outlet, row))  # last: what is noted is noted in full
        waiting = len(self._rows) - self._written
        is_full = waiting > ROWS_PER_INSERT_MAX or self._unwritten_bytes > outlet.buffer_bytes
        if is_full or self._is_strict:
            self._write_early(connection, outlet, is_full=is_full)

    def without_known(self, rows: list[OutboxRow]) -> list[OutboxRow]:
        """Those of these rows that are not noted yet."""
        known = {id(row) for _, row in self._rows}
        return [row for row in rows if id(row) not in known]

    def _write_early(self, connection: sa.Connection, outlet: Outlet, *, is_full: bool) -> None:
        if not is_full and self._has_unwritten_keys():
            return
        self._was_written_early = True
        if connection.dialect.is_async or outlet.dialect.is_busy(self._link):
            self._is_overdue = True  # nothing can be executed here: before the next statement
        else:
            self.write(connection)

    def _has_unwritten_keys(self) -> bool:
        """Keys are locked in one order for all of them, so rows with keys wait for the commit."""
        waiting = self._rows[self._written :] if self._has_keys else []
        return any(row.ordering_key is not None for _, row in waiting)

    def find(self, outlet: Outlet, message_id: bytes) -> tuple[OutboxRow, Ending] | None:
        """The note of a message that was sent in this transaction through `outlet`, to wait for it."""
        rows = (row for other, row in reversed(self._rows) if other is outlet)
        found = next((row for row in rows if row.message_id == message_id), None)
        if found is None:
            return None
        self.endings = self.endings or (Ending(),)
        return found, self.endings[0]

    def cancel(
        self,
        connection: sa.Connection,
        outlet: Outlet,
        message_id: bytes,
        *,
        is_at_broker: bool = False,
    ) -> bool:
        """Delete a row in this transaction: one of its own, or one that nobody may be sending now;
        whether there was one.

        With `is_at_broker` any row: whoever still sends it finds its row gone, like a late owner.
        Rows sent here are written first, so that rolling back to a savepoint restores them like
        everything else. Raises `OutboxError` in the middle of a stream.
        """
        if outlet.dialect.is_busy(self._link):
            raise OutboxError(
                "this connection still reads a result or writes a COPY row by row, which a statement "
                "in between would spoil. Cancel behind its end, or with `cancel_now`"
            )
        self._was_written_early = True
        self.write(connection)
        columns = outlet.outbox.c
        own = {i for i, (_, row) in enumerate(self._rows) if row.message_id == message_id}
        now_ms = sa.literal_column(outlet.dialect.now_ms, sa.BigInteger())
        is_left = columns.due_at_ms <= now_ms - UNDER_WAY_MS
        is_free = columns.token.is_(None) | is_left | is_at_broker
        deleted = connection.execute(
            sa.delete(outlet.outbox).where(
                columns.message_id == message_id,
                columns.state.in_((LIVE, PARKED)),
                (columns.token == outlet.token) if own else is_free,
            ),
            execution_options=AS_NAMED,
        )
        self._cancelled |= own
        return deleted.rowcount > 0

    def write(self, connection: sa.Connection) -> None:
        """Store the waiting rows. Raises the database's own error with a note that names the messages."""
        rows, written = self._rows, self._written
        if self._is_writing:
            return
        if written == len(rows):
            self._is_overdue = False
            return
        self._is_writing = True
        try:
            if self._has_keys:
                lock_keys(connection, rows[written:])
            if not written:
                self._written_at_s = rows[0][0].monotonic_s()
            while written < len(rows):
                outlet, row = rows[written]
                is_last = written + 1 == len(rows)  # as in most transactions
                some = [row] if is_last else self._next_insert(outlet)
                if not insert_rows(connection, self._link, outlet, some) or self._is_strict:
                    self._must_look = True
                self._written = written = written + len(some)
        finally:
            self._is_writing = False
        self._unwritten_bytes, self._is_overdue = 0, False

    def finish(self, connection: sa.Connection | None) -> None:
        """Everything that must precede the COMMIT; raises to stop it. Costs little when repeated.

        `connection`: None if its owner is gone, and the pool is set to commit what is left.
        """
        rows = self._rows
        if not rows:
            return
        if connection is None or self.is_lost or not rows[0][0].dialect.can_commit(self._link):
            raise lost_error(self.names())
        if self._written < len(rows):
            self.write(connection)
        if self._must_look:
            self._reread(connection)
            self._must_look = False

    def on_error(self, error: BaseException | None, *, is_disconnect: bool) -> None:
        """A statement of this transaction failed; whether the application minds is not known here."""
        if not self._rows:
            return
        self.is_suspect = self._must_look = True
        dialect = self._rows[0][0].dialect
        if is_disconnect or dialect.undoes_transaction(self._link, error):
            self.is_lost = True

    def on_statement(self, connection: sa.Connection, statement: str) -> None:
        """The application is about to execute this, which is not one of SQLAlchemy's savepoints.

        Drivers begin a new transaction with the next change, so this is the last moment to see that
        the old one has ended. Before a statement with an unknown effect on the transaction, rows
        are written: then the database undoes or keeps them with everything else.
        """
        self._before_text = None
        if not self._rows or self.is_lost or self.is_ending or self._is_writing:
            return
        if not self._rows[0][0].dialect.is_in_transaction(self._link):
            self.is_lost = True
        elif is_plain(statement):
            if self._is_overdue:
                self.write(connection)
        elif (found := savepoint_text(statement)) is not None:
            self._on_savepoint_text(found, statement)
        else:
            self._was_written_early = self._must_look = True
            self.write(connection)

    def on_failed(self, statement: str) -> None:
        """What `on_statement` announced did not happen: its savepoints are as they were."""
        if self._before_text is not None and self._before_text[0] == statement:
            _, self._rows, self._written, self._marks, self._cancelled = self._before_text
            self._before_text = None
            self._count_unwritten()

    def _on_savepoint_text(self, text: SavepointText, statement: str) -> None:
        before = (list(self._rows), self._written, self._marks, self._cancelled)
        self._before_text = (statement, *before)
        name = self._rows[0][0].dialect.savepoint_name(text.name)
        if text.verb != "SAVEPOINT":
            self.on_savepoint_end(name, is_undone=text.verb == "ROLLBACK")
        if text.verb != "RELEASE":  # one that was rolled back to may be rolled back to again
            self.on_savepoint(name)

    def on_savepoint(self, name: str) -> None:
        """A savepoint was made."""
        mark = _Mark(name, len(self._rows), self._written, self._cancelled)
        self._marks += (mark,)

    def on_savepoint_end(self, name: str, *, is_undone: bool) -> None:
        """The savepoint `name` was rolled back to, or released."""
        names = [mark.name for mark in self._marks]
        # An unknown savepoint was made before the first send: everything was sent inside it. Of two with
        # one name the newer is meant.
        index = len(names) - 1 - names[::-1].index(name) if name in names else 0
        if is_undone:
            mark = self._marks[index] if name in names else _Mark(name, 0, 0)
            del self._rows[mark.row_count :]
            self._written, self._cancelled = mark.written, mark.cancelled
            self._count_unwritten()
        if is_undone or name in names:
            self._marks = self._marks[:index]

    def _count_unwritten(self) -> None:
        self._unwritten_bytes = sum(len(row.record) for _, row in self._rows[self._written :])

    def note_commit(self) -> None:
        """COMMIT is about to be sent."""
        for ending in self.endings:
            ending.is_committing = True

    def hand_over(self, *, is_confirmed: bool) -> None:
        """Give the rows to their publishers; nothing here may raise."""
        is_doubtful = self._was_written_early or self.is_suspect or self.is_lost
        is_certain = is_confirmed and not is_doubtful
        written = self._rows[: self._written]
        if self._cancelled:
            written = [each for i, each in enumerate(written) if i not in self._cancelled]
        by_outlet: list[tuple[Outlet, tuple[OutboxRow, ...]]]
        if len(written) == 1:  # as in most transactions
            ((outlet, row),) = written
            by_outlet = [(outlet, (row,))]
        else:
            by_outlet = _by_outlet(written)
        for outlet, rows in by_outlet:
            outlet.hand_over(
                HandOver(
                    rows=rows,
                    token=outlet.token,
                    written_at_s=self._written_at_s,
                    is_certain=is_certain,
                )
            )

    def _next_insert(self, outlet: Outlet) -> list[OutboxRow]:
        """The rows of the next statement: rows of this outlet, within its bounds."""
        rows: list[OutboxRow] = []
        record_bytes = 0
        for other, row in self._rows[self._written : self._written + ROWS_PER_INSERT_MAX]:
            record_bytes += len(row.record)
            is_full = rows and record_bytes > (outlet.record_bytes_max or record_bytes)
            if other is not outlet or is_full:
                break
            rows.append(row)
        return rows

    def _reread(self, connection: sa.Connection) -> None:
        for outbox in {outlet.outbox for outlet, _ in self._rows[: self._written]}:
            expected = {
                row.message_id
                for i, (outlet, row) in enumerate(self._rows[: self._written])
                if outlet.outbox is outbox and i not in self._cancelled
            }
            missing = set(expected)
            ids = list(expected)
            for first in range(0, len(ids), _IDS_PER_LOOK):
                some = ids[first : first + _IDS_PER_LOOK]
                # With a limit: `sql_select_limit` of MySQL would impose its own, and rows would seem to be gone.
                ids_here = outbox.c.message_id.in_(some)
                query = sa.select(outbox.c.message_id).where(ids_here).limit(len(some))
                missing.difference_update(connection.scalars(query, execution_options=AS_NAMED))
            if missing:
                raise OutboxRowLostError(
                    f"{ids_text(missing)} written to {outbox.fullname} is gone before the commit: the "
                    "database undid part of the transaction after an error, or a trigger or a rule of "
                    "that table keeps rows out (`qmq doctor` looks for those). Roll back and try the "
                    "whole transaction again."
                )

    def was_ended_elsewhere(self) -> bool:
        """Whether messages wait here for a commit that has already happened, unknown to SQLAlchemy, or never will.

        False if an error ended the transaction: the application knows that one.
        """
        if self.is_lost or self.is_suspect or self._written == len(self._rows):
            return False
        return not self._rows[-1][0].dialect.is_in_transaction(self._link)

    def names(self) -> str:
        """Ids of the messages, for an error or a log."""
        return ids_text([row.message_id for _, row in self._rows])


def _by_outlet(
    sent: list[tuple[Outlet, OutboxRow]],
) -> list[tuple[Outlet, tuple[OutboxRow, ...]]]:
    outlets = dict.fromkeys([outlet for outlet, _ in sent])
    return [(outlet, tuple([row for other, row in sent if other is outlet])) for outlet in outlets]


def lost_error(what: str) -> OutboxRowLostError:
    """The error for a transaction that has ended before its commit."""
    return OutboxRowLostError(
        f"the transaction that {what} was sent in has ended before its commit: after an error, or "
        "by a COMMIT or ROLLBACK that SQLAlchemy knows nothing of. Roll back and try the whole "
        "transaction again."
    )
