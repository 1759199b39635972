"""Connections of the HTTP transport, with one deadline for a whole call.

httpx limits each single read and write; a peer that trickles one byte at a time, in the head of an
answer too, could hold a call forever. So the sockets are wrapped here, by httpcore's public
interface for network backends: every operation ends at the deadline of the call that runs on this
thread. Imports httpx: load it late.

Idle connections are kept in a stack and reused by the next call. httpcore's pool serves many addresses
within a bound of connections: it queues requests and scans all connections before and after each, which
is a sixth of the cost of a call. Here all connections go to one address and no call waits for another.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

import httpcore
import httpx

from qmq_client.clock import Clock
from qmq_client.transport.plain_connection import Answer, Call, Opening, PlainConnection, make_call

#: Bytes of one read: a large answer passes three layers piece by piece, each with a cost.
_READ_BYTES: Final = 256 * 1024
#: A head is written together with a body up to this length, which costs less to copy than a second call.
_HELD_BYTES_MAX: Final = 64 * 1024
#: Errors of a connection: the base classes of httpcore's errors.
_HTTPCORE_ERRORS: Final = (httpcore.TimeoutException, httpcore.NetworkError, httpcore.ProtocolError)


class CallDeadline(threading.local):
    """The deadline and state of the call on this thread; each thread has its own."""

    ends_at_s: float = 0.0
    #: Whether the peer closed the connection during the call.
    was_closed_by_peer: bool = False
    #: Whether the call opened its connection. A reused connection was accepted with its certificate.
    has_connected: bool = False


class HttpAnswer(NamedTuple):
    """An answer whose body is still to be read."""

    status_code: int
    #: Headers by lower-case names; values of one name joined by commas.
    headers: dict[str, str]
    parts: Iterator[bytes]


class Connections:
    """All sockets of one transport. `exchange` may be called from any thread at once.

    The features of `httpx.Client` and httpx's transport, such as cookies, redirects, authentication
    and events, are not needed here and cost more than the call itself.
    """

    def __init__(
        self, clock: Clock, deadline: CallDeadline, context: Callable[[], ssl.SSLContext]
    ) -> None:
        """`context` returns the TLS context for the next connection."""
        self._backend = DeadlineBackend(clock, deadline)
        self._kept = KeptConnections(clock, self._backend, context)

    @contextlib.contextmanager
    def exchange(self, call: Call, body: bytes, timeout_s: float) -> Iterator[HttpAnswer]:
        """Send a request; yields its answer, whose body is read inside the block. Raises errors of httpx.

        `timeout_s` is the limit for opening a connection.
        """
        try:
            answer, connection = self._kept.exchange(call, body, timeout_s)
            try:
                yield HttpAnswer(answer.status, _joined(answer.headers), answer.parts)
            finally:
                self._kept.give_back(connection)
        except _HTTPCORE_ERRORS as error:
            # Each of them has a class of the same name there.
            raise getattr(httpx, type(error).__name__)(str(error)) from error

    def close(self) -> None:
        """Wake every call that waits for its peer and close all sockets."""
        self._backend.is_closed = True
        for stream in list(self._backend.streams):
            stream.shut_down()
        self._kept.close()

    def abandon(self) -> None:
        """Close the copies of the sockets that a fork left in this process, not the connections."""
        for stream in list(self._backend.streams):
            stream.close()


class DeadlineBackend(httpcore.NetworkBackend):
    """Connects, and limits all operations on its sockets to the deadline of the call."""

    def __init__(
        self,
        clock: Clock,
        deadline: CallDeadline,
        inner: httpcore.NetworkBackend | None = None,
    ) -> None:
        self._inner = inner or httpcore.SyncBackend()
        self._clock = clock
        self._deadline = deadline
        #: Every socket that is open, or closed and not yet garbage-collected.
        self.streams: weakref.WeakSet[_DeadlineStream] = weakref.WeakSet()
        #: A call that connects while `Connections.close` runs must be closed too.
        self.is_closed = False

    def open(self, url: httpcore.URL, context: ssl.SSLContext, timeout_s: float) -> _DeadlineStream:
        """Open a socket to this address, with TLS for https."""
        host = url.origin.host.decode("ascii")
        stream = self.connect_tcp(host, url.origin.port, timeout_s)
        if url.scheme != b"https":
            return stream
        context.set_alpn_protocols(["http/1.1"])
        return stream.start_tls(context, host, timeout_s)

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> _DeadlineStream:
        left_s = self._deadline.ends_at_s - self._clock.monotonic_s()
        if left_s <= 0:
            raise httpcore.ConnectTimeout("the call's deadline passed")
        self._deadline.has_connected = True
        if timeout is not None:
            left_s = min(left_s, timeout)
        inner = self._inner.connect_tcp(host, port, left_s, local_address, socket_options)
        stream = _DeadlineStream(inner, self._clock, self._deadline, self.streams)
        if self.is_closed:
            stream.close()
            raise httpcore.ConnectError("this transport was closed")
        return stream


class _DeadlineStream(httpcore.NetworkStream):
    def __init__(
        self,
        inner: httpcore.NetworkStream,
        clock: Clock,
        deadline: CallDeadline,
        streams: weakref.WeakSet[_DeadlineStream],
    ) -> None:
        self._inner = inner
        self._socket: socket.socket = inner.get_extra_info("socket")
        self._clock = clock
        self._deadline = deadline
        self._streams = streams
        self._held = b""
        streams.add(self)

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self.receive(max(max_bytes, _READ_BYTES))

    def receive(self, count: int) -> bytes:
        self._flush_all()
        data = self._inner.read(count, self._left_s(httpcore.ReadTimeout))
        if not data:
            self._deadline.was_closed_by_peer = True
        return data

    def receive_into(self, view: memoryview) -> int:
        self._flush_all()
        try:
            self._socket.settimeout(self._left_s(httpcore.ReadTimeout))
            count = self._socket.recv_into(view)
        except TimeoutError as error:
            raise httpcore.ReadTimeout(str(error)) from error
        except OSError as error:
            raise httpcore.ReadError(str(error)) from error
        if not count:
            self._deadline.was_closed_by_peer = True
        return count

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        # httpcore writes the head of a request and its body apart. The head waits for the body, so
        # that a small request is one packet and wakes the broker once.
        if len(self._held) + len(buffer) <= _HELD_BYTES_MAX:
            self._held += buffer
            return
        self._flush()
        self._write_now(buffer)

    def _flush_all(self) -> None:
        # Like httpcore: a peer that closed the connection may have sent the reason before.
        if self._held:
            with contextlib.suppress(httpcore.WriteError):
                self._flush()

    def _flush(self) -> None:
        held, self._held = self._held, b""
        self._write_now(held)

    def _write_now(self, buffer: bytes) -> None:
        # httpcore's own loop would allow the whole time for every partial write.
        view = memoryview(buffer)
        try:
            while view:
                self._socket.settimeout(self._left_s(httpcore.WriteTimeout))
                view = view[self._socket.send(view) :]
        except TimeoutError as error:
            raise httpcore.WriteTimeout(str(error)) from error
        except OSError as error:
            raise httpcore.WriteError(str(error)) from error

    def close(self) -> None:
        self._inner.close()

    def shut_down(self) -> None:
        """End the connection in both directions, which wakes a thread that reads from it."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # not connected any more, so no request waits for it

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> _DeadlineStream:
        left_s = self._left_s(httpcore.ConnectTimeout)
        inner = self._inner.start_tls(ssl_context, server_hostname, left_s)
        return _DeadlineStream(inner, self._clock, self._deadline, self._streams)

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)

    def _left_s(self, error: type[httpcore.TimeoutException]) -> float:
        left_s = self._deadline.ends_at_s - self._clock.monotonic_s()
        if left_s <= 0:
            raise error("the call's deadline passed")
        return left_s


