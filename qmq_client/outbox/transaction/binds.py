"""Finds the one of a session's engines on which its messages are written.

A session may have several: binds by mapper or table, or a `get_bind` that sends writes elsewhere
than reads. What counts is where the session would write to the outbox, so it is asked exactly that.
"""

from __future__ import annotations

from contextlib import suppress

import sqlalchemy as sa
from sqlalchemy.orm import Session

from qmq_client.outbox.transaction.enlisted import enlisted_engine


def bind_on(
    session: Session, engine: sa.Engine, outbox: sa.Table
) -> sa.Engine | sa.Connection | None:
    """The engine or connection on which the session would write to this outbox; None if that is another database.

    Connections it has already begun on count as well: one of its mappers may have chosen them.
    """
    bind: sa.Engine | sa.Connection
    try:  # no `suppress`, which is Python: here most sends end
        bind = session.get_bind()
    except sa.exc.UnboundExecutionError:
        pass
    else:
        if bind.engine.pool is engine.pool:
            return bind
    # The second call is for a `get_bind` that recognizes only UPDATE and DELETE, like the recipe in
    # SQLAlchemy's documentation.
    for write in (sa.insert(outbox), sa.update(outbox)):
        with suppress(sa.exc.UnboundExecutionError):
            bind = session.get_bind(clause=write)
            if bind.engine.pool is engine.pool:
                return bind
    return enlisted_engine(session, engine.pool)


def is_on(scope: Session | sa.Connection, engine: sa.Engine, outbox: sa.Table) -> bool:
    """Whether a session or connection writes to this outbox in the database of this engine."""
    if isinstance(scope, sa.Connection):
        return scope.engine.pool is engine.pool
    return bind_on(scope, engine, outbox) is not None
