"""Which transaction a send joins, and whether it can.

Everything that could break the promise "stored if and only if the transaction commits" is refused
here, before any SQL: no transaction, a transaction on another database, one that commits each
statement by itself.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from qmq_client.current import current_scopes, sync_of
from qmq_client.errors import NoTransactionError, WrongDatabaseError
from qmq_client.given import session_of
from qmq_client.outbox.row import Ending, OutboxRow
from qmq_client.outbox.transaction.binds import bind_on, is_on
from qmq_client.outbox.transaction.deferred import can_execute_async, defer, deferred_row
from qmq_client.outbox.transaction.enlisted import (
    active_sessions,
    enlist,
    enlisted_connection,
)
from qmq_client.outbox.transaction.opened import checked_unit, unit_of
from qmq_client.outbox.transaction.outlet import Outlet


def join(given: Any, engine: sa.Engine, outlet: Outlet, rows: list[OutboxRow]) -> None:
    """Note these rows in the transaction that a send joins.

    `given` is a session or a connection in any of SQLAlchemy's shapes, or None for the current one.
    """
    scope = given if isinstance(given, Session) else _scope(given, engine, outlet)
    if isinstance(scope, sa.Connection):
        connection = _checked(scope, engine, outlet)
    elif (begun := enlisted_connection(scope, engine.pool)) is not None:
        connection = begun
    elif engine.dialect.is_async and not can_execute_async():
        if bind_on(scope, engine, outlet.outbox) is None:
            raise WrongDatabaseError(_wrong(engine, outlet))
        defer(scope, engine, outlet, rows)
        return
    else:
        connection = _begin_on(scope, engine, outlet)
    checked_unit(connection, outlet).add(connection, outlet, rows)


def join_to_cancel(
    given: Any,
    engine: sa.Engine,
    outlet: Outlet,
    message_id: bytes,
    *,
    is_at_broker: bool = False,
) -> bool:
    """Delete an unsent row in the joined transaction; whether there was one.

    A row that somebody may be sending stays, unless the broker is known to have the message.
    Executes statements: an asynchronous session calls it inside `run_sync`.
    """
    scope = _scope(given, engine, outlet)
    connection = _connection(scope, engine, outlet)
    unit = checked_unit(connection, outlet)
    return unit.cancel(connection, outlet, message_id, is_at_broker=is_at_broker)


def noted(
    given: Any, engine: sa.Engine, outlet: Outlet, message_id: bytes
) -> tuple[OutboxRow, Ending] | None:
    """The note of a message sent in the joined transaction, if it was sent there, to wait for it."""
    scope = _scope(given, engine, outlet)
    connection = enlisted_connection(scope, engine.pool) if isinstance(scope, Session) else scope
    unit = None if connection is None else unit_of(connection)
    found = None if unit is None else unit.find(outlet, message_id)
    if found is None and isinstance(scope, Session):
        return deferred_row(scope, outlet, message_id)
    return found


def _scope(given: Any, engine: sa.Engine, outlet: Outlet) -> Session | sa.Connection:
    """The plain session or connection behind the application's object, or the current one."""
    held = _current(engine, outlet) if given is None else given
    if isinstance(held, Session):  # what follows asks for attributes that it has not
        return held
    if isinstance(found := sync_of(session_of(held)), Session | sa.Connection):
        return found
    raise TypeError(
        f"session={type(held).__name__}: give a Session, scoped_session, AsyncSession or a "
        "Connection that is in a transaction"
    )


def _connection(scope: Session | sa.Connection, engine: sa.Engine, outlet: Outlet) -> sa.Connection:
    if isinstance(scope, sa.Connection):
        return _checked(scope, engine, outlet)
    return enlisted_connection(scope, engine.pool) or _begin_on(scope, engine, outlet)


def _begin_on(session: Session, engine: sa.Engine, outlet: Outlet) -> sa.Connection:
    """Make sure that the session's innermost transaction has begun on the outbox's database."""
    bind = bind_on(session, engine, outlet.outbox)
    if bind is None:
        raise WrongDatabaseError(_wrong(engine, outlet))
    try:
        connection = session.connection(bind_arguments={"bind": bind})
    except sa.exc.InvalidRequestError as error:
        raise NoTransactionError(
            f"the session's transaction takes no more work: {error}"
        ) from error
    if enlisted_connection(session, engine.pool) is connection:
        return connection  # it has begun just now, and was noted then
    transaction = session.get_nested_transaction() or session.get_transaction()
    if transaction is None or not connection.in_transaction():
        raise NoTransactionError(
            "the session's connection was committed or rolled back directly; close the session, or "
            "commit and roll back through it"
        )
    enlist(session, transaction, connection)
    return connection


def _checked(connection: sa.Connection, engine: sa.Engine, outlet: Outlet) -> sa.Connection:
    if connection.engine.pool is not engine.pool:
        raise WrongDatabaseError(_wrong(engine, outlet))
    if not connection.in_transaction():
        raise NoTransactionError(
            "this connection is not in a transaction. Use `with transaction(engine) as connection`,"
            " or `with connection.begin()`"
        )
    return connection


def _current(engine: sa.Engine, outlet: Outlet) -> Any:
    """The innermost session or connection around this code that writes to this outbox."""
    for scope in reversed(current_scopes()):
        sync = sync_of(scope)
        if is_on(sync, engine, outlet.outbox):
            if sync.in_transaction():
                return scope
            raise NoTransactionError(
                "the transaction around this code has ended; a task that outlives it must open "
                "its own"
            )
    sessions = [each for each in active_sessions() if is_on(each, engine, outlet.outbox)]
    if len(sessions) == 1:
        return sessions[0]
    if sessions:
        raise NoTransactionError(
            f"{len(sessions)} sessions of this thread have a transaction open; say which one with "
            "`session=`"
        )
    raise NoTransactionError(
        "there is no open transaction to join. Give `session=`, send inside @transactional, or use "
        "`send_now`, which has its own"
    )


def has_transaction(engine: sa.Engine, outlet: Outlet) -> bool:
    """Whether any transaction is open that a call without a session could mean."""
    scopes = [*map(sync_of, current_scopes()), *active_sessions()]
    return any(is_on(scope, engine, outlet.outbox) for scope in scopes)


def _wrong(engine: sa.Engine, outlet: Outlet) -> str:
    outbox = outlet.outbox.fullname
    url = engine.url.render_as_string(hide_password=True)
    return (
        f"the transaction runs on another engine than this producer's outbox ({url}), so they would "
        "not commit together. Use a session on the producer's engine, or a producer for this one; in a "
        f"session with several, name the table {outbox} in `binds`, or have `get_bind` choose for it"
    )
