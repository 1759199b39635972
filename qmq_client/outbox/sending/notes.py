"""Notes of the messages sent in an open transaction, and the hints that the publisher gets at its end.

A hint says that a transaction with messages may have ended; it proves nothing. The publisher sends only
rows that it finds committed, so a hint that is early or wrong costs one query, and a missing hint
leaves the row to the watchdog. Hints come from public events of SQLAlchemy: the end of a session's
outermost transaction, the commit of a connection that was passed to `send`, and the return of a
connection to its pool, which also comes after cancelled tasks.

The listeners do no I/O, take no connection and raise nothing; but before a commit they write
messages that were sent with an `AsyncSession` and not awaited.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.orm import Session, SessionTransaction

from qmq_client.outbox.row import OutboxRow, ids_text
from qmq_client.outbox.sending.unawaited import end_unawaited, flush_unawaited, write_unawaited

_log = logging.getLogger("qmq.producer")

#: Keys in the `info` of sessions and connections.
_NOTES: Final = "qmq_notes"
_BEGUN: Final = "qmq_begun"
_COMMITTING: Final = "qmq_committing"
#: The savepoint whose end was reported last.
_ANNOUNCED: Final = "qmq_announced"
_HAS_COMMITTED: Final = "qmq_has_committed"


# One is made for each send; a struct takes a fifth of a dataclass's time.
class Hint(msgspec.Struct, kw_only=True):
    """Rows that were written by one call of `send`, and whose transaction may have ended."""

    rows: Sequence[OutboxRow]
    #: The owner that the rows were written with.
    token: bytes
    #: Monotonic seconds just before the INSERT; the time until the rows fall due runs from then.
    written_at_s: float
    #: Whether the COMMIT is only about to be sent.
    is_early: bool = False


class Note(msgspec.Struct, kw_only=True):
    """A hint that waits for the end of its transaction."""

    hint: Hint
    #: Takes the hint; never blocks, never raises.
    put: Callable[[Hint], object]
    #: Takes rows that were rolled back; never blocks, never raises.
    drop: Callable[[Sequence[OutboxRow]], object]
    #: Whether the session's end also ends the transaction; not if the session joined an outer one.
    is_of_session: bool = False
    is_committing: bool = False
    #: The session has committed before, so the application may have sent after the intended commit.
    follows_commit: bool = False
    #: The hint was given or dropped.
    is_over: bool = False


def note(
    scope: Session | sa.Connection, connection: sa.Connection, new: Note, *, is_kept: bool
) -> None:
    """Note rows that were just written on this connection through `scope`.

    `is_kept`: the connection is the application's own, and may be used for many transactions.
    """
    connection.info.setdefault(_NOTES, []).append(new)
    if isinstance(scope, Session):
        new.is_of_session = not is_kept
        new.is_committing = is_committing(scope)
        new.follows_commit = bool(scope.info.get(_HAS_COMMITTED))
        scope.info.setdefault(_NOTES, []).append(new)
    if is_kept and not event.contains(connection, "commit", _on_commit):
        for name in ("commit", "commit_twophase", "prepare_twophase"):
            event.listen(connection, name, _on_commit)
        for name in ("rollback", "rollback_twophase"):
            event.listen(connection, name, _on_rollback)


def open_rows(scope: Session | sa.Connection) -> Iterator[tuple[OutboxRow, bytes]]:
    """Rows sent in this scope's open transaction with their owner, the last first; some may be rolled back."""
    notes: list[Note] = scope.info.get(_NOTES, [])
    for each in reversed(notes):
        if not each.is_over:
            for row in reversed(each.hint.rows):
                yield row, each.hint.token


def begun_connections(session: Session) -> Sequence[sa.Connection]:
    """The connections on which this session's open transaction has begun."""
    begun: list[sa.Connection] = session.info.get(_BEGUN, [])
    return [each for each in begun if not each.closed]


