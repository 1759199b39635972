"""The short way of a request to a hot route: from the parser to the route and back, without ASGI.

POSTs of the usual form take it (`protocol.py` decides); all others go through ASGI and meet the
same routes with the same bounds. A longer body does not even pass through the parser
(`landing.py`). The exchange has the four attributes by which uvicorn's protocol knows the state of
a request, so that shutdown, pipelined requests and deadlines work unchanged. Belongs to the loop
thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from starlette.types import Scope

from qmq_broker.face.answers import RequestRefusedError
from qmq_broker.face.connection.driven import Outcome
from qmq_broker.face.exchanges.arriving import ArrivingBody
from qmq_broker.face.exchanges.exchange import Headers
from qmq_broker.face.exchanges.requests import (
    PIECE_BYTES,
    BodyShare,
    ClientGone,
    Encoding,
    in_pieces,
)

if TYPE_CHECKING:
    from uvicorn.protocols.http.flow_control import FlowControl

#: An answer up to this length is sent in one piece with its head; a longer body is not copied for
#: that.
_ONE_PIECE_BYTES_MAX: Final = 64 * 1024
#: In place of `PIECE_BYTES` without TLS, where a connection tells at once that it holds much: what a usual
#: pull brings is one write.
_PLAIN_PIECE_BYTES: Final = 2 * 1024 * 1024


class DirectExchange:
    """An exchange on one connection."""

    __slots__ = (
        "_arriving",
        "_flow",
        "_is_hurried",
        "_is_lost",
        "_on_end",
        "_refusal",
        "_share",
        "_transport",
        "_waiter",
        "is_whole",
        "keep_alive",
        "response_complete",
        "response_started",
        "scope",
    )

    def __init__(
        self,
        scope: Scope,
        transport: asyncio.Transport,
        flow: FlowControl,
        *,
        keep_alive: bool,
        on_end: Callable[[], None],
    ) -> None:
        """`on_end` is called when the answer is complete and the connection can go on."""
        self.scope = scope
        self.keep_alive = keep_alive
        self.response_started = self.response_complete = False
        self._transport = transport
        self._flow = flow
        self._on_end = on_end
        self._arriving = ArrivingBody()
        #: Whether the whole body has arrived.
        self.is_whole = False
        self._is_lost = False
        self._is_hurried = False
        self._refusal: RequestRefusedError | None = None
        self._share: BodyShare | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_answering(self) -> bool:
        """See `Exchange`."""
        return self.response_started

    @property
    def arrived_bytes(self) -> int:
        """How much of the body has arrived."""
        return self._arriving.arrived_bytes

    def room(self, missing_bytes: int) -> memoryview:
        """Memory for receiving more of the body."""
        room = self._arriving.room(missing_bytes)
        self._count()
        return room

    def fill(self, count: int) -> None:
        """This many bytes were received into `room`."""
        self._arriving.fill(count)

    def receive(self, part: bytes) -> None:
        """A part of the body has arrived."""
        self._arriving.add(part)
        self._count()

    def receive_end(self) -> None:
        """The body is whole."""
        self.is_whole = True
        self._wake()

    def lose(self) -> None:
        """The connection is lost."""
        self._is_lost = True
        # Not left to the collector: since Python 3.13 memory that dies with a view of it complains aloud.
        self._arriving.drop()
        self._wake()

    def hurry(self) -> None:
        """The client sends no more, and may have ended: it gets its answer, but nothing waits for it."""
        self._is_hurried = True
        if self.is_whole:
            self._wake()

    def end(self) -> None:
        """The route has returned: nobody wants the body; a client without a whole answer must not wait."""
        self._arriving.drop()
        if not self.response_complete:
            self._transport.close()

    async def body(self, body_bytes_max: int, share: BodyShare | None = None) -> bytes:
        """See `Exchange`. The bound holds: the parser limits the body to the length in the head."""
        self._share = share
        try:
            self._count()
            while not (self._is_lost or self.is_whole or self._refusal):
                await self._change()
        finally:
            self._share = None
        if self._is_lost:
            raise ClientGone
        if self._refusal is not None:
            raise self._refusal
        body = self._arriving.take()
        self._arriving.drop()
        return body

    def outcome(self) -> Outcome[Any]:
        """See `Exchange`."""
        return Outcome()

    async def wait(self, woken: asyncio.Future[None], until_s: float) -> None:
        """See `Exchange`. The waiting ends by itself at its time, or with the connection."""
        if not (self._is_lost or self._is_hurried):
            timer = asyncio.get_running_loop().call_at(until_s, self._wake)
            self._waiter = woken
            try:
                await woken
            finally:
                timer.cancel()
                self._waiter = None
        if self._is_lost:
            raise ClientGone

    async def answer(
        self, status: int, encoding: Encoding, body: bytes, headers: Headers = ()
    ) -> None:
        """See `Exchange`."""
        if self._flow.write_paused and not self._is_lost:
            await self._flow.drain()
        if self._is_lost:
            return
        self.response_started = True
        content = ((b"content-type", encoding.value), *headers)
        head = answer_head(status, len(body), content, keep_alive=self.keep_alive)
        if len(body) <= _ONE_PIECE_BYTES_MAX:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            await self._write_long(body)
        if self._is_lost:
            return
        self.response_complete = True
        self._arriving.drop()
        if not self.keep_alive:
            self._transport.close()
        self._on_end()

    async def _write_long(self, body: bytes) -> None:
        """Write a body until it has left this process, or the connection is lost."""
        is_plain = self._transport.get_extra_info("sslcontext") is None
        for piece in in_pieces(body, _PLAIN_PIECE_BYTES if is_plain else PIECE_BYTES):
            self._transport.write(piece)
            if self._flow.write_paused:
                await self._flow.drain()
            if self._is_lost:
                return

    def _count(self) -> None:
        """Count what the body takes of memory; if there is no room for it, the route is told."""
        if self._share is None:
            return
        try:
            self._share.take(self._arriving.taken_bytes - self._share.taken_bytes)
        except RequestRefusedError as refusal:
            self._refusal = refusal
            self._arriving.drop()
            self._wake()

    async def _change(self) -> None:
        """Wait until one of the above was called."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def answer_head(status: int, body_bytes: int, headers: Headers, *, keep_alive: bool) -> bytes:
    """The head of an answer whose length is known."""
    lines = [_STATUS_LINES[status], b"content-length: %d" % body_bytes]
    lines += [b"%b: %b" % header for header in headers]
    if not keep_alive:
        lines.append(b"connection: close")
    return b"\r\n".join((*lines, b"", b""))


_STATUS_LINES: Final = {
    int(status): f"HTTP/1.1 {int(status)} {status.phrase}".encode() for status in HTTPStatus
}
