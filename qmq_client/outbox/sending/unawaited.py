"""Sends through an asynchronous session: awaited, they are written at once; forgotten, by its flush.

`send` cannot execute anything outside of a coroutine. So it adds a mapped row to the session's unit of
work and returns an object to be awaited; awaiting that takes the row out again and writes it. A row
that was never awaited is written with the session's other objects: nothing is lost, but it is as late
as a flush, and shares its limits. So that is logged as a mistake.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import suppress
from typing import Any, cast

import sqlalchemy as sa
from sqlalchemy import event, orm
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.expression import FunctionElement

from qmq_client.errors import WrongDatabaseError
from qmq_client.outbox.row import OutboxRow
from qmq_client.outbox.table import LIVE
from qmq_client.wire.message_id import format_message_id

_log = logging.getLogger("qmq.producer")

Write = Callable[[], Coroutine[Any, Any, None]]


class Sent(str):
    """The id of a message that was sent, 32 hex digits; `await` it after a send in an `AsyncSession`."""

    __slots__ = ("_pending",)
    _pending: Pending | None

    def __new__(cls, message_id: str, pending: Pending | None = None) -> Sent:
        """`pending`: what writes the row."""
        made = super().__new__(cls, message_id)
        made._pending = pending
        return made

    def __await__(self) -> Generator[Any, None, str]:
        if self._pending is not None:
            yield from self._pending.write().__await__()
        return str(self)


class SentMany(list[str]):
    """The ids of messages that were sent together; `await` it after a send in an `AsyncSession`."""

    def __init__(self, ids: Sequence[str], pending: Pending | None = None) -> None:
        super().__init__(ids)
        self._pending = pending

    def __await__(self) -> Generator[Any, None, list[str]]:
        if self._pending is not None:
            yield from self._pending.write().__await__()
        return list(self)


def sent(message_id: str, pending: Pending | None) -> Sent:
    """What `send` returns: a plain text where the row is written, so that any encoder takes it."""
    return cast(Sent, message_id) if pending is None else Sent(message_id, pending)


def sent_many(ids: list[str], pending: Pending | None) -> SentMany:
    """The same for `send_many`; no messages may be awaited too."""
    return cast(SentMany, ids) if ids and pending is None else SentMany(ids, pending)


class Pending:
    """Rows that wait to be awaited, or for the session's flush."""

    def __init__(self, rows: Sequence[OutboxRow], write: Write, *, is_in_session: bool) -> None:
        """`write`: executes the INSERT; `is_in_session`: a flush writes them if nobody does."""
        self.rows = rows
        self.is_written = False
        self._write = write
        self._is_in_session = is_in_session

    async def write(self) -> None:
        """Write the rows, unless a flush has done so."""
        if not self.is_written:
            self.is_written = True
            await self._write()

    def __del__(self) -> None:
        if not self.is_written and not self._is_in_session:
            _log.error(
                "%s was sent with an AsyncConnection and never awaited, so it was not written: write "
                "`await producer.send(…)`",
                _ids(self.rows),
            )


class now_ms(FunctionElement[int]):  # noqa: N801  # a function of SQL
    """The database's clock, as the default of a column: one statement for any number of rows."""

    type = sa.BigInteger()
    inherit_cache = True
    name = "qmq_now_ms"


@compiles(now_ms)
def _compile_now_ms(_: Any, compiler: Any, **__: Any) -> str:
    from qmq_client.outbox.database import mysql, postgresql, sqlite

    texts = {"sqlite": sqlite.NOW_MS, "postgresql": postgresql.NOW_MS}
    return texts.get(compiler.dialect.name, mysql.NOW_MS)


