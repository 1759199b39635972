"""One connection to the broker, for one call at a time.

The broker's answers have one plain form: HTTP/1.1, a short head, a content length. Reading only
this form takes a tenth of the time of a full HTTP parser, and the body is received directly into
its final memory instead of being copied four times. An answer of any other form, including a
malformed one, is passed with all bytes received so far to httpcore's connection, which judges it.

Not for: the deadline of a call, and writing head and body together (`http_connections.py`).
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterable, Iterator
from contextlib import suppress
from io import BytesIO
from typing import Any, Final, NamedTuple, Protocol

import httpcore

#: The first read gives the head of an answer, and mostly the whole answer.
_FIRST_READ_BYTES: Final = 16 * 1024
#: A body up to this length is received into one piece of memory, allocated in advance.
_PART_BYTES_MAX: Final = 2 * 1024 * 1024
_TOKEN: Final = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_PLAIN_HEAD: Final = re.compile(
    rb"HTTP/1\.1 ([2-5][0-9][0-9]) [\t\x20-\x7e]*\r\n((?:" + _TOKEN + rb":[\t\x20-\x7e]*\r\n)+)\r\n"
)
_HEADER: Final = re.compile(rb"(" + _TOKEN + rb"):[\t ]*([\t\x20-\x7e]*?)[\t ]*\r\n")
#: Content lengths up to a petabyte; longer numbers are invalid.
_LENGTH: Final = re.compile(rb"[0-9]{1,15}\Z")
#: Allowed characters of a request's header: no value can end its line, or add another header.
_SENT_NAME: Final = re.compile(_TOKEN + rb"\Z")
_SENT_VALUE: Final = re.compile(rb"(?:[\x21-\x7e\x80-\xff]+(?:[\t ]+[\x21-\x7e\x80-\xff]+)*)?\Z")
#: Answers without a body, even if they state a length.
_BODILESS: Final = frozenset({204, 304})

Headers = list[tuple[bytes, bytes]]


class Stream(Protocol):
    """The connected socket; each of its operations ends at the deadline of the call."""

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Write all of it."""
        ...

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """The received bytes, or some of them; empty at the end."""
        ...

    def receive(self, count: int) -> bytes:
        """Like `read`, but at most `count` bytes."""
        ...

    def receive_into(self, view: memoryview) -> int:
        """Like `read`, but into this memory; returns the count, 0 at the end."""
        ...

    def close(self) -> None:
        """Close it."""
        ...

    def get_extra_info(self, info: str) -> Any:
        """Like the method of httpcore's streams."""
        ...


class Opening(Protocol):
    """Opens sockets to one broker."""

    def open(self, url: httpcore.URL, context: ssl.SSLContext, timeout_s: float) -> Stream:
        """A new socket, with TLS where the address asks for it."""
        ...


class Call(NamedTuple):
    """The parts that all POSTs to one route share; made by `make_call`."""

    url: httpcore.URL
    #: The encoded head, without the content length.
    head: bytes


class Answer(NamedTuple):
    """An answer whose body is still to be read."""

    status: int
    headers: Headers
    parts: Iterator[bytes]


