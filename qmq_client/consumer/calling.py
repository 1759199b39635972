"""One call of a handler: its arguments, the middleware around it, and its time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from qmq_client.consumer.async_calls import AsyncCalls
from qmq_client.consumer.delivery import Delivery, Grip, Received
from qmq_client.consumer.forked import keep_in_process
from qmq_client.consumer.handler import Handler
from qmq_client.consumer.middleware import HandlerCall, plain_manager
from qmq_client.consumer.parameters import Part
from qmq_client.errors import ConfigurationError, HandlerTimeoutError
from qmq_client.message import Message
from qmq_client.request_headers import handling
from qmq_client.wire.record import Record

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession
    from sqlalchemy.orm import Session


#: What a handler may return whose work is not done yet.
_UNDONE: Final = (Awaitable, Generator, AsyncGenerator, Future)


class Decoded(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A message that could be read."""

    received: Received
    record: Record
    body: Any
    #: Only where handler or middleware ask for it.
    message: Message | None


class Calls:
    """Calls one handler. Thread safe."""

    def __init__(self, handler: Handler, grip: Grip, async_calls: AsyncCalls) -> None:
        self.handler = handler
        self.async_calls = async_calls
        self._grip = grip
        self._function = keep_in_process(handler.function, is_async=handler.is_async)
        self._is_batch = handler.options.batch_size > 1
        parts = handler.parameters.parts
        #: Whether messages have to be made of records.
        self.takes_message = bool({Part.MESSAGE, Part.DELIVERY} & parts or handler.middleware)

    def run(self, decoded: list[Decoded], session: Session | None) -> None:
        """Call the handler, on this thread or on the loop; returns or raises what it does."""
        _note_begun(decoded)
        with handling([dict(one.record.headers) for one in decoded]):
            if self.handler.is_async:
                self.async_calls.call(self._inside(decoded, session))
                return
            call = self._prepared(decoded, session)
            if not self.handler.middleware:
                self._check_ran(call())
                return
            around = self._handler_call(decoded, session)
            with ExitStack() as stack:
                for middleware in self.handler.middleware:
                    stack.enter_context(plain_manager(middleware, around))
                self._check_ran(call())

    async def run_on_loop(self, decoded: list[Decoded], session: AsyncSession) -> None:
        """Call an asynchronous handler from a task of its loop."""
        _note_begun(decoded)
        with handling([dict(one.record.headers) for one in decoded]):
            await self._inside(decoded, session)

    async def _inside(self, decoded: list[Decoded], session: Session | AsyncSession | None) -> None:
        timeout_ms = self.handler.options.timeout_ms
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
        if not self.handler.middleware:
            self._check_ran(await call())
            return
        around = self._handler_call(decoded, session)
        async with AsyncExitStack() as stack:
            for middleware in self.handler.middleware:
                manager = middleware(around)
                if isinstance(manager, AbstractAsyncContextManager):
                    await stack.enter_async_context(manager)
                else:
                    stack.enter_context(manager)
            self._check_ran(await call())

    def _check_ran(self, returned: object) -> None:
        """Raise for what somebody still had to await or go through: its message must not be acked."""
        if returned is None or not isinstance(returned, _UNDONE):
            return
        if isinstance(returned, Coroutine | Generator):
            returned.close()
        raise ConfigurationError(
            setting=f"handler of {self.handler.options.name}",
            value=f"returned a {type(returned).__name__}, which is not awaited",
            remedy="Make the decorated function itself `async def`, and await inside.",
        )

    def _handler_call(
        self, decoded: list[Decoded], session: Session | AsyncSession | None
    ) -> HandlerCall:
        options = self.handler.options
        return HandlerCall(
            subject=options.subject,
            group=options.group,
            deliveries=tuple(self._deliveries(decoded)),
            session=session,
        )

    def _prepared(
        self, decoded: list[Decoded], session: Session | AsyncSession | None
    ) -> Callable[[], Any]:
        parameters = self.handler.parameters
        values = [self._argument(part, decoded, session) for part in parameters.positional]
        named = {name: self._argument(part, decoded, session) for name, part in parameters.keywords}
        return partial(self._function, *values, **named)

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


def _note_begun(decoded: list[Decoded]) -> None:
    for one in decoded:
        one.received.is_begun = True
