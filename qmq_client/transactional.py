"""`@transactional` and `transaction`: open a transaction around code that sends, for sessions and for Core.

Both are for writing, so on SQLite they first take or await the write lock, instead of failing at a
later statement after a read.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    suppress,
)
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, cast, overload

import sqlalchemy as sa
from sqlalchemy.orm import Session

from qmq_client.current import as_current, current_scopes, sync_of
from qmq_client.errors import ConfigurationError
from qmq_client.outbox.database.autocommit import begin_to_write
from qmq_client.outbox.sending.notes import begun_connections
from qmq_client.outbox.sending.own_transaction import async_transaction, sync_transaction
from qmq_client.wire.shown import shorten

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

P = ParamSpec("P")
R = TypeVar("R")


class SessionSource(Protocol):
    """An object that opens sessions, such as a `Producer`."""

    engine: sa.Engine
    session_factory: Any


def transactional(
    source: SessionSource, *, requires_new: bool = False
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Run a function, plain or `async`, in a transaction: commit when it returns, otherwise roll back.

    Inside, `current_session()` is the session, and `producer.send(message)` needs no `session`. Called
    inside another such function on the same engine, it runs in a savepoint of that transaction, or,
    with `requires_new`, in a separate transaction (not on SQLite, where two cannot write at once).
    """

    if not hasattr(source, "session_factory") or not hasattr(source, "engine"):
        raise ConfigurationError(
            setting="@transactional",
            value=f"{type(source).__name__} in place of a producer",
            remedy="Write `@transactional(producer)` above the function.",
        )

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        if not callable(function):
            raise ConfigurationError(
                setting="@transactional",
                value=f"above {shorten(function)}",
                remedy="Write it above a function.",
            )
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise ConfigurationError(
                setting=f"@transactional on {function.__qualname__}",
                value="it has a yield, so its code would run after the commit",
                remedy="Decorate the function that uses it, or write `with session.begin()` inside.",
            )
        if inspect.iscoroutinefunction(function):
            return cast(Callable[P, R], _around_async(function, source, requires_new))
        return _around(function, source, requires_new)

    return decorate


@overload
def transaction(engine: sa.Engine) -> AbstractContextManager[sa.Connection]: ...
@overload
def transaction(engine: AsyncEngine) -> AbstractAsyncContextManager[AsyncConnection]: ...
def transaction(engine: Any) -> Any:
    """A transaction on a separate connection, for Core: `send(message, session=connection)`.

    Commits at the end of the block, rolls back when it raises. With an `AsyncEngine` write
    `async with`.
    """
    if isinstance(engine, sa.Engine):
        return sync_transaction(engine)
    if not hasattr(engine, "sync_engine"):
        raise ConfigurationError(
            setting="transaction(engine)",
            value=type(engine).__name__,
            remedy="Give the engine itself.",
        )
    return async_transaction(engine.sync_engine)


def _around(function: Callable[P, R], source: SessionSource, requires_new: bool) -> Callable[P, R]:
    @functools.wraps(function)
    def in_transaction(*args: P.args, **kwargs: P.kwargs) -> R:
        outer = _outer(source, requires_new)
        if outer is not None:
            if not isinstance(outer, Session | sa.Connection):
                raise _refuse(function, "async def")
            with outer.begin_nested():
                return function(*args, **kwargs)
        session = source.session_factory()
        if not isinstance(session, Session):
            raise _refuse(function, "async def")
        with session, session.begin(), as_current(session):
            begin_to_write(_connection(session, source.engine))
            return function(*args, **kwargs)

    return in_transaction


def _around_async(
    function: Callable[P, Awaitable[Any]], source: SessionSource, requires_new: bool
) -> Callable[P, Awaitable[Any]]:
    @functools.wraps(function)
    async def in_transaction(*args: P.args, **kwargs: P.kwargs) -> Any:
        outer = _outer(source, requires_new)
        if outer is not None:
            async with outer.begin_nested():
                return await function(*args, **kwargs)
        if not hasattr(made := source.session_factory(), "sync_session"):
            raise _refuse(function, "def")
        async with made as session, session.begin():
            with as_current(session):
                await session.run_sync(
                    lambda begun: begin_to_write(_connection(begun, source.engine))
                )
                return await function(*args, **kwargs)

    return in_transaction


def _outer(source: SessionSource, requires_new: bool) -> Any:
    """The session or connection to nest in: the current one on the engine of `source`."""
    for scope in reversed(current_scopes()):
        sync = sync_of(scope)
        if not sync.in_transaction() or not _is_on(sync, source.engine):
            continue
        if not requires_new:
            return scope
        if source.engine.dialect.name == "sqlite":
            raise ConfigurationError(
                setting="@transactional(requires_new=True)",
                value="inside another transaction on the same SQLite database",
                remedy="SQLite has one writer at a time, and the outer one would wait for itself. "
                "Leave requires_new out, or call it after the outer transaction.",
            )
    return None


def _is_on(scope: Any, engine: sa.Engine) -> bool:
    """Whether this session or connection is on the same database, by its bind or by its open transactions."""
    if isinstance(scope, sa.Connection):
        return scope.engine.pool is engine.pool
    with suppress(sa.exc.UnboundExecutionError):
        if scope.get_bind().engine.pool is engine.pool:
            return True
    return any(each.engine.pool is engine.pool for each in begun_connections(scope))


def _connection(session: Session, engine: sa.Engine) -> sa.Connection:
    """Begin on the session's own bind, or on this engine if the session has several binds."""
    try:
        session.get_bind()
    except sa.exc.UnboundExecutionError:
        return session.connection(bind_arguments={"bind": engine})
    return session.connection()


def _refuse(function: Callable[..., Any], wanted: str) -> ConfigurationError:
    return ConfigurationError(
        setting=f"@transactional on {function.__qualname__}",
        value="its producer's sessions are of the other kind (sync or async)",
        remedy=f"Make it `{wanted}`, or make the producer with the other kind of engine.",
    )
