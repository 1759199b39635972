"""On which connections a session's transaction has begun, and which sessions this thread is in.

Listeners of the `Session` class, set by `tracker.py`, keep this in `session.info`; each send reads
it. A session may have a connection to each of several databases. Two connections to *one* database
(binds of one engine with different options) do not commit together, so no message can belong to
both, and such a session is refused.
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

#: A transaction, and a connection on which it has begun.
Begun: TypeAlias = tuple[SessionTransaction, sa.Connection]
#: The innermost transaction for each pool.
Enlisted: TypeAlias = dict[sa.Pool, Begun]
#: Its key in `session.info`, and the key of a list of others on the same pools.
ENLISTED: Final = "qmq"
OTHERS: Final = "qmq_others"


class _Active(threading.local):
    """Sessions with an open transaction in this thread, each with the task that began it."""

    def __init__(self) -> None:
        # Like a `WeakKeyDictionary`, but that is written in Python, and every transaction is noted here.
        sessions: dict[ReferenceType[Session], ReferenceType[Any] | None] = {}
        self.sessions = sessions
        #: Called, in any thread, when a session disappears without ending its transaction.
        self.forget = lambda gone: sessions.pop(gone, None)


_active = _Active()


def note_active(session: Session, transaction: SessionTransaction) -> None:
    """After a session has begun a transaction: note the outermost for this thread and task."""
    if transaction.parent is not None:
        return
    # An error to catch, without a loop, would take ten times as long.
    task = None if asyncio._get_running_loop() is None else _current_task()
    _active.sessions[ref(session, _active.forget)] = task


def active_sessions() -> list[Session]:
    """Sessions in whose transaction this thread and task is, on any engine."""
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
    """After a transaction of a session has ended in any way."""
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
    """A savepoint is over: the transaction around it counts as begun on the same connections."""
    enlisted: Enlisted = session.info.get(ENLISTED, {})
    for pool, (innermost, connection) in enlisted.items():
        if innermost is ended:
            enlisted[pool] = (parent, connection)


def enlisted_connection(session: Session, pool: sa.Pool) -> sa.Connection | None:
    """The connection of this pool on which the session's innermost transaction has begun.

    None also if that connection was ended directly. Raises `WrongDatabaseError` if the session has
    two of them.
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
    """The engine on this pool that the session's transaction has used."""
    enlisted: Enlisted | None = session.info.get(ENLISTED)
    if enlisted is None or (pair := enlisted.get(pool)) is None:
        return None
    return pair[1].engine


def refuse_two(session: Session, pool: sa.Pool) -> None:
    """Raise `WrongDatabaseError` if the session has two connections of this pool."""
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
