"""One call of a handler: its arguments, the middleware around it, and its time.

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

import asyncio
import inspect
from collections.abc import Callable, Iterable
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    ExitStack,
)
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from qmq_client.consumer.async_calls import AsyncCalls
from qmq_client.consumer.delivery import Delivery, Grip, Received
from qmq_client.consumer.parameters import Part
from qmq_client.errors import ConfigurationError, HandlerTimeoutError
from qmq_client.message import Message
from qmq_client.request_headers import handling
from qmq_client.wire.names import shorten
from qmq_client.wire.record import Record

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession
    from sqlalchemy.orm import Session

    from qmq_client.consumer.handler import Handler


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerCall:
    """What a middleware is told of the call that it goes around."""

    subject: str
    group: str
    #: One, or a batch.
    deliveries: tuple[Delivery, ...]
    #: The open session of the inbox; None without one.
    session: Session | AsyncSession | None


Middleware = Callable[[HandlerCall], AbstractContextManager[Any] | AbstractAsyncContextManager[Any]]


@dataclass(frozen=True, slots=True)
class Decoded:
    """A message that could be read."""

    received: Received
    record: Record
    body: Any
    #: Only where handler or middleware ask for it.
    message: Message | None


def as_middleware(middleware: object) -> tuple[Middleware, ...]:
    """One, or each of several, as a tuple; raises `ConfigurationError` for what is none."""
    if callable(middleware):
        return (middleware,)
    listed = tuple(middleware) if isinstance(middleware, Iterable) else (middleware,)
    for one in listed:
        if not callable(one):
            raise _refuse(one, "is not callable")
    return listed


def check_middleware(handler: Handler) -> Handler:
    """The handler; raises `ConfigurationError` when it is plain and something around it is not."""
    for one in () if handler.is_async else handler.middleware:
        if inspect.isasyncgenfunction(inspect.unwrap(one)):
            raise _refuse(one, f"is asynchronous, the handler of {handler.options.name} is not")
    return handler


class Calls:
    """Calls one handler. Thread safe."""

    def __init__(self, handler: Handler, grip: Grip, async_calls: AsyncCalls) -> None:
        self._handler = handler
        self._grip = grip
        self._async_calls = async_calls
        self._is_batch = handler.options.batch_size > 1
        parts = handler.parameters.parts
        #: Whether messages have to be made of records.
        self.takes_message = bool({Part.MESSAGE, Part.DELIVERY} & parts or handler.middleware)

    def run(self, decoded: list[Decoded], session: Session | None) -> None:
        """Call the handler, on this thread or on the loop; returns or raises what it does."""
        if self._handler.is_async:
            with handling([dict(one.record.headers) for one in decoded]):
                self._async_calls.call(self._inside(decoded, session))
            return
        with handling([dict(one.record.headers) for one in decoded]):
            call = self._prepared(decoded, session)
            if not self._handler.middleware:
                call()
                return
            around = self._handler_call(decoded, session)
            with ExitStack() as stack:
                for middleware in self._handler.middleware:
                    stack.enter_context(self._plain(middleware, around))
                call()

    async def run_on_loop(self, decoded: list[Decoded], session: AsyncSession) -> None:
        """Call an asynchronous handler from a task of its loop."""
        with handling([dict(one.record.headers) for one in decoded]):
            await self._inside(decoded, session)

    async def _inside(self, decoded: list[Decoded], session: Session | AsyncSession | None) -> None:
        timeout_ms = self._handler.options.timeout_ms
        if not timeout_ms:
            await self._awaited(decoded, session)
            return
        try:
            async with asyncio.timeout(timeout_ms / 1000) as deadline:
                await self._awaited(decoded, session)
        except TimeoutError as error:
            if not deadline.expired():  # the handler's own
                raise
            raise HandlerTimeoutError(timeout_ms) from error

    async def _awaited(
        self, decoded: list[Decoded], session: Session | AsyncSession | None
    ) -> None:
        call = self._prepared(decoded, session)
        if not self._handler.middleware:
            await call()
            return
        around = self._handler_call(decoded, session)
        async with AsyncExitStack() as stack:
            for middleware in self._handler.middleware:
                manager = middleware(around)
                if isinstance(manager, AbstractAsyncContextManager):
                    await stack.enter_async_context(manager)
                else:
                    stack.enter_context(manager)
            await call()

    def _plain(self, middleware: Middleware, around: HandlerCall) -> AbstractContextManager[Any]:
        manager = middleware(around)
        if isinstance(manager, AbstractContextManager):
            return manager
        value = f"gives no context manager for the plain handler of {self._handler.options.name}"
        raise _refuse(middleware, value)

    def _handler_call(
        self, decoded: list[Decoded], session: Session | AsyncSession | None
    ) -> HandlerCall:
        options = self._handler.options
        return HandlerCall(
            subject=options.subject,
            group=options.group,
            deliveries=tuple(self._deliveries(decoded)),
            session=session,
        )

    def _prepared(
        self, decoded: list[Decoded], session: Session | AsyncSession | None
    ) -> Callable[[], Any]:
        parameters = self._handler.parameters
        values = [self._argument(part, decoded, session) for part in parameters.positional]
        named = {name: self._argument(part, decoded, session) for name, part in parameters.keywords}
        return partial(self._handler.function, *values, **named)

    def _argument(
        self, part: Part, decoded: list[Decoded], session: Session | AsyncSession | None
    ) -> object:
        if part is Part.SESSION:
            return session
        values: list[Any]
        if part is Part.BODY:
            values = [one.body for one in decoded]
        elif part is Part.MESSAGE:
            values = [one.message for one in decoded]
        else:
            values = self._deliveries(decoded)
        return values if self._is_batch else values[0]

    def _deliveries(self, decoded: list[Decoded]) -> list[Delivery]:
        return [Delivery(one.received, one.message, self._grip) for one in decoded if one.message]


def _refuse(middleware: object, value: str) -> ConfigurationError:
    shown = shorten(getattr(middleware, "__qualname__", middleware))
    return ConfigurationError(
        setting="middleware",
        value=f"{shown} {value}",
        remedy="Give functions from a HandlerCall to a context manager (@contextmanager; around "
        "an `async def` handler also @asynccontextmanager).",
    )
