"""Follows the application's transactions: which messages were sent in which, and how each ended.

Listeners stand at two places. Those of the engine see every BEGIN, SAVEPOINT, ROLLBACK and COMMIT
that goes through SQLAlchemy, whoever asked for it, and keep the `Unit` of each connection. Those of
the `Session` class see what the engine cannot: that a commit has been done. Both are put in place
once, and cost a dictionary look-up where nothing was sent.

A hook is not proof: a released savepoint and a session that has joined somebody else's transaction
fire the same hooks. The proof is that the remembered connection is out of its transaction. Where
nobody can tell (Core, a lost connection), rows are handed over as uncertain, and the publisher sends
only those that another connection can see.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakSet

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.orm import Session, SessionTransaction
from sqlalchemy.sql.elements import (
    ReleaseSavepointClause,
    RollbackToSavepointClause,
    SavepointClause,
)

from qmq_client.errors import AutocommitError, NoTransactionError
from qmq_client.outbox.database.dialect import dialect_of
from qmq_client.outbox.database.driver import driver_of, file_number
from qmq_client.outbox.transaction.deferred import begin_where_deferred, drop, move
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

_log = logging.getLogger("qmq.outbox")
#: Savepoints that SQLAlchemy makes, of which it tells by events.
_SAVEPOINT_CLAUSES: Final = (
    SavepointClause,
    RollbackToSavepointClause,
    ReleaseSavepointClause,
)
_units: WeakKeyDictionary[sa.Connection, Unit] = WeakKeyDictionary()
#: Connections of watched engines that have begun a transaction at some time.
_begun: WeakSet[sa.Connection] = WeakSet()
#: Those whose COMMIT is under way or done, and that have not begun anew.
_committing: WeakSet[sa.Connection] = WeakSet()
_watched: WeakKeyDictionary[sa.Engine, bool] = WeakKeyDictionary()


def watch(engine: sa.Engine) -> None:
    """Follow the transactions of this engine from now on; safe to repeat."""
    if engine in _watched:
        return
    _watched[engine] = True
    for name, listener in _ENGINE_LISTENERS.items():
        event.listen(engine, name, listener)
    # One that returns the statement is called straight, without a wrapper that does it.
    event.listen(engine, "before_cursor_execute", _on_statement, retval=True)
    for name, listener in _SESSION_LISTENERS.items():
        if not event.contains(Session, name, listener):
            event.listen(Session, name, listener)


def unit_of(connection: sa.Connection) -> Unit | None:
    """What was sent in the current transaction of this connection."""
    return _units.get(connection)


def open_unit(connection: sa.Connection) -> Unit:
    """The same, made when there is none."""
    unit = _units.get(connection)
    if unit is None:
        unit = _units[connection] = Unit()
    return unit


def checked_unit(connection: sa.Connection, outlet: Outlet) -> Unit:
    """The unit that a send joins; raises `OutboxError` where it would not follow the transaction."""
    if connection in _committing:
        raise NoTransactionError(
            "the transaction is being committed, in a listener or by another thread; send before that"
        )
    unit = _units.get(connection)
    if unit is None:
        if outlet.dialect.has_ended(connection):
            raise lost_error("this message")
        if not outlet.dialect.is_transactional(connection):
            raise AutocommitError(
                "this connection is in AUTOCOMMIT: it commits every statement by itself, so the "
                "message would stay after a rollback. Use an engine without AUTOCOMMIT, or "
                "`send_now` for a message of its own"
            )
        unit = open_unit(connection)
    elif unit.is_lost or outlet.dialect.has_ended(connection):
        # What is noted now would be missing should something else commit before the error is met.
        unit.is_lost = True
        raise lost_error("this message")
    return unit


def before_commit(connection: sa.Connection) -> None:
    """The owner of the transaction is about to commit, and will report with `confirm`."""
    unit = _units.get(connection)
    if unit is not None:
        unit.finish(connection)
        unit.awaits_confirmation = True


def confirm(connection: sa.Connection) -> None:
    """The owner's commit returned. It counts when the connection is out of its transaction."""
    unit = _units.get(connection)
    if unit is None:
        return
    if connection.in_transaction():
        unit.awaits_confirmation = False  # a savepoint, or somebody else's transaction goes on
        return
    del _units[connection]
    unit.hand_over(is_confirmed=True)


def forget(connection: sa.Connection) -> None:
    """The owner is done with the transaction without having confirmed its commit."""
    unit = _units.get(connection)
    if unit is None:
        return
    if unit.is_committing:
        del _units[connection]
        unit.hand_over(is_confirmed=False)
    else:
        unit.awaits_confirmation = False  # rolled back already, or somebody else's goes on


@contextmanager
def owning(connection: sa.Connection) -> Iterator[None]:
    """Around a transaction whose commit happens at the end of the block, reported to the tracker."""
    try:
        with connection.begin():
            yield
            before_commit(connection)
    except BaseException:
        forget(connection)
        raise
    confirm(connection)


def _leave_to_the_parent() -> None:
    """In a forked child: cut its copies of open transactions, or it would send ROLLBACK for them."""
    null = os.open(os.devnull, os.O_RDWR)
    for connection in [each for each in list(_begun) if each.in_transaction()]:
        with suppress(Exception):
            if (number := file_number(driver_of(connection))) is not None:
                os.dup2(null, number)
                connection.invalidate()
    os.close(null)
    _units.clear()
    _begun.clear()
    _committing.clear()


os.register_at_fork(after_in_child=_leave_to_the_parent)


def _on_begin(connection: sa.Connection, _: Any = None) -> None:
    _begun.add(connection)
    _committing.discard(connection)
    unit = _units.pop(connection, None)
    if unit is not None and unit.is_committing:
        unit.hand_over(is_confirmed=False)