class PlainConnection:
    """One connection. Belongs to the call that took it."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        #: Whether the previous answer was read to its end, so that another request may follow.
        self._is_idle = True
        #: The httpcore connection that reads an answer of another form.
        self._other: httpcore.HTTP11Connection | None = None
        self._other_response: httpcore.Response | None = None

    def exchange(self, call: Call, body: bytes) -> Answer:
        """Send a request and read the head of its answer. Raises errors of httpcore, and closes."""
        self._is_idle = False
        try:
            # A peer that refuses a request may send its reason before it has read the whole request.
            with suppress(httpcore.WriteError):
                self._stream.write(b"%bcontent-length: %d\r\n\r\n" % (call.head, len(body)))
                self._stream.write(body)
            data = self._stream.receive(_FIRST_READ_BYTES)
            answer = self._plain_answer(data)
            return self._other_answer(call, data) if answer is None else answer
        except BaseException:
            self.close()
            raise

    def has_ended(self) -> bool:
        """Whether the peer has closed the connection, or sent bytes without a request. Requires: it is idle."""
        return bool(self._stream.get_extra_info("is_readable"))

    def finish(self) -> bool:
        """End the call; returns whether the connection can carry another one."""
        if self._other is not None and self._other_response is not None:
            self._other_response.close()
            self._is_idle = self._other.is_idle()
            self._other = self._other_response = None
        return self._is_idle

    def close(self) -> None:
        """Close the socket."""
        self._is_idle = False
        self._stream.close()

    def _plain_answer(self, data: bytes) -> Answer | None:
        """The answer that begins with `data`; None if it is not of the plain form."""
        head = _PLAIN_HEAD.match(data)
        if head is None:
            return None
        status, headers = int(head[1]), _HEADER.findall(head[2])
        known = {name.lower(): value for name, value in headers}
        length = known.get(b"content-length", b"")
        if (
            len(known) < len(headers)
            or not _LENGTH.match(length)
            or b"transfer-encoding" in known
            or known.get(b"connection", b"keep-alive").lower() != b"keep-alive"
            or status in _BODILESS
        ):
            return None
        start, body_bytes = data[head.end() :], int(length)
        if len(start) > body_bytes:
            return None
        return Answer(status, headers, self._plain_body(start, body_bytes))

    def _plain_body(self, start: bytes, body_bytes: int) -> Iterator[bytes]:
        """The body, whose beginning is `start`, in as few parts as possible."""
        received = len(start)
        if received == body_bytes:
            self._is_idle = True
            yield start
            return
        received = 0
        while received < body_bytes:
            # The only reference: `getbuffer` and `getvalue` work on these very bytes.
            buffer = BytesIO(bytes(min(body_bytes - received, _PART_BYTES_MAX)))
            with buffer.getbuffer() as view:
                view[: len(start)] = start
                self._fill(view, len(start), received, body_bytes)
                received += len(view)
            start = b""
            self._is_idle = received == body_bytes
            yield buffer.getvalue()

    def _fill(self, view: memoryview, first: int, before: int, body_bytes: int) -> None:
        while first < len(view):
            # Released before an error is raised: the error's traceback would keep the memory alive,
            # and since Python 3.13 a `BytesIO` that is collected with such a view prints a warning.
            with view[first:] as room:
                count = self._stream.receive_into(room)
            if not count:
                raise httpcore.RemoteProtocolError(
                    "peer closed connection without sending complete message body "
                    f"(received {before + first} bytes, expected {body_bytes})"
                )
            first += count

    def _other_answer(self, call: Call, data: bytes) -> Answer:
        """The answer that begins with `data`, as httpcore reads it."""
        self._other = httpcore.HTTP11Connection(call.url.origin, _Replay(data, self._stream))
        # The request was already sent: this object only represents it and is not sent.
        again = httpcore.Request("POST", call.url, headers=[(b"host", b"broker")])
        response = self._other_response = self._other.handle_request(again)
        return Answer(response.status, list(response.headers), iter(response.iter_stream()))


class _Replay(httpcore.NetworkStream):
    """A stream that first returns bytes read earlier; it discards writes."""

    def __init__(self, data: bytes, stream: Stream) -> None:
        self._parts = [data]
        self._stream = stream

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._parts.pop() if self._parts else self._stream.read(max_bytes)

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Discards the request, which was already sent."""

    def close(self) -> None:
        self._stream.close()


def make_call(url: httpcore.URL, headers: Iterable[tuple[bytes, bytes]]) -> Call:
    """A POST to this address; raises `httpcore.LocalProtocolError` for a header that is not allowed."""
    lines = [b"POST %b HTTP/1.1\r\n" % url.target]
    for name, value in headers:
        if not (_SENT_NAME.match(name) and _SENT_VALUE.match(value)):
            raise httpcore.LocalProtocolError(f"header {name!r} cannot be sent")
        lines.append(b"%b: %b\r\n" % (name, value))
    return Call(url, b"".join(lines))
