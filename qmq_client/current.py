"""The current transaction of a thread or task, for code that does not pass it as an argument.

Set by `@transactional`, `transaction` and the inbox around the application's code; read by
`producer.send` and by `current_session()`. It is a context variable, so it follows the task, not
the thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

from qmq_client.errors import NoTransactionError

_scopes: Final[ContextVar[tuple[Any, ...]]] = ContextVar("qmq_scopes", default=())


@contextmanager
def as_current(scope: Any) -> Iterator[None]:
    """Make a session or connection the current one inside the block."""
    token = _scopes.set((*_scopes.get(), scope))
    try:
        yield
    finally:
        _scopes.reset(token)


def current_scopes() -> tuple[Any, ...]:
    """Sessions and connections around this code, the innermost last."""
    return _scopes.get()


def sync_of(scope: Any) -> Any:
    """The synchronous session or connection behind an asynchronous one, or the scope itself."""
    for name in ("sync_session", "sync_connection"):
        if (found := getattr(scope, name, None)) is not None:
            return found
    return scope


def current_session() -> Any:
    """The session of the innermost `@transactional` around this code; in `transaction`, the connection.

    A `Session`, or an `AsyncSession` inside an `async def`. Raises `NoTransactionError` outside.
    """
    scopes = _scopes.get()
    if not scopes:
        raise NoTransactionError(
            "current_session() outside of a transaction; call it inside @transactional or "
            "`with transaction(engine)`"
        )
    return scopes[-1]
