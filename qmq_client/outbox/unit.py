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

import re
from dataclasses import dataclass
from typing import Final, Protocol

import sqlalchemy as sa

from qmq_client.errors import OutboxMissingError, OutboxRowLostError, TooLargeError
from qmq_client.outbox.dialect import OutboxDialect
from qmq_client.outbox.handoff import HandOver
from qmq_client.outbox.row import OutboxRow
from qmq_client.outbox.table import LIVE, PARKED
from qmq_client.wire.message_id import format_message_id, is_dedupe_id

#: Rows of one INSERT, and how many may wait for it: one statement for nearly every transaction,
#: and far from every database's limit of parameters.
ROWS_PER_INSERT_MAX: Final = 100
_NAMED_IDS_MAX: Final = 5
#: Statements in front of which rows are written, however they are spelled: a savepoint made or rolled
#: back to, and what commits behind SQLAlchemy's back – a COMMIT as text, on MySQL also DDL.
_TELLING_TEXT: Final = re.compile(
    r"(?:\s|--[^\n]*\n|/\*.*?\*/)*(?:"
    r"(?P<savepoint>SAVEPOINT|ROLLBACK\s+(?:(?:TRANSACTION|WORK)\s+)?TO)"
    r"|COMMIT|END|BEGIN|START|PREPARE|SET\s+(?:SESSION\s+|@@(?:SESSION\.)?)?AUTOCOMMIT"
    r"|CREATE|ALTER|DROP|TRUNCATE|RENAME|LOCK|UNLOCK|ANALYZE|OPTIMIZE|REPAIR|GRANT|REVOKE"
    r")\b",
    re.IGNORECASE | re.DOTALL,
)


class Outlet(Protocol):
    """What a transaction needs to know of the producer that sends in it."""

    outbox: sa.Table
    order_lock: sa.Table
    dialect: OutboxDialect
    #: Bytes of records that may wait for the commit.
    buffer_bytes: int
    #: Bytes of one record that the server takes; None when it sets no limit.
    record_bytes_max: int | None
    #: Write at once and look again before every commit, whatever it costs.
    is_strict: bool
    #: The owner that rows are born with.
    token: bytes

    def insert_text(self, row_count: int, skips_known: bool = False) -> str:
        """The INSERT of this many rows, five parameters each; see `insert.py`."""
        ...

    def monotonic_s(self) -> float:
        """The producer's clock."""
        ...

    def hand_over(self, handed: HandOver) -> None:
        """Take committed rows; never blocks, never raises."""
        ...


@dataclass(slots=True)
class _Mark:
    """A savepoint: what was there before it. Its object is known only afterwards."""

    row_count: int
    #: Rows of before that are written inside it are unwritten again when it is rolled back.
    written: int
    savepoint: sa.NestedTransaction | None = None

    @property
    def name(self) -> str | None:
        # The events tell the name of a savepoint at its end but not at its begin; the object that
        # stands for it keeps the name to itself.
        return None if self.savepoint is None else self.savepoint._savepoint


