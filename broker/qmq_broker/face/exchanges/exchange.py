"""One request and its answer, as a hot route sees them, whichever way they came.

`AsgiExchange` goes through the server's ASGI interface; `connection/direct.py` is the fast path, for
requests of the usual form on our own connections. What a route does is the same on both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any, Protocol, TypeVar

from starlette.types import Message, Receive, Scope, Send

from qmq_broker.face.exchanges.requests import (
    BodyShare,
    ClientGone,
    Encoding,
    answer,
    read_body,
)

T = TypeVar("T")
Headers = tuple[tuple[bytes, bytes], ...]


class Outcome(Protocol[T]):
    """What will be known later; of an asyncio future, what a route needs."""

    def done(self) -> bool:
        """Whether it is known."""
        ...

    def set_result(self, result: T, /) -> None:
        """It is this."""
        ...

    def set_exception(self, error: Exception, /) -> None:
        """It is this failure."""
        ...

    def __await__(self) -> Generator[Any, None, T]: ...


def make_known(outcome: Outcome[T], known: T | Exception) -> None:
    """Let the route that waits continue, if it still does."""
    if outcome.done():  # the client went away meanwhile
        return
    if isinstance(known, Exception):
        outcome.set_exception(known)
    else:
        outcome.set_result(known)


class Exchange(Protocol):
    """One request and its answer."""

    #: The request's head, as ASGI has it.
    scope: Scope

    @property
    def is_answering(self) -> bool:
        """Whether an answer has begun: a second one cannot be sent."""
        ...

    async def body(self, body_bytes_max: int, share: BodyShare | None = None) -> bytes:
        """The whole body, once; raises `RequestRefusedError` over a bound and `ClientGone`.

        Requires: `check_head` accepted the head with this bound.
        """
        ...

    def outcome(self) -> Outcome[Any]:
        """Something to wait for, once; set in the loop thread by code that is ready for all that follows."""
        ...

    async def wait(self, woken: asyncio.Future[None], until_s: float) -> None:
        """Wait for `woken`, until it is `until_s` by the loop; raises `ClientGone`.

        Requires: the body was read.
        """
        ...

    async def answer(
        self, status: int, encoding: Encoding, body: bytes, headers: Headers = ()
    ) -> None:
        """Send a whole answer; returns when most of it has left this process."""
        ...


class AsgiExchange:
    """An exchange by the three parts of an ASGI call."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.is_answering = False
        self._receive = receive
        self._send = send

    async def body(self, body_bytes_max: int, share: BodyShare | None = None) -> bytes:
        """See `Exchange`."""
        return await read_body(self._receive, body_bytes_max, share)

    def outcome(self) -> asyncio.Future[Any]:
        """See `Exchange`."""
        return asyncio.get_running_loop().create_future()

    async def wait(self, woken: asyncio.Future[None], until_s: float) -> None:
        """See `Exchange`."""
        gone = asyncio.ensure_future(self._gone())
        left_s = max(0.0, until_s - asyncio.get_running_loop().time())
        try:
            await asyncio.wait((woken, gone), timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                raise ClientGone
        finally:
            gone.cancel()

    async def answer(
        self, status: int, encoding: Encoding, body: bytes, headers: Headers = ()
    ) -> None:
        """See `Exchange`."""
        await answer(self.send, status, encoding, body, headers)

    async def send(self, message: Message) -> None:
        """ASGI's own way to answer."""
        self.is_answering = True
        await self._send(message)

    async def _gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass


class KeptAnswer:
    """What an ASGI application answers, kept until it has returned. Not for streams."""

    def __init__(self) -> None:
        #: Status and headers.
        self.start: Message = {}
        self.body = b""

    async def send(self, message: Message) -> None:
        """For the application."""
        if message["type"] == "http.response.start":
            self.start = message
        else:
            self.body += message.get("body", b"")
