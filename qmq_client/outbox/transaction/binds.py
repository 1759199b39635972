"""On which of a session's engines its messages are written.

A session may have several: binds by mapper or table, or a `get_bind` that sends writes elsewhere than
reads. The one that counts is where it would write to the outbox, so it is asked for that.
"""

from __future__ import annotations

from contextlib import suppress

import sqlalchemy as sa
from sqlalchemy.orm import Session

from qmq_client.outbox.transaction.enlisted import enlisted_engine


def bind_on(
    session: Session, engine: sa.Engine, outbox: sa.Table
) -> sa.Engine | sa.Connection | None:
    """What the session begins on to write to this outbox; None where that is another database.

    What it has begun on already counts as well: chosen by one of its mappers, perhaps.
    """
    bind: sa.Engine | sa.Connection
    try:  # no `suppress`, which is Python: here most sends end
        bind = session.get_bind()
    except sa.exc.UnboundExecutionError:
        pass
    else:
        if bind.engine.pool is engine.pool:
            return bind
    # The second for those that name UPDATE and DELETE only, as the recipe of SQLAlchemy's pages does.
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
