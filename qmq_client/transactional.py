"""Open a transaction around code that sends: `@transactional` for sessions, `transaction` for Core.

Both intend to write, so on SQLite they take the write lock at once instead of failing half-way.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import sqlalchemy as sa
from sqlalchemy.orm import Session

from qmq_client.current import as_current, current_scopes
from qmq_client.errors import ConfigurationError
from qmq_client.outbox.dialect import BEGIN_OPTION, BEGIN_TO_WRITE
from qmq_client.outbox.tracker import owning

P = ParamSpec("P")
R = TypeVar("R")

_TO_WRITE = {BEGIN_OPTION: BEGIN_TO_WRITE}


class SessionSource(Protocol):
    """Whatever opens the sessions; a `Producer` is one."""

    engine: sa.Engine
    session_factory: Any


def transactional(
    source: SessionSource, *, requires_new: bool = False
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Run a function, plain or `async`, in a transaction: commits at its return, else rolls back.

    Inside, `current_session()` is the session, and `producer.send(message)` needs none. Called
    inside another such function of the same engine it is a savepoint of that transaction, or with
    `requires_new` a transaction of its own (on SQLite two cannot write at once).
    """

    if not hasattr(source, "session_factory") or not hasattr(source, "engine"):
        raise ConfigurationError(
            setting="@transactional",
            value=f"{type(source).__name__} in place of a producer",
            remedy="Write `@transactional(producer)` above the function.",
        )

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        if inspect.iscoroutinefunction(function):
            return cast(Callable[P, R], _around_async(function, source, requires_new))
        return _around(function, source, requires_new)

    return decorate


@contextmanager
def transaction(engine: sa.Engine) -> Iterator[sa.Connection]:
    """A transaction on a connection of its own, for Core: `send(message, session=connection)`.

    Commits at the end of the block, rolls back when it raises. Core tells nobody when a commit is
    done; this does, so that messages go out at once.
    """
    with engine.connect() as connection:
        connection.execution_options(**_TO_WRITE)
        with as_current(connection), owning(connection):
            yield connection


def _around(function: Callable[P, R], source: SessionSource, requires_new: bool) -> Callable[P, R]:
    @functools.wraps(function)
    def in_transaction(*args: P.args, **kwargs: P.kwargs) -> R:
        outer = None if requires_new else _outer(source)
        if outer is not None:
            with outer.begin_nested():
                return function(*args, **kwargs)
        with source.session_factory() as session:
            if not isinstance(session, Session):
                raise _refuse(function, "async def")
            with session.begin(), as_current(session):
                session.connection(execution_options=_TO_WRITE)
                return function(*args, **kwargs)

    return in_transaction


def _around_async(
    function: Callable[P, Awaitable[Any]], source: SessionSource, requires_new: bool
) -> Callable[P, Awaitable[Any]]:
    @functools.wraps(function)
    async def in_transaction(*args: P.args, **kwargs: P.kwargs) -> Any:
        outer = None if requires_new else _outer(source)
        if outer is not None:
            async with outer.begin_nested():
                await outer.connection()
                return await function(*args, **kwargs)
        if not hasattr(made := source.session_factory(), "sync_session"):
            raise _refuse(function, "def")
        async with made as session, session.begin():
            with as_current(session):
                await session.connection(execution_options=_TO_WRITE)
                return await function(*args, **kwargs)

    return in_transaction


def _outer(source: SessionSource) -> Any:
    """The current session, or connection, when it is on the engine of `source`."""
    for scope in reversed(current_scopes()):
        sync = getattr(scope, "sync_session", scope)
        if sync.in_transaction() and _engine_of(sync).pool is source.engine.pool:
            return scope
    return None


def _engine_of(scope: Any) -> sa.Engine:
    bind = scope if isinstance(scope, sa.Connection) else scope.get_bind()
    engine: sa.Engine = bind.engine
    return engine


def _refuse(function: Callable[..., Any], wanted: str) -> ConfigurationError:
    return ConfigurationError(
        setting=f"@transactional on {function.__qualname__}",
        value="its producer's sessions are not of the function's kind",
        remedy=f"Make it `{wanted}`, or make the producer with the other kind of engine.",
    )
