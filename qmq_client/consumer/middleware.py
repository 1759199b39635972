"""Middleware: what goes around each call of a handler.

A middleware is a function from a `HandlerCall` to a context manager, most easily written with
`@contextmanager`: what stands before the `yield` runs before the handler, what stands behind it
afterwards. Those of `Consumers` are around those of the handler, and the first of a list is around
the others. They run where the handler runs (the same thread or task, inside the message's headers,
the open transaction of an inbox and the timeout), so that what they raise counts as raised by the
handler, and what they send joins its transaction. One that swallows the handler's error makes it
count as returned.

Asynchronous context managers go around asynchronous handlers only; plain ones around both.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qmq_client.consumer.delivery import Delivery
from qmq_client.errors import ConfigurationError
from qmq_client.wire.shown import shorten

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession
    from sqlalchemy.orm import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerCall:
    """The handler call that a middleware goes around."""

    subject: str
    group: str
    #: One delivery, or those of a batch.
    deliveries: tuple[Delivery, ...]
    #: The open session of the inbox; None without one.
    session: Session | AsyncSession | None


Middleware = Callable[[HandlerCall], AbstractContextManager[Any] | AbstractAsyncContextManager[Any]]


def as_middleware(middleware: object) -> tuple[Middleware, ...]:
    """One, or each of several, as a tuple; raises `ConfigurationError` for what is none."""
    if callable(middleware):
        return (middleware,)
    listed = tuple(middleware) if isinstance(middleware, Iterable) else (middleware,)
    for one in listed:
        if not callable(one):
            raise _refuse(one, "is not callable")
    return listed


def check_plain(middleware: Iterable[Middleware], name: str) -> None:
    """Raise `ConfigurationError` when one cannot go around the plain handler of this name."""
    for one in middleware:
        if inspect.isasyncgenfunction(inspect.unwrap(one)):
            raise _refuse(one, f"is asynchronous, the handler of {name} is not")


def plain_manager(middleware: Middleware, call: HandlerCall) -> AbstractContextManager[Any]:
    """What goes around this call of a plain handler; raises `ConfigurationError`."""
    manager = middleware(call)
    if isinstance(manager, AbstractContextManager):
        return manager
    name = f"{call.subject}/{call.group}"
    raise _refuse(middleware, f"gives no context manager for the plain handler of {name}")


def _refuse(middleware: object, value: str) -> ConfigurationError:
    shown = shorten(getattr(middleware, "__qualname__", middleware))
    return ConfigurationError(
        setting="middleware",
        value=f"{shown} {value}",
        remedy="Give functions from a HandlerCall to a context manager (@contextmanager; around "
        "an `async def` handler also @asynccontextmanager).",
    )