def _on_commit(connection: sa.Connection) -> None:
    """COMMIT is about to be sent; an error here stops it."""
    unit = _units.get(connection)
    if unit is not None:
        _finish_here(connection, unit)
        _on_committing(connection, unit)
    _committing.add(connection)


def _on_prepare_twophase(connection: sa.Connection, _: Any) -> None:
    unit = _units.get(connection)
    if unit is not None:
        _finish_here(connection, unit)


def _on_commit_twophase(connection: sa.Connection, _: Any, is_prepared: bool) -> None:
    unit = _units.get(connection)
    if unit is not None:
        if not is_prepared:
            _finish_here(connection, unit)
        _on_committing(connection, unit)


def _finish_here(connection: sa.Connection, unit: Unit) -> None:
    try:
        unit.finish(connection)
    except BaseException:
        _units.pop(connection, None)
        # SQLAlchemy takes a failed commit for the end of the transaction and sends no ROLLBACK.
        # What fails now must not hide the error, or the cancellation, that is on its way.
        if not connection.invalidated:
            with suppress(Exception):
                connection.connection.rollback()
        raise


def _on_committing(connection: sa.Connection, unit: Unit) -> None:
    unit.is_committing = True
    if not unit.awaits_confirmation:
        del _units[connection]
        unit.hand_over(is_confirmed=False)


def _on_rollback(connection: sa.Connection) -> None:
    unit = _units.pop(connection, None)
    if unit is not None and unit.was_ended_elsewhere(connection):
        _log.error(
            "%s was not stored: its transaction was ended by the driver's own connection, perhaps "
            "by a commit. Commit and roll back through SQLAlchemy.",
            unit.names(),
        )


def _on_rollback_twophase(connection: sa.Connection, _xid: Any, _is_prepared: bool) -> None:
    _units.pop(connection, None)


def _on_savepoint(connection: sa.Connection, _: str | None) -> None:
    unit = _units.get(connection)
    if unit is not None:
        unit.on_savepoint(connection)


def _on_rollback_savepoint(connection: sa.Connection, name: str, _: Any) -> None:
    unit = _units.get(connection)
    if unit is not None:
        unit.on_savepoint_end(connection, name, is_undone=True)


def _on_release_savepoint(connection: sa.Connection, name: str, _: Any) -> None:
    unit = _units.get(connection)
    if unit is not None:
        unit.on_savepoint_end(connection, name, is_undone=False)


def _on_statement(
    connection: sa.Connection,
    _cursor: Any,
    statement: str,
    parameters: Any,
    context: Any,
    _is_many: bool,
) -> tuple[str, Any]:
    unit = _units.get(connection)
    if unit is not None and not _is_savepoint(context):
        unit.on_statement(connection, statement)
    return statement, parameters


def _is_savepoint(context: Any) -> bool:
    compiled = getattr(context, "compiled", None)
    return compiled is not None and isinstance(compiled.statement, _SAVEPOINT_CLAUSES)


def _on_error(context: sa.engine.ExceptionContext) -> None:
    connection = context.connection
    if connection is None:
        return
    unit = _units.get(connection)
    if unit is not None:
        unit.on_error(connection, context.original_exception, is_disconnect=context.is_disconnect)
    elif connection.in_transaction() and not context.is_disconnect:
        dialect = dialect_of(connection.engine)
        error = context.original_exception
        if dialect.has_ended(connection) or dialect.undoes_transaction(connection, error):
            # Nothing was sent yet; what is sent later must not take the rest for the whole.
            open_unit(connection).is_lost = True


def _after_transaction_create(session: Session, transaction: SessionTransaction) -> None:
    if transaction.parent is None:
        note_active(session)


def _after_begin(
    session: Session, transaction: SessionTransaction, connection: sa.Connection
) -> None:
    if _is_watched(connection.engine):
        enlist(session, transaction, connection)
        move(session, transaction, connection, checked_unit)


def _before_session_commit(session: Session) -> None:
    begin_where_deferred(session)
    if session.in_nested_transaction():
        return
    for connection in enlisted_connections(session):
        if connection in _units:
            refuse_two(session, connection.engine.pool)
        before_commit(connection)


def _after_session_commit(session: Session) -> None:
    for connection in enlisted_connections(session):
        confirm(connection)


def _after_transaction_end(session: Session, transaction: SessionTransaction) -> None:
    drop(session, transaction)
    if transaction.parent is not None:
        enlist_parent(session, transaction, transaction.parent)
        return
    for connection in end(session):
        forget(connection)


def _is_watched(engine: sa.Engine) -> bool:
    # An engine with options of its own (`engine.execution_options(...)`) stands before the engine
    # that is watched, and has its pool and its listeners.
    return engine in _watched or any(engine.pool is other.pool for other in list(_watched))


_ENGINE_LISTENERS: Final[dict[str, Any]] = {
    "begin": _on_begin,
    "begin_twophase": _on_begin,
    "commit": _on_commit,
    "prepare_twophase": _on_prepare_twophase,
    "commit_twophase": _on_commit_twophase,
    "rollback": _on_rollback,
    "rollback_twophase": _on_rollback_twophase,
    "savepoint": _on_savepoint,
    "rollback_savepoint": _on_rollback_savepoint,
    "release_savepoint": _on_release_savepoint,
    "handle_error": _on_error,
}
_SESSION_LISTENERS: Final[dict[str, Any]] = {
    "after_transaction_create": _after_transaction_create,
    "after_begin": _after_begin,
    "before_commit": _before_session_commit,
    "after_commit": _after_session_commit,
    "after_transaction_end": _after_transaction_end,
}
