"""Sends through an asynchronous session: written when awaited, otherwise at the session's next flush.

`send` cannot execute a statement outside of a coroutine. So it returns an awaitable object and
registers it with the session. If it is not awaited, the session's flush or commit writes the row
with the same statements: nothing is lost, but the row is late, which is logged as a mistake. A
mapped object that is never written itself makes the session flush.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence
from typing import Any, Final, Generic, TypeVar, cast

import sqlalchemy as sa
from sqlalchemy.orm import Session, SessionTransaction, registry

from qmq_client.errors import NoTransactionError
from qmq_client.outbox.row import OutboxRow, ids_text

_log = logging.getLogger("qmq.producer")

#: Key in the `info` of sessions.
_UNAWAITED: Final = "qmq_unawaited"

_Value = TypeVar("_Value")
#: Writes rows without an await: inside `run_sync`, or in an event of the session.
WriteNow = Callable[[Session, Sequence[OutboxRow]], object]


class _AsCoroutine(Generic[_Value]):
    """A coroutine-like object for `asyncio.create_task` and task groups, which do not accept every awaitable."""

    _pending: Pending | None
    _steps: Generator[Any, None, Any] | None = None

    #: Converts it to a plain value.
    _plain: Callable[[], _Value]

    def __await__(self) -> Generator[Any, None, _Value]:
        if self._pending is not None:
            yield from self._pending.write().__await__()
        return self._plain()

    def send(self, value: Any) -> Any:
        """Run the coroutine to its next wait."""
        if self._steps is None:
            self._steps = self.__await__()
        return self._steps.send(value)

    def throw(self, *error: Any) -> Any:
        """Like `send`, with an error such as a cancellation; if it had not begun, nothing is written."""
        if self._steps is None:
            self._steps = self.__await__()
            if self._pending is not None:
                self._pending.give_up()
        return self._steps.throw(*error)

    def close(self) -> None:
        """Stop awaiting it."""
        if self._steps is not None:
            self._steps.close()


class Sent(_AsCoroutine[str], str):
    """The id of a message that was sent, 32 hex digits; `await` it after a send in an `AsyncSession`."""

    _pending: Pending | None

    def __new__(cls, message_id: str, pending: Pending | None = None) -> Sent:
        """`pending`: the object that writes the row."""
        made = super().__new__(cls, message_id)
        made._pending = pending
        return made

    def _plain(self) -> str:
        return str(self)


class SentMany(_AsCoroutine[list[str]], list[str]):
    """The ids of messages that were sent together; `await` it after a send in an `AsyncSession`."""

    def __init__(self, ids: Sequence[str], pending: Pending | None = None) -> None:
        list.__init__(self, ids)
        self._pending = pending

    def _plain(self) -> list[str]:
        return list(self)


def sent(message_id: str, pending: Pending | None) -> Sent:
    """The return value of `send`: a plain text once the row is written, so that any encoder accepts it."""
    return cast(Sent, message_id) if pending is None else Sent(message_id, pending)


def sent_many(ids: list[str], pending: Pending | None) -> SentMany:
    """The return value of `send_many`; an empty list may be awaited too."""
    return cast(SentMany, ids) if ids and pending is None else SentMany(ids, pending)


class Pending:
    """Rows that wait to be awaited."""

    def __init__(
        self, rows: Sequence[OutboxRow], write: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        """`write` executes the INSERT."""
        self.rows = rows
        self._write = write
        self.is_written = False
        #: Whether its transaction ended without them, or the task that should await them was cancelled.
        self.is_over = False

    async def write(self) -> None:
        """Write the rows; raises `NoTransactionError` if it is too late."""
        if self.is_over:
            raise NoTransactionError(
                f"{ids_text(self.rows)} was not written: its transaction or savepoint ended before the send was "
                "awaited, or its task was cancelled. Write `await producer.send(…)`"
            )
        if not self.is_written:
            self.is_written = True
            await self._write()

    def give_up(self) -> None:
        """Write nothing: the waiting task was cancelled, and gets an error that says so."""
        self.is_over = True

    def __del__(self) -> None:
        if not (self.is_written or self.is_over):
            _log.error(
                "%s was sent with an AsyncConnection and never awaited, so it was not written: write "
                "`await producer.send(…)`",
                ids_text(self.rows),
            )


class _Marker:
    """An object in a session's unit of work, so that there is something to flush."""


