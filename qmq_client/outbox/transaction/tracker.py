"""Follows the application's transactions: which messages were sent in each, and how each ended.

Two places are watched. The calls of SQLAlchemy's dialect (`calls.py`) see every BEGIN, SAVEPOINT,
ROLLBACK and COMMIT, whoever asked for it; a `Unit` is kept at the link of each connection in which
something was sent. Listeners of the `Session` class see what those calls cannot: which session a
connection belongs to, and that a commit is about to come while an error can still stop it.

A COMMIT that returned is the proof: a released savepoint, and a session that has joined somebody
else's transaction, send nothing. A COMMIT that raised may have happened all the same; then the
publisher sends only what another connection can see.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.orm import Session

from qmq_client.outbox.database.dialect import dialect_of
from qmq_client.outbox.database.driver import file_number
from qmq_client.outbox.database.link import all_links, find_link, forget_all
from qmq_client.outbox.transaction.binds import bind_on
from qmq_client.outbox.transaction.calls import follow, note_error
from qmq_client.outbox.transaction.deferred import DEFERRED, deferred_outboxes
from qmq_client.outbox.transaction.enlisted import (
    ENLISTED,
    OTHERS,
    Begun,
    Enlisted,
    end,
    enlist,
    note_active,
    refuse_two,
)
from qmq_client.outbox.transaction.opened import known_link


def watch(engine: sa.Engine) -> None:
    """Follow the transactions of this engine from now on; safe to repeat."""
    if not follow(engine.dialect, dialect_of(engine)):
        return
    event.listen(engine, "handle_error", _on_error)
    for name, listener in _SESSION_LISTENERS.items():
        if not event.contains(Session, name, listener):
            event.listen(Session, name, listener)


def _leave_to_the_parent() -> None:
    """In a forked child: cut its copies of open transactions, or it would send ROLLBACK for them."""
    null = os.open(os.devnull, os.O_RDWR)
    for link in all_links():
        proxied = link.proxied()
        if proxied is None or not link.is_begun:
            continue
        with suppress(Exception):
            if (number := file_number(link.driver)) is not None:
                os.dup2(null, number)
                proxied.invalidate()
    os.close(null)
    forget_all()


os.register_at_fork(after_in_child=_leave_to_the_parent)


def _on_error(context: sa.engine.ExceptionContext) -> None:
    """Also told of what is no error of the driver, such as a cancellation; see `Calls.is_disconnect`."""
    connection = context.connection
    link = None if connection is None else known_link(connection)
    if connection is not None and link is not None:
        error, is_disconnect = context.original_exception, context.is_disconnect
        note_error(dialect_of(connection.engine), link, error, is_disconnect=is_disconnect)


def _before_commit(session: Session) -> None:
    """Write rows before the first COMMIT of a session, which may make several."""
    info = session.info
    if DEFERRED in info:
        _begin_where_deferred(session)
    enlisted: Enlisted | None = info.get(ENLISTED)
    if not enlisted or session.in_nested_transaction():
        return
    others: list[Begun] = info.get(OTHERS, [])
    for _, connection in (*enlisted.values(), *others):
        proxied = connection._dbapi_connection  # see `known_link`
        link = None if proxied is None else find_link(proxied)
        if link is not None and link.unit is not None:
            if others:
                refuse_two(session, connection.engine.pool)
            link.unit.finish(connection)


def _begin_where_deferred(session: Session) -> None:
    """Before a commit: begin on each database for which messages still wait."""
    for engine, outbox in deferred_outboxes(session).items():
        # Perhaps a connection whose transaction the session has joined.
        bind = bind_on(session, engine, outbox) or engine
        connection = session.connection(bind_arguments={"bind": bind})
        transaction = session.get_nested_transaction() or session.get_transaction()
        if transaction is not None:
            # Had it begun before, something may have been raised where that is noted.
            enlist(session, transaction, connection)


_SESSION_LISTENERS: Final[dict[str, Any]] = {
    "after_transaction_create": note_active,
    "after_begin": enlist,
    "before_commit": _before_commit,
    "after_transaction_end": end,
}