class Unit:
    """Messages of one transaction of one connection. Used by one thread at a time."""

    __slots__ = (
        "_has_cancelled",
        "_has_text_savepoints",
        "_is_overdue",
        "_is_strict",
        "_is_writing",
        "_marks",
        "_rows",
        "_unwritten_bytes",
        "_was_written_early",
        "_written",
        "_written_at_s",
        "awaits_confirmation",
        "is_committing",
        "is_lost",
        "is_suspect",
    )

    def __init__(self) -> None:
        self._rows: list[tuple[Outlet, OutboxRow]] = []
        #: How many of them are written.
        self._written = 0
        self._unwritten_bytes = 0
        self._written_at_s = 0.0
        self._marks: list[_Mark] = []
        self._was_written_early = False
        #: Savepoints given as text: what they undid is known to the database only.
        self._has_text_savepoints = False
        #: Rows of this transaction were deleted by it.
        self._has_cancelled = False
        self._is_strict = False
        #: Rows wait that should be written as soon as a statement can be executed.
        self._is_overdue = False
        self._is_writing = False
        #: A statement of this transaction failed, whatever the application made of it.
        self.is_suspect = False
        #: The transaction has ended behind SQLAlchemy's back.
        self.is_lost = False
        #: Somebody will say when the commit is done, so nobody need look.
        self.awaits_confirmation = False
        #: COMMIT may have been sent.
        self.is_committing = False

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, connection: sa.Connection, outlet: Outlet, rows: list[OutboxRow]) -> None:
        """Note messages; writes when too much waits. Raises `TooLargeError` before it notes any."""
        _check_sizes(outlet, rows)
        self._rows += [(outlet, row) for row in rows]
        self._unwritten_bytes += sum(len(row.record) for row in rows)
        self._is_strict |= outlet.is_strict
        waiting = len(self._rows) - self._written
        is_full = waiting > ROWS_PER_INSERT_MAX or self._unwritten_bytes > outlet.buffer_bytes
        if is_full or self._is_strict:
            self._was_written_early = True
            if (
                connection.dialect.is_async
            ):  # nothing can be executed here: before the next statement
                self._is_overdue = True
            else:
                self.write(connection)

    def find(self, outlet: Outlet, message_id: bytes) -> OutboxRow | None:
        """The note of a message that was sent here through `outlet`."""
        rows = (row for other, row in reversed(self._rows) if other is outlet)
        return next((row for row in rows if row.message_id == message_id), None)

    def cancel(self, connection: sa.Connection, outlet: Outlet, message_id: bytes) -> bool:
        """Delete a row in this transaction, one of its own or one that nobody may be sending now.

        Whether there was one. What is sent here is written first, so that a savepoint rolled back
        later brings the row back like everything else.
        """
        self._was_written_early = True
        self.write(connection)
        columns = outlet.outbox.c
        is_own = any(row.message_id == message_id for _, row in self._rows)
        now_ms = sa.literal_column(outlet.dialect.now_ms, sa.BigInteger())
        is_free = columns.token.is_(None) | (columns.due_at_ms <= now_ms)
        deleted = connection.execute(
            sa.delete(outlet.outbox).where(
                columns.message_id == message_id,
                columns.state.in_((LIVE, PARKED)),
                (columns.token == outlet.token) if is_own else is_free,
            )
        )
        self._has_cancelled |= is_own
        return deleted.rowcount > 0

    def write(self, connection: sa.Connection) -> None:
        """Store what waits. Raises the database's own error with a note that names the messages."""
        if self._is_writing:
            return
        self._is_writing = True
        try:
            if self._written < len(self._rows):
                _lock_keys(connection, self._rows[self._written :])
            while self._written < len(self._rows):
                outlet, rows = self._next_insert()
                if not self._written:
                    self._written_at_s = outlet.monotonic_s()
                _insert(connection, outlet, rows)
                self._written += len(rows)
        finally:
            self._is_writing = False
        self._unwritten_bytes, self._is_overdue = 0, False

    def finish(self, connection: sa.Connection) -> None:
        """Everything that must be before the COMMIT; raises to stop it."""
        if not self._rows or (self.awaits_confirmation and self._written == len(self._rows)):
            return  # nothing was sent since the owner of the transaction had this done
        outlet = self._rows[0][0]
        dialect = outlet.dialect
        if self.is_lost or not dialect.is_in_transaction(connection) or dialect.is_void(connection):
            raise lost_error(self.names())
        is_known = not (self._has_text_savepoints or self._has_cancelled)
        if (self.is_suspect or self._is_strict) and self._written and is_known:
            self._reread(connection)
        self.write(connection)

    def on_error(
        self, connection: sa.Connection, error: BaseException | None, *, is_disconnect: bool
    ) -> None:
        """A statement of this transaction failed; whether anybody minds is not known here."""
        if not self._rows:
            return
        self.is_suspect = True
        dialect = self._rows[0][0].dialect
        if is_disconnect or dialect.undoes_transaction(connection, error):
            self.is_lost = True

    def on_statement(self, connection: sa.Connection, statement: str) -> None:
        """The application is about to execute this, which is no savepoint of SQLAlchemy's.

        Drivers begin anew with the next change, so this is the last moment to see that the
        transaction has ended. Around savepoints given as text, and before what may commit, the rows
        are written early: then the database undoes or keeps them with everything else.
        """
        if not self._rows or self.is_lost or self.is_committing:
            return
        if not self._rows[0][0].dialect.is_in_transaction(connection):
            self.is_lost = True
        elif telling := _TELLING_TEXT.match(statement):
            self._has_text_savepoints |= telling["savepoint"] is not None
            self._was_written_early = True
            self.write(connection)
        elif self._is_overdue:
            self.write(connection)

    def on_savepoint(self, connection: sa.Connection) -> None:
        """A savepoint is about to be made."""
        self._name_last_mark(connection)
        self._marks.append(_Mark(len(self._rows), self._written))

    def on_savepoint_end(self, connection: sa.Connection, name: str, *, is_undone: bool) -> None:
        """The savepoint `name` is about to be rolled back to, or released."""
        self._name_last_mark(connection)
        names = [mark.name for mark in self._marks]
        # One that is not known was made before the first send: everything was sent inside.
        index = names.index(name) if name in names else 0
        if is_undone:
            mark = self._marks[index] if name in names else _Mark(0, 0)
            del self._rows[mark.row_count :]
            self._written = mark.written
            self._unwritten_bytes = sum(len(row.record) for _, row in self._rows[self._written :])
        if is_undone or name in names:
            del self._marks[index:]

    def hand_over(self, *, is_confirmed: bool) -> None:
        """Give the rows to their publishers; nothing here may raise."""
        is_certain = is_confirmed and not (self._was_written_early or self.is_suspect)
        by_outlet: dict[int, tuple[Outlet, list[OutboxRow]]] = {}
        for outlet, row in self._rows[: self._written]:
            by_outlet.setdefault(id(outlet), (outlet, []))[1].append(row)
        for outlet, rows in by_outlet.values():
            outlet.hand_over(
                HandOver(
                    rows=tuple(rows),
                    token=outlet.token,
                    written_at_s=self._written_at_s,
                    is_certain=is_certain,
                )
            )

    def _next_insert(self) -> tuple[Outlet, list[OutboxRow]]:
        """What the next statement carries: rows of one outlet, within its bounds."""
        outlet = self._rows[self._written][0]
        rows: list[OutboxRow] = []
        record_bytes = 0
        for other, row in self._rows[self._written : self._written + ROWS_PER_INSERT_MAX]:
            record_bytes += len(row.record)
            is_full = rows and record_bytes > (outlet.record_bytes_max or record_bytes)
            if other is not outlet or is_full:
                break
            rows.append(row)
        return outlet, rows

    def _name_last_mark(self, connection: sa.Connection) -> None:
        if not self._marks or self._marks[-1].savepoint is not None:
            return
        savepoint = connection.get_nested_transaction()
        if savepoint is None or any(mark.savepoint is savepoint for mark in self._marks):
            self._marks.pop()  # SAVEPOINT itself failed
        else:
            self._marks[-1].savepoint = savepoint

    def _reread(self, connection: sa.Connection) -> None:
        for outbox in {outlet.outbox for outlet, _ in self._rows[: self._written]}:
            expected = {
                row.message_id
                for outlet, row in self._rows[: self._written]
                if outlet.outbox is outbox
            }
            found = connection.scalars(
                sa.select(outbox.c.message_id).where(outbox.c.message_id.in_(expected))
            )
            if missing := expected.difference(found):
                raise OutboxRowLostError(
                    f"{_ids(missing)} written to {outbox.fullname} is gone before the commit: the "
                    "database undid part of the transaction after an error. Roll back and try the "
                    "whole transaction again."
                )

    def was_ended_elsewhere(self, connection: sa.Connection) -> bool:
        """Whether messages wait here for a commit that has been, unknown to SQLAlchemy, or never comes.

        Not when an error ended the transaction, which the application has been told.
        """
        if self.is_lost or self.is_suspect or self._written == len(self._rows):
            return False
        return self._rows[-1][0].dialect.has_ended(connection)

    def names(self) -> str:
        """Ids of the messages, for an error or a log."""
        return _ids([row.message_id for _, row in self._rows])