def watch(engine: sa.Engine) -> None:
    """Listen to this engine's events to give hints; safe to repeat. Does not change its transactions."""
    if not event.contains(engine, "checkin", _on_checkin):
        event.listen(engine, "checkin", _on_checkin)
    if not event.contains(Session, "after_transaction_end", _on_session_end):
        event.listen(Session, "after_begin", _on_session_begin)
        event.listen(Session, "before_flush", _on_session_flush)
        event.listen(Session, "before_commit", _on_session_commit)
        event.listen(Session, "after_rollback", _on_session_rollback)
        event.listen(Session, "after_transaction_end", _on_session_end)


def _on_session_begin(session: Session, _: SessionTransaction, connection: sa.Connection) -> None:
    begun = session.info.setdefault(_BEGUN, [])
    if connection not in begun:
        begun.append(connection)


def _on_session_flush(session: Session, *_: object) -> None:
    flush_unawaited(session)


def is_committing(session: Session) -> bool:
    """Whether the session's transaction is about to commit, so that its commit events are running."""
    return bool(session.info.get(_COMMITTING))


def _on_session_commit(session: Session) -> None:
    """Called before a COMMIT, or before the release of a savepoint, which does not end the transaction.

    A savepoint that is reported twice is still open while its outer transaction commits.
    """
    savepoint = session.get_nested_transaction()
    is_whole = savepoint is None or session.info.get(_ANNOUNCED) is savepoint
    if savepoint is not None:
        session.info[_ANNOUNCED] = savepoint
    if is_whole:
        session.info[_COMMITTING] = session.info[_HAS_COMMITTED] = True
        for each in session.info.get(_NOTES, ()):
            each.is_committing = True
    write_unawaited(session, is_whole=is_whole)


def _on_session_rollback(session: Session) -> None:
    """Called after a rollback. It proves nothing after a failed COMMIT, or for a savepoint."""
    if session.get_nested_transaction() is not None:
        return
    end_unawaited(session, None)
    for each in session.info.get(_NOTES, ()):
        if not each.is_committing:
            _drop(each)


def _on_session_end(session: Session, transaction: SessionTransaction) -> None:
    if transaction.parent is not None:
        end_unawaited(session, transaction)
        return
    unwritten = end_unawaited(session, None)
    info = session.info
    for key in (_BEGUN, _COMMITTING, _ANNOUNCED):
        info.pop(key, None)
    if unwritten:
        _log_unended(unwritten, is_mistake=bool(info.get(_HAS_COMMITTED)))
    _end([each for each in info.pop(_NOTES, ()) if each.is_of_session])


def _on_checkin(_: object, entry: Any) -> None:
    """The connection returns to its pool, so its transaction has ended."""
    _end(entry.info.pop(_NOTES, ()))


def _on_commit(connection: sa.Connection, *_: object) -> None:
    for each in _notes_of(connection):
        each.hint.is_early = True
        _give(each)


def _on_rollback(connection: sa.Connection, *_: object) -> None:
    for each in _notes_of(connection):
        _drop(each)


def _notes_of(connection: sa.Connection) -> Sequence[Note]:
    """Remove and return the notes; an invalidated connection has none, because it has returned to its pool."""
    if connection.invalidated:
        return ()
    notes: Sequence[Note] = connection.info.pop(_NOTES, ())
    return notes


def _end(notes: Sequence[Note]) -> None:
    left = [each for each in notes if each.is_of_session and not each.is_over]
    unended = [each for each in left if not each.is_committing]
    if unended:
        rows = [row for each in unended for row in each.hint.rows]
        _log_unended(rows, is_mistake=any(each.follows_commit for each in unended))
    for each in notes:
        _give(each)


def _log_unended(rows: Sequence[OutboxRow], *, is_mistake: bool) -> None:
    """Log a session that was closed with messages: after an error, or after a send that followed the commit."""
    is_mistake = is_mistake and sys.exc_info()[0] is None
    _log.log(
        logging.WARNING if is_mistake else logging.INFO,
        "a session was closed without commit, so the messages=%d that were sent since are not sent: %s. "
        "Send before the commit; commit after the send",
        len(rows),
        ids_text(rows),
    )


def _give(each: Note) -> None:
    if not each.is_over:
        each.is_over = True
        each.put(each.hint)


def _drop(each: Note) -> None:
    if not each.is_over:
        each.is_over = True
        each.drop(each.hint.rows)
