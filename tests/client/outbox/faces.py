"""One text of a program for blocking and for asynchronous engines.

Programs are coroutines. On a blocking engine nothing in them ever waits, so `drive` runs one to its
end without a loop; on an asynchronous one they run in a task like any other.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from sqlalchemy.ext.asyncio import (
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
)
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from tests.client.world import World

R = TypeVar("R")


async def settled(value: Any) -> Any:
    """The value itself, or what it is when it has been awaited."""
    return await value if inspect.isawaitable(value) else value


def drive(coroutine: Coroutine[Any, Any, R]) -> R:
    """Run a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: R = end.value
        return result
    coroutine.close()
    raise AssertionError("it waited on a blocking engine")


@asynccontextmanager
async def within(manager: Any) -> AsyncIterator[Any]:
    """Enter a context manager of either kind."""
    if hasattr(manager, "__aenter__"):
        async with manager as entered:
            yield entered
        return
    with manager as entered:
        yield entered


def new_session(world: World, bind: Any = None, **options: Any) -> Any:
    """A session of the world's kind, on its engine unless a bind is given."""
    kind: Any = AsyncSession if world.is_async else Session
    return kind(bind=world.engine if bind is None else bind, **options)


def new_registry(world: World, scope: Any) -> Any:
    """What Flask-SQLAlchemy and its like build on: one session for each value of `scope()`."""
    if world.is_async:
        return async_scoped_session(async_sessionmaker(world.engine), scopefunc=scope)
    return scoped_session(sessionmaker(world.engine), scopefunc=scope)


def is_session(scope: Any) -> bool:
    """Whether this is a session, not a connection."""
    return isinstance(scope, Session | AsyncSession)


async def run_sync(scope: Any, function: Any) -> Any:
    """Call a function with the blocking twin of a session or connection."""
    if hasattr(scope, "run_sync"):
        return await scope.run_sync(function)
    return function(scope)
