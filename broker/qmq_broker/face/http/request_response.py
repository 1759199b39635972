"""One HTTP request and its answer on a connection, and the coroutine that serves it.

An asyncio task starts in the next iteration of the loop, and continues in the iteration after each
event. Every iteration costs a system call and one more wait for the interpreter's lock, while
another thread wants the lock for the next commit. So a route is not a task: it starts as soon as
its head is read, and continues inside the callback that reports its commit; for all other events it
waits like a task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from starlette.types import Scope

from qmq_broker.face.answers import RequestRefusedError
from qmq_broker.face.http.receive_buffer import ReceiveBuffer
from qmq_broker.face.http.requests import BodyShare, ClientGone, Encoding, in_pieces, too_long

if TYPE_CHECKING:
    from uvicorn.protocols.http.flow_control import FlowControl


T = TypeVar("T")
Headers = tuple[tuple[bytes, bytes], ...]


class Outcome(Generic[T]):
    """A one-time event for a route, which continues inside `set_result` or `set_exception`.

    Belongs to the loop thread, and is only for coroutines run by `SteppedCoroutine`. The code that
    sets it must allow for everything that the route does next.
    """

    __slots__ = ("_error", "_is_done", "_result", "step")

    def __init__(self) -> None:
        self._is_done = False
        self._result: T
        self._error: Exception | None = None
        #: Called when the event is set, if a task waits by then.
        self.step: Callable[[], None] | None = None

    def done(self) -> bool:
        """Whether the event was set."""
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


def make_known(outcome: Outcome[T] | asyncio.Future[T], known: T | Exception) -> None:
    """Let the waiting route continue, if it still waits."""
    if outcome.done():  # the client disconnected meanwhile
        return
    if isinstance(known, Exception):
        outcome.set_exception(known)
    else:
        outcome.set_result(known)


class SteppedCoroutine:
    """A coroutine in progress: `step` starts it, and `on_end` is called after its end.

    Until then it is one of `under_way`. An error that it does not catch is reported to the loop, as for a task.
    """

    __slots__ = ("_coroutine", "_on_end", "_under_way")

    def __init__(
        self,
        coroutine: Coroutine[Any, None, None],
        on_end: Callable[[], None],
        under_way: set[SteppedCoroutine],
    ) -> None:
        self._coroutine = coroutine
        self._on_end = on_end
        self._under_way = under_way
        under_way.add(self)

    def step(self, _: object = None) -> None:
        """Run until it waits again or ends. Requires: the awaited event has occurred."""
        try:
            awaited = self._coroutine.send(None)
        except StopIteration:
            self._end()
        except (Exception, asyncio.CancelledError) as error:
            self._end()
            details = {"message": "a route failed", "exception": error}
            asyncio.get_running_loop().call_exception_handler(details)
        else:
            if isinstance(awaited, Outcome):
                awaited.step = self.step
            elif awaited is None:  # a bare yield, as in `asyncio.sleep(0)`
                asyncio.get_running_loop().call_soon(self.step)
            else:  # like a task with a future
                awaited._asyncio_future_blocking = False
                awaited.add_done_callback(self.step)

    def _end(self) -> None:
        self._under_way.discard(self)
        self._on_end()

    def cancel(self, msg: object = None) -> None:
        """Does nothing: for a server that cancels tasks; a coroutine ends with the process."""


#: An answer up to this length is sent in one piece with its head; a longer body is not copied for
#: that.
_ONE_PIECE_BYTES_MAX: Final = 64 * 1024
#: Length of one write without TLS, where a connection reports at once that its buffer is full: the
#: answer of a usual pull is one write.
_PLAIN_PIECE_BYTES: Final = 2 * 1024 * 1024
#: Length of one write through TLS, where a connection accepts any length in one write and makes
#: only the next one wait. A slow client may take `unread_ms` for each write.
PIECE_BYTES: Final = 256 * 1024
#: Bytes of a body that are kept for a route that has not asked for it; then reading pauses.
_UNASKED_BYTES: Final = 64 * 1024
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


class RequestResponse:
    """A request and its answer on one connection. Owned by the loop thread."""

    __slots__ = (
        "_buffer",
        "_bytes_max",
        "_expects_continue",
        "_flow",
        "_is_asked_for",
        "_is_hurried",
        "_is_lost",
        "_on_end",
        "_refusal",
        "_share",
        "_transport",
        "_waiter",
        "_wanted_bytes",
        "body_bytes",
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
        body_bytes: int | None = None,
        expects_continue: bool = False,
    ) -> None:
        """`body_bytes`: the length of the body according to the head. `on_end` is called when the
        answer is complete.
        """
        self.scope = scope
        self.keep_alive = keep_alive
        self.body_bytes = body_bytes
        self.response_started = self.response_complete = False
        #: Whether the whole body has arrived.
        self.is_whole = False
        self._transport = transport
        self._flow = flow
        self._on_end = on_end
        self._expects_continue = expects_continue
        self._buffer = ReceiveBuffer()
        self._is_asked_for = False
        self._is_lost = False
        self._is_hurried = False
        self._refusal: RequestRefusedError | None = None
        self._share: BodyShare | None = None
        #: Longer bodies are refused.
        self._bytes_max: int | None = None
        #: A waiting route is woken when this many bytes have arrived.
        self._wanted_bytes: int | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def arrived_bytes(self) -> int:
        """How much of the body has arrived."""
        return self._buffer.arrived_bytes

    @property
    def missing_bytes(self) -> int:
        """How many bytes of the body are missing; 0 if that is unknown."""
        if self.is_whole or self.body_bytes is None:
            return 0
        return self.body_bytes - self._buffer.arrived_bytes

    @property
    def is_waiting_to_be_read(self) -> bool:
        """Whether enough has arrived for a route that has not asked for it yet."""
        if self._is_asked_for or self._buffer.is_dropped:
            return False
        return self._buffer.arrived_bytes > _UNASKED_BYTES

    def room(self) -> memoryview:
        """Memory for receiving more of the body. Requires: `missing_bytes` is not 0."""
        room = self._buffer.room(self.missing_bytes)
        self._count()
        return room

    def fill(self, count: int) -> None:
        """This many bytes were received into `room`."""
        self._buffer.fill(count)
        self._count()

    def receive(self, part: bytes) -> None:
        """A part of the body has arrived."""
        self._buffer.add(part)
        self._count()

    def receive_end(self) -> None:
        """The body is complete."""
        self.is_whole = True
        self._wake()

    def lose(self) -> None:
        """The connection is lost."""
        self._is_lost = True
        # Not left to the garbage collector: since Python 3.13 memory that is freed while a view of
        # it exists prints a warning.
        self._buffer.drop()
        self._wake()

    def hurry(self) -> None:
        """The client has finished sending, and may have exited: it gets its answer, but no further
        waits happen for it.
        """
        self._is_hurried = True
        if self.is_whole:
            self._wake()

    def end(self) -> None:
        """The route has returned: discard the rest of the body; close the connection if the answer is incomplete."""
        self._buffer.drop()
        if not self.response_complete:
            self._transport.close()

    async def body(self, body_bytes_max: int, share: BodyShare | None = None) -> bytes:
        """The whole body, once; raises `RequestRefusedError` over a bound and `ClientGone`."""
        self._share, self._bytes_max = share, body_bytes_max
        self._ask()
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
        body = self._buffer.take()
        self._buffer.drop()
        return body

    async def beginning(self, wanted_bytes: int) -> bytes:
        """The whole body if it is short, otherwise the received part, at least this much. Raises `ClientGone`."""
        self._wanted_bytes = wanted_bytes
        self._ask()
        while not (self._is_lost or self.is_whole or self.arrived_bytes >= wanted_bytes):
            await self._change()
        if self._is_lost:
            raise ClientGone
        return self._buffer.take()

    async def wait(self, woken: asyncio.Future[None], until_s: float) -> None:
        """Wait for `woken` until the loop time `until_s`; raises `ClientGone`.

        Requires: the body was read.
        """
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
        """Send a whole answer; see `respond`."""
        await self.respond(status, body, ((b"content-type", encoding.value), *headers))

    async def respond(self, status: int, body: bytes, headers: Headers) -> None:
        """Send a whole answer; returns when most of it has left this process, or the connection is lost."""
        if self._flow.write_paused and not self._is_lost:
            await self._flow.drain()
        if self._is_lost:
            return
        self.response_started = True
        head = answer_head(status, len(body), headers, keep_alive=self.keep_alive)
        if self.scope.get("method") == "HEAD":
            body = b""
        if len(body) <= _ONE_PIECE_BYTES_MAX:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            await self._write_long(body)
        if self._is_lost:
            return
        self.response_complete = True
        self._buffer.drop()
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

    def _ask(self) -> None:
        """The route reads the body from now on."""
        self._is_asked_for = True
        if self._expects_continue and not self._transport.is_closing():
            self._expects_continue = False
            self._transport.write(_CONTINUE)
        if not self.is_whole:
            self._flow.resume_reading()

    def _count(self) -> None:
        """Count the memory of the body; if there is no room, the route gets an error."""
        arrived_bytes = self._buffer.arrived_bytes
        if self._wanted_bytes is not None and arrived_bytes >= self._wanted_bytes:
            self._wake()
        if self._bytes_max is None or self._refusal is not None:
            return
        try:
            if arrived_bytes > self._bytes_max:
                raise too_long(self._bytes_max, f"more than {self._bytes_max} bytes")
            if self._share is not None:
                self._share.take(self._buffer.taken_bytes - self._share.taken_bytes)
        except RequestRefusedError as refusal:
            self._refusal = refusal
            self._buffer.drop()
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
