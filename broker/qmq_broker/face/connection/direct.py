"""The fast path of a request to a hot route: from the parser to the route and back, without ASGI.

POSTs of the usual form take it (`protocol.py` decides); all others go through ASGI and meet the
same routes with the same bounds. A longer body does not even pass through the parser
(`receive_buffer.py`). The exchange has the four attributes by which uvicorn's protocol knows the state of
a request, so that shutdown, pipelined requests and deadlines work unchanged. Belongs to the loop
thread.

A route that continues inside the very callback that brings what it waits for.

An asyncio task starts in the next iteration of the loop, and continues in the one after each event.
Every iteration is a system call and one more wait for the interpreter's lock, just while another
thread wants it for the next commit. A route of the fast path starts as soon as its head was read,
and continues as soon as its commit is reported; for everything else it waits as a task does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from starlette.types import Scope

from qmq_broker.face.answers import RequestRefusedError
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


T = TypeVar("T")


class Outcome(Generic[T]):
    """A one-time event for a route, which continues inside `set_result` or `set_exception`.

    Belongs to the loop thread, and is only for coroutines run by `SteppedCoroutine`. The code that sets it must be
    ready for everything that the route does next.
    """

    __slots__ = ("_error", "_is_done", "_result", "step")

    def __init__(self) -> None:
        self._is_done = False
        self._result: T
        self._error: Exception | None = None
        #: Called when the event is set, if somebody waits by then.
        self.step: Callable[[], None] | None = None

    def done(self) -> bool:
        """Whether it was set."""
        return self._is_done

    def set_result(self, result: T, /) -> None:
        """Continue with this result. Requires: it was not set."""
        self._result = result
        self._set()

    def set_exception(self, error: Exception, /) -> None:
        """Continue by raising this error. Requires: it was not set."""
        self._error = error
        self._set()

    def __await__(self) -> Generator[Outcome[T], None, T]:
        if not self._is_done:
            yield self
        if self._error is not None:
            raise self._error
        return self._result

    def _set(self) -> None:
        self._is_done = True
        if self.step is not None:
            self.step()


class SteppedCoroutine:
    """A coroutine in progress: `step` starts it, and `on_end` is called after its end.

    An error that it does not catch is reported to the loop, as for a task.
    """

    __slots__ = ("_coroutine", "_on_end")

    def __init__(self, coroutine: Coroutine[Any, None, None], on_end: Callable[[], None]) -> None:
        self._coroutine = coroutine
        self._on_end = on_end

    def step(self, _: object = None) -> None:
        """Run until it waits again or ends. Requires: what it waits for has come."""
        try:
            awaited = self._coroutine.send(None)
        except StopIteration:
            self._on_end()
        except (Exception, asyncio.CancelledError) as error:
            self._on_end()
            told = {"message": "a route failed", "exception": error}
            asyncio.get_running_loop().call_exception_handler(told)
        else:
            if isinstance(awaited, Outcome):
                awaited.step = self.step
            elif awaited is None:  # a bare yield, as in `asyncio.sleep(0)`
                asyncio.get_running_loop().call_soon(self.step)
            else:  # what a task does with a future
                awaited._asyncio_future_blocking = False
                awaited.add_done_callback(self.step)


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
        """Count what the body takes of memory; if there is no room for it, the route gets an error."""
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