registry().map_imperatively(
    _Marker, sa.Table("qmq_unawaited", sa.MetaData(), sa.Column("id", sa.Integer, primary_key=True))
)


class PendingInSession(Pending):
    """Rows that wait to be awaited, or for the commit of their session."""

    def __init__(
        self,
        scope: Any,
        session: Session,
        rows: Sequence[OutboxRow],
        *,
        write_now: WriteNow,
        drop: Callable[[Sequence[OutboxRow]], object],
    ) -> None:
        """`scope`: the `AsyncSession` around the session; `drop`: called with rows that were rolled back."""
        super().__init__(rows, lambda: scope.run_sync(self.write_in))
        self._write_now = write_now
        self.drop = drop
        if not session.in_transaction():
            session.begin()
        #: The transaction or savepoint that the rows belong to.
        self.transaction = session.get_nested_transaction() or session.get_transaction()
        session.info.setdefault(_UNAWAITED, []).append(self)
        self._marker = _Marker()
        session.add(self._marker)

    def give_up(self) -> None:
        super().give_up()
        self.drop(self.rows)

    def write_in(self, session: Session) -> None:
        """Write the rows in this session, unless they were cancelled."""
        self.is_written = True
        if self._marker in session.new:
            session.expunge(self._marker)
        if self.rows:
            self._write_now(session, self.rows)

    def __del__(self) -> None:  # the session has a reference to it
        pass


def write_unawaited(session: Session, *, is_whole: bool) -> None:
    """Before a flush or a commit: write messages of sends that were not awaited.

    `is_whole`: the whole transaction is about to end, not only the innermost savepoint.
    """
    innermost = session.get_nested_transaction() or session.get_transaction()
    for each in _unwritten(session):
        if is_whole or each.transaction is innermost:
            _log.error(
                "%s was sent with an AsyncSession and not awaited, so it was written by its flush: write "
                "`await producer.send(…)`",
                ids_text(each.rows),
            )
            each.write_in(session)


def flush_unawaited(session: Session) -> None:
    """Before a flush: write the same messages, and remove the marker objects from the flush."""
    if _UNAWAITED in session.info:
        write_unawaited(session, is_whole=False)
        for each in list(session.new):
            if isinstance(each, _Marker):
                session.expunge(each)


def end_unawaited(session: Session, transaction: SessionTransaction | None) -> list[OutboxRow]:
    """A transaction or savepoint has ended; None for all of the session. Returns the rows that were
    not written in it.
    """
    left: list[OutboxRow] = []
    if _UNAWAITED not in session.info:
        return left
    for each in _unwritten(session):
        if transaction is None or each.transaction is transaction:
            each.is_over = True
            each.drop(each.rows)
            left += each.rows
    session.info[_UNAWAITED] = _unwritten(session)
    return left


def discard_unawaited(session: Session, message_id: bytes) -> bool:
    """Remove a waiting message; returns whether it was there."""
    for each in _unwritten(session):
        kept = [row for row in each.rows if row.message_id != message_id]
        if len(kept) < len(each.rows):
            each.rows = kept
            return True
    return False


def has_unawaited(session: Session, message_id: bytes) -> bool:
    """Whether a message waits to be awaited."""
    return any(row.message_id == message_id for each in _unwritten(session) for row in each.rows)


def _unwritten(session: Session) -> list[PendingInSession]:
    found: Iterable[PendingInSession] = session.info.get(_UNAWAITED, ())
    return [each for each in found if not (each.is_written or each.is_over)]
