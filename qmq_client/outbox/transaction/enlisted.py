"""Which connections a session's transaction has begun on, and which sessions this thread is in.

Kept in `session.info` by listeners of the `Session` class, which `tracker.py` sets, and asked at each
send. A session may have a
connection to each of several databases; two to *one* (binds of one engine with different options) do
not commit together, so no message can belong to both, and such a session is refused.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any, Final, TypeAlias
from weakref import ReferenceType, ref

import sqlalchemy as sa
from sqlalchemy.orm import Session, SessionTransaction

from qmq_client.errors import WrongDatabaseError
from qmq_client.outbox.transaction.deferred import DEFERRED, drop, move

#: A transaction, and a connection that it has begun on.
Begun: TypeAlias = tuple[SessionTransaction, sa.Connection]
#: For each pool the innermost transaction.
Enlisted: TypeAlias = dict[sa.Pool, Begun]
#: Where that stands in `session.info`, and a list of others on the same pools.
ENLISTED: Final = "qmq"
OTHERS: Final = "qmq_others"


class _Active(threading.local):
    """Sessions with an open transaction of this thread, each with the task that began it."""

    def __init__(self) -> None:
        # What a `WeakKeyDictionary` does, which is Python: every transaction is noted here.
        sessions: dict[ReferenceType[Session], ReferenceType[Any] | None] = {}
        self.sessions = sessions
        #: Called when a session goes that did not end its transaction, in any thread.
        self.forget = lambda gone: sessions.pop(gone, None)


_active = _Active()


def note_active(session: Session, transaction: SessionTransaction) -> None:
    """After a session has begun a transaction: the outermost is noted for this thread and task."""
    if transaction.parent is not None:
        return
    # An error to catch, without a loop, would take ten times as long.
    task = None if asyncio._get_running_loop() is None else _current_task()
    _active.sessions[ref(session, _active.forget)] = task


def active_sessions() -> list[Session]:
    """Sessions in whose transaction this thread and task is; on any engine."""
    task = _current_task()
    noted = [(found(), owner) for found, owner in list(_active.sessions.items())]
    return [
        session
        for session, owner in noted
        if session is not None and owner == task and session.in_transaction()
    ]


def enlist(session: Session, transaction: SessionTransaction, connection: sa.Connection) -> None:
    """After a session's transaction has begun on this connection."""
    pool = connection.engine.pool
    info = session.info
    enlisted: Enlisted | None = info.get(ENLISTED)
    if enlisted is None:
        info[ENLISTED] = {pool: (transaction, connection)}
    else:
        known = enlisted.get(pool)
        if known is not None and known[1] is not connection and known[1].in_transaction():
            info.setdefault(OTHERS, []).append(known)
        enlisted[pool] = (transaction, connection)
    if DEFERRED in info:
        move(session, transaction, connection)


def end(session: Session, transaction: SessionTransaction) -> None:
    """After a transaction of a session has ended, whichever way."""
    info = session.info
    if DEFERRED in info:
        drop(session, transaction)
    parent = transaction.parent
    if parent is not None:
        if transaction.nested:  # a flush has one of its own, which begins nothing
            _enlist_parent(session, transaction, parent)
        return
    _active.sessions.pop(ref(session), None)
    info.pop(ENLISTED, None)
    if OTHERS in info:
        del info[OTHERS]


def _enlist_parent(session: Session, ended: SessionTransaction, parent: SessionTransaction) -> None:
    """A savepoint is over: the transaction around it has begun on the same connections before it."""
    enlisted: Enlisted = session.info.get(ENLISTED, {})
    for pool, (innermost, connection) in enlisted.items():
        if innermost is ended:
            enlisted[pool] = (parent, connection)


def enlisted_connection(session: Session, pool: sa.Pool) -> sa.Connection | None:
    """The connection of this pool on which the session's innermost transaction has begun.

    None also when that one was ended directly. Raises `WrongDatabaseError` when the session has two of them.
    """
    info = session.info
    enlisted: Enlisted | None = info.get(ENLISTED)
    if enlisted is None or (pair := enlisted.get(pool)) is None:
        return None
    if OTHERS in info:
        refuse_two(session, pool)
    transaction, connection = pair
    innermost = session.get_nested_transaction() or session.get_transaction()
    return connection if transaction is innermost and connection.in_transaction() else None


def enlisted_engine(session: Session, pool: sa.Pool) -> sa.Engine | None:
    """The engine on this pool that the session's transaction has touched."""
    enlisted: Enlisted | None = session.info.get(ENLISTED)
    if enlisted is None or (pair := enlisted.get(pool)) is None:
        return None
    return pair[1].engine


def refuse_two(session: Session, pool: sa.Pool) -> None:
    """Raise `WrongDatabaseError` when the session has two connections of this pool."""
    others: list[Begun] = session.info.get(OTHERS, [])
    if any(connection.engine.pool is pool for _, connection in others):
        raise WrongDatabaseError(
            "this session has two connections to one database (binds of one engine with different "
            "options), which do not commit together. Give it one"
        )


def _current_task() -> ReferenceType[Any] | None:
    if asyncio._get_running_loop() is None:
        return None
    task = asyncio.current_task()
    return None if task is None else ref(task)
