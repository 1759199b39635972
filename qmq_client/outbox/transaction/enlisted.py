"""Which connections a session's transaction has begun on, and which sessions this thread is in.

Kept by the listeners of `tracker.py` in `session.info` and asked at each send. A session may have a
connection to each of several databases; two to *one* (binds of one engine with different options) do
not commit together, so no message can belong to both, and such a session is refused.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any, Final
from weakref import ReferenceType, ref

import sqlalchemy as sa
from sqlalchemy.orm import Session, SessionTransaction

from qmq_client.errors import WrongDatabaseError

_INFO_KEY: Final = "qmq"
#: Connections beside the one that is enlisted for their database.
_OTHERS_KEY: Final = "qmq_others"
#: For each pool the innermost transaction and its connection.
_Enlisted = dict[sa.Pool, tuple[SessionTransaction, sa.Connection]]


class _Active(threading.local):
    """Sessions with an open transaction of this thread, each with the task that began it."""

    def __init__(self) -> None:
        # What a `WeakKeyDictionary` does, which is Python: every transaction is noted here.
        sessions: dict[ReferenceType[Session], ReferenceType[Any] | None] = {}
        self.sessions = sessions
        #: Called when a session goes that did not end its transaction, in any thread.
        self.forget = lambda gone: sessions.pop(gone, None)


_active = _Active()


def note_active(session: Session) -> None:
    """The session has begun its outermost transaction in this thread and task."""
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
    """Remember that the session's transaction has begun on this connection."""
    pool = connection.engine.pool
    enlisted: _Enlisted | None = session.info.get(_INFO_KEY)
    if enlisted is None:
        session.info[_INFO_KEY] = {pool: (transaction, connection)}
        return
    known = enlisted.get(pool)
    if known is not None and known[1] is not connection and known[1].in_transaction():
        session.info.setdefault(_OTHERS_KEY, []).append(known[1])
    enlisted[pool] = (transaction, connection)


def enlist_parent(session: Session, ended: SessionTransaction, parent: SessionTransaction) -> None:
    """A savepoint is over: the transaction around it has begun on the same connections before it."""
    enlisted: _Enlisted = session.info.get(_INFO_KEY, {})
    for pool, (innermost, connection) in enlisted.items():
        if innermost is ended:
            enlisted[pool] = (parent, connection)


def end(session: Session) -> None:
    """The outermost transaction is over."""
    _active.sessions.pop(ref(session), None)
    info = session.info
    info.pop(_INFO_KEY, None)
    if _OTHERS_KEY in info:
        del info[_OTHERS_KEY]


def enlisted_connections(session: Session) -> list[sa.Connection]:
    """All connections of the session's transaction."""
    enlisted: _Enlisted | None = session.info.get(_INFO_KEY)
    if not enlisted:
        return []
    if len(enlisted) == 1 and _OTHERS_KEY not in session.info:  # as in most transactions
        ((_, connection),) = enlisted.values()
        return [connection]
    others: list[sa.Connection] = session.info.get(_OTHERS_KEY, [])
    return [connection for _, connection in enlisted.values()] + others


def enlisted_connection(session: Session, pool: sa.Pool) -> sa.Connection | None:
    """The connection of this pool on which the session's innermost transaction has begun.

    Raises `WrongDatabaseError` when the session has two of them.
    """
    info = session.info
    enlisted: _Enlisted | None = info.get(_INFO_KEY)
    if enlisted is None or (pair := enlisted.get(pool)) is None:
        return None
    if _OTHERS_KEY in info:
        refuse_two(session, pool)
    innermost = session.get_nested_transaction() or session.get_transaction()
    return pair[1] if pair[0] is innermost else None


def enlisted_engine(session: Session, pool: sa.Pool) -> sa.Engine | None:
    """The engine on this pool that the session's transaction has touched."""
    enlisted: _Enlisted | None = session.info.get(_INFO_KEY)
    if enlisted is None or (pair := enlisted.get(pool)) is None:
        return None
    return pair[1].engine


def refuse_two(session: Session, pool: sa.Pool) -> None:
    """Raise `WrongDatabaseError` when the session has two connections of this pool."""
    others: list[sa.Connection] | None = session.info.get(_OTHERS_KEY)
    if others and any(other.engine.pool is pool for other in others):
        raise WrongDatabaseError(
            "this session has two connections to one database (binds of one engine with different "
            "options), which do not commit together. Give it one"
        )


def _current_task() -> ReferenceType[Any] | None:
    if asyncio._get_running_loop() is None:
        return None
    task = asyncio.current_task()
    return None if task is None else ref(task)