def prepare_call(address: str, headers: Iterable[tuple[bytes, bytes]]) -> Call:
    """Prepare POSTs to this address with these headers. Raises `httpx.InvalidURL` and other errors of httpx."""
    url = httpx.URL(address)
    target = httpcore.URL(
        scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path
    )
    try:
        return make_call(target, headers)
    except httpcore.LocalProtocolError as error:
        raise httpx.LocalProtocolError(str(error)) from error


def _joined(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    joined: dict[str, str] = {}
    for name, value in headers:
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        joined[key] = f"{joined[key]}, {text}" if key in joined else text
    return joined


#: Below the 5 s after which common servers drop an idle connection, so that a reused one is alive.
KEPT_S: Final = 4.0
KEPT_CONNECTIONS_MAX: Final = 16


class KeptConnections:
    """The idle connections of one transport. Safe for any number of threads.

    No lock: the ends of a deque are popped and pushed atomically, and a connection that was taken
    belongs to its call.
    """

    def __init__(
        self, clock: Clock, opening: Opening, context: Callable[[], ssl.SSLContext]
    ) -> None:
        self._clock = clock
        self._opening = opening
        self._context = context
        #: With the time when each was returned; the newest is last, and is used first.
        self._idle: deque[tuple[float, PlainConnection]] = deque()
        self._is_closed = False

    def exchange(self, call: Call, body: bytes, timeout_s: float) -> tuple[Answer, PlainConnection]:
        """Send one request, on an open connection if there is one.

        `timeout_s` is how long a new connection may take. Raises errors of httpcore.
        """
        connection = self._take()
        if connection is None:
            connection = PlainConnection(self._opening.open(call.url, self._context(), timeout_s))
        return connection.exchange(call, body), connection

    def give_back(self, connection: PlainConnection) -> None:
        """Return a connection after a call: keep it if it can carry another call."""
        if not connection.finish():
            connection.close()
            return
        now_s = self._clock.monotonic_s()
        self._idle.append((now_s, connection))
        self._close_oldest(now_s)

    def close(self) -> None:
        """Close idle connections, and keep no more."""
        self._is_closed = True
        self._close_oldest(self._clock.monotonic_s())

    def _take(self) -> PlainConnection | None:
        """Take the newest open connection; None if there is none."""
        while self._idle:
            try:
                given_back_s, connection = self._idle.pop()
            except IndexError:  # another thread took it
                break
            is_old = self._clock.monotonic_s() - given_back_s > KEPT_S
            if not is_old and not connection.has_ended():
                return connection
            connection.close()
        return None

    def _close_oldest(self, now_s: float) -> None:
        """Close the oldest idle connection: otherwise connections from a peak of threads would stay open forever."""
        while self._idle:
            is_too_many = self._is_closed or len(self._idle) > KEPT_CONNECTIONS_MAX
            try:
                if not is_too_many and now_s - self._idle[0][0] <= KEPT_S:
                    return
                self._idle.popleft()[1].close()
            except IndexError:  # another thread took it
                return