def lost_error(what: str) -> OutboxRowLostError:
    """The error for a transaction that has ended before its commit."""
    return OutboxRowLostError(
        f"the transaction that {what} was sent in has ended before its commit: after an error, or "
        "by a COMMIT or ROLLBACK that SQLAlchemy knows nothing of. Roll back and try the whole "
        "transaction again."
    )


def _insert(connection: sa.Connection, outlet: Outlet, rows: list[OutboxRow]) -> None:
    token = outlet.token
    values: list[object] = []
    for row in rows:
        values += (row.message_id, row.subject, row.ordering_key, row.record, token)
    try:
        skips_known = any(is_dedupe_id(row.message_id) for row in rows)
        connection.exec_driver_sql(outlet.insert_text(len(rows), skips_known), tuple(values))
    except sa.exc.DBAPIError as error:
        note = f"while writing {_ids([row.message_id for row in rows])} to {outlet.outbox.fullname}"
        if outlet.dialect.is_table_missing(error):
            raise OutboxMissingError(
                f"{error.orig}, {note}. Run `qmq db migrate`, or "
                "`qmq_client.create_tables(engine)` for a first try."
            ) from error
        error.add_note(note)
        raise


def _lock_keys(connection: sa.Connection, unwritten: list[tuple[Outlet, OutboxRow]]) -> None:
    if all(row.ordering_key is None for _, row in unwritten):
        return
    for outlet in dict.fromkeys(outlet for outlet, _ in unwritten):
        rows = [row for other, row in unwritten if other is outlet and row.ordering_key is not None]
        if rows:
            outlet.dialect.lock_keys(connection, outlet.order_lock, rows)


def _check_sizes(outlet: Outlet, rows: list[OutboxRow]) -> None:
    allowed = outlet.record_bytes_max
    if allowed is None:
        return
    for row in rows:
        if len(row.record) > allowed:
            raise TooLargeError(
                field="message",
                limit=f"{allowed} bytes in one statement of this database",
                value=f"{len(row.record)} bytes",
                remedy="Raise max_allowed_packet on the server, or keep the content elsewhere and "
                "send a reference to it.",
            )


def _ids(message_ids: list[bytes] | set[bytes]) -> str:
    shown = ", ".join(format_message_id(id_) for id_ in list(message_ids)[:_NAMED_IDS_MAX])
    more = len(message_ids) - _NAMED_IDS_MAX
    return f"message {shown}{f' and {more} more' if more > 0 else ''}"