class UnawaitedRows:
    """The mapped class of one producer: its rows as objects of a unit of work."""

    def __init__(
        self,
        engine: sa.Engine,
        outbox: sa.Table,
        *,
        takeover_ms: int,
        bind_of: Callable[[orm.Session], sa.Engine | sa.Connection],
        note: Callable[[orm.Session, sa.Connection, Sequence[OutboxRow]], object],
    ) -> None:
        """`outbox`: under its whole name; `note` is told of rows that a flush has written."""
        self._engine = engine
        self._bind_of = bind_of
        self._note = note
        table = _with_clock(outbox, takeover_ms)

        class Row:
            """One row."""

        self._class: Any = Row
        orm.registry().map_imperatively(
            Row,
            table,
            primary_key=[table.c.message_id],
            eager_defaults=False,
            confirm_deleted_rows=False,
            exclude_properties=["id", "due_at_ms", "created_at_ms", "last_error"],
        )
        event.listen(Row, "before_insert", self._refuse_another_database)
        event.listen(Row, "after_insert", self._on_insert)

    def add(self, session: orm.Session, rows: Sequence[OutboxRow], token: bytes) -> list[Any]:
        """Add the rows to the session's unit of work; returns the objects, for `remove`."""
        self._bind(session)
        objects = []
        for row in rows:
            made = self._class()
            made.message_id, made.subject, made.record = row.message_id, row.subject, row.record
            made.ordering_key, made.token = row.ordering_key, token
            made.state, made.attempts = LIVE, 0
            made.qmq_row = row
            objects.append(made)
        session.add_all(objects)
        return objects

    def remove(self, session: orm.Session, objects: Sequence[Any]) -> bool:
        """Take the objects out again; whether all of them were still unwritten."""
        new = session.new
        if not all(each in new for each in objects):
            return False
        for each in objects:
            session.expunge(each)
        return True

    def has(self, session: orm.Session, message_id: bytes) -> bool:
        """Whether a message waits in the session's unit of work."""
        return bool(self._waiting(session, message_id))

    def discard(self, session: orm.Session, message_id: bytes) -> bool:
        """Take a message out of the session's unit of work; whether it was there."""
        waiting = self._waiting(session, message_id)
        for each in waiting:
            session.expunge(each)
        return bool(waiting)

    def _waiting(self, session: orm.Session, message_id: bytes) -> list[Any]:
        ours = [each for each in session.new if isinstance(each, self._class)]
        return [each for each in ours if each.message_id == message_id]

    def _bind(self, session: orm.Session) -> None:
        """A session of several databases does not know where these rows belong; tell it.

        In each transaction anew: the connection that it began with may be another one.
        """
        bind = self._bind_of(session)
        with suppress(sa.exc.UnboundExecutionError):
            if session.get_bind(mapper=sa.inspect(self._class)) is bind:
                return
        session.bind_mapper(self._class, bind)

    def _refuse_another_database(self, _: object, connection: sa.Connection, __: Any) -> None:
        """Where the session leads is known at the flush; its `get_bind` may choose by that."""
        if connection.engine.pool is not self._engine.pool:
            raise WrongDatabaseError(
                "this session's `get_bind` would write the message to another database: write "
                "`await producer.send(…)`"
            )

    def _on_insert(self, _: object, connection: sa.Connection, target: Any) -> None:
        _log.error(
            "%s was sent with an AsyncSession and not awaited, so it was written by the session's flush: "
            "write `await producer.send(…)`",
            _ids([target.qmq_row]),
        )
        session = orm.object_session(target)
        if session is not None:
            self._note(session, connection, [target.qmq_row])


def _with_clock(outbox: sa.Table, takeover_ms: int) -> sa.Table:
    clock = {
        "due_at_ms": now_ms() + sa.literal_column(str(takeover_ms), sa.BigInteger()),
        "created_at_ms": now_ms(),
    }
    columns = [
        sa.Column(
            each.name,
            each.type,
            primary_key=each.primary_key,
            autoincrement=each.autoincrement,
            nullable=each.nullable,
            default=clock.get(each.name),
        )
        for each in outbox.c
    ]
    return sa.Table(outbox.name, sa.MetaData(), *columns, schema=outbox.schema)


def _ids(rows: Sequence[OutboxRow]) -> str:
    return ", ".join(f"message {format_message_id(row.message_id)}" for row in rows)
