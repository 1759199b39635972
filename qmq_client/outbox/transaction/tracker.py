"""Follows the application's transactions: which messages were sent in which, and how each ended.

Two places are watched. The calls of SQLAlchemy's dialect (`calls.py`) see every BEGIN, SAVEPOINT,
ROLLBACK and COMMIT, whoever asked for it; a `Unit` stands at the link of each connection in which
something was sent. Listeners of the `Session` class see what those cannot: which session a connection
belongs to, and that a commit is near while an error can still be met by it.

The COMMIT that returned is the proof: a released savepoint, and a session that has joined somebody
else's transaction, send none. One that raised may have happened all the same; then the publisher
sends only what another connection can see.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any, Final
from weakref import ref

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.orm import Session, SessionTransaction

from qmq_client.errors import AutocommitError, NoTransactionError
from qmq_client.outbox.database.dialect import dialect_of
from qmq_client.outbox.database.driver import file_number
from qmq_client.outbox.database.link import Link, all_links, find_link, forget_all, link_of
from qmq_client.outbox.transaction.calls import follow, is_followed
from qmq_client.outbox.transaction.deferred import DEFERRED, begin_where_deferred, drop, move
from qmq_client.outbox.transaction.enlisted import (
    end,
    enlist,
    enlist_parent,
    enlisted_connections,
    note_active,
    refuse_two,
)
from qmq_client.outbox.transaction.outlet import Outlet
from qmq_client.outbox.transaction.unit import Unit, lost_error


def watch(engine: sa.Engine) -> None:
    """Follow the transactions of this engine from now on; safe to repeat."""
    if not follow(engine.dialect, dialect_of(engine)):
        return
    event.listen(engine, "handle_error", _on_error)
    for name, listener in _SESSION_LISTENERS.items():
        if not event.contains(Session, name, listener):
            event.listen(Session, name, listener)


def unit_of(connection: sa.Connection) -> Unit | None:
    """What was sent in the current transaction of this connection."""
    link = _link_of(connection)
    unit: Unit | None = None if link is None else link.unit
    return unit


def checked_unit(connection: sa.Connection, outlet: Outlet) -> Unit:
    """The unit that a send joins; raises `OutboxError` where it would not follow the transaction."""
    link = link_of(connection)
    if link.is_committing:
        raise NoTransactionError(
            "the transaction is being committed, by another thread; send before that"
        )
    unit: Unit | None = link.unit
    if unit is None:
        if outlet.dialect.has_ended(link):
            raise lost_error("this message")
        if not outlet.dialect.is_transactional(link):
            raise AutocommitError(
                "this connection is in AUTOCOMMIT: it commits every statement by itself, so the "
                "message would stay after a rollback. Use an engine without AUTOCOMMIT, or "
                "`send_now`, which has a transaction of its own"
            )
        return _open_unit(connection, link)
    if unit.is_lost or outlet.dialect.has_ended(link):
        # What is noted now would be missing should something else commit before the error is met.
        unit.is_lost = True
        raise lost_error("this message")
    return unit


def _open_unit(connection: sa.Connection, link: Link) -> Unit:
    unit = link.unit = Unit(link)
    link.connection = ref(connection)
    return unit


def _link_of(connection: sa.Connection) -> Link | None:
    """The link of a connection, where something may have been noted at it."""
    # `Connection.connection` raises for a closed one and would make a new one for an invalidated one.
    given = connection._dbapi_connection
    return None if given is None else find_link(given)


def _leave_to_the_parent() -> None:
    """In a forked child: cut its copies of open transactions, or it would send ROLLBACK for them."""
    null = os.open(os.devnull, os.O_RDWR)
    for link in all_links():
        given = link.proxied()
        if given is None or not link.is_begun:
            continue
        with suppress(Exception):
            if (number := file_number(link.driver)) is not None:
                os.dup2(null, number)
                given.invalidate()
    os.close(null)
    forget_all()


os.register_at_fork(after_in_child=_leave_to_the_parent)


def _on_error(context: sa.engine.ExceptionContext) -> None:
    connection = context.connection
    link = None if connection is None else _link_of(connection)
    if connection is None or link is None:
        return
    error = context.original_exception
    if link.unit is not None:
        link.unit.on_error(error, is_disconnect=context.is_disconnect)
    elif connection.in_transaction() and not context.is_disconnect:
        dialect = dialect_of(connection.engine)
        if dialect.has_ended(link) or dialect.undoes_transaction(link, error):
            # Nothing was sent yet; what is sent later must not take the rest for the whole.
            _open_unit(connection, link).is_lost = True


def _after_transaction_create(session: Session, transaction: SessionTransaction) -> None:
    if transaction.parent is None:
        note_active(session)


def _after_begin(
    session: Session, transaction: SessionTransaction, connection: sa.Connection
) -> None:
    dialect = connection.dialect
    if is_followed(dialect):
        enlist(session, transaction, connection)
        if dialect.is_async:
            move(session, transaction, connection, checked_unit)


def _before_commit(session: Session) -> None:
    """Rows are written before the first COMMIT of a session, which may be one of several."""
    if DEFERRED in session.info:
        begin_where_deferred(session)
    connections = enlisted_connections(session)
    if not connections or session.in_nested_transaction():
        return
    for connection in connections:
        link = _link_of(connection)
        if link is not None and link.unit is not None:
            if len(connections) > 1:
                refuse_two(session, connection.engine.pool)
            link.unit.finish(connection)


def _after_transaction_end(session: Session, transaction: SessionTransaction) -> None:
    if DEFERRED in session.info:
        drop(session, transaction)
    parent = transaction.parent
    if parent is None:
        end(session)
    elif transaction.nested:  # a flush has one of its own, which begins nothing
        enlist_parent(session, transaction, parent)


_SESSION_LISTENERS: Final[dict[str, Any]] = {
    "after_transaction_create": _after_transaction_create,
    "after_begin": _after_begin,
    "before_commit": _before_commit,
    "after_transaction_end": _after_transaction_end,
}
