"""One connection: HTTP/1.1 with limits on the size and slowness of an untrusted client's requests.

Every request takes this path from a socket to a route. The parser (llhttp) gets the bytes of each
read. Each complete head becomes a `RequestResponse`, and `App.serve` serves them one after the
other. A transport asks for a buffer before each read. While a body of known length is expected, the
buffer is the body's own memory (`http/receive_buffer.py`), and the parser does not see the bytes;
everything else is received into a buffer shared by the connections of a server. A long body may
arrive in many small pieces, each of which would wake the loop. So after a short read the expected
length is set on the socket.

Refused here, before any request reaches the application: too many connections, a head that is too
long or has too many headers, heads that two servers could read in two ways (several lengths, both
length and transfer encoding, several hosts, another transfer encoding than chunked, folded lines).
The parser itself refuses bad lengths, bad chunks and control characters with a 400. One sweep over
all connections (`listener.py`) checks the deadlines, so a request costs no timer.

Requests before a refused one are answered first, and then the connection is closed. A
request to upgrade the protocol is ignored, and bytes after a chunked body are discarded, up to the
limit of a head.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast
from urllib.parse import unquote

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser, parse_url
from uvicorn.protocols.http.flow_control import FlowControl

from qmq_broker.face.answers import RequestRefusedError, busy, error_answer, refuse, retry_after
from qmq_broker.face.app import App
from qmq_broker.face.authentication.authenticator import CERTIFICATE_NAMES, certificate_names
from qmq_broker.face.http.request_response import RequestResponse, SteppedCoroutine, answer_head
from qmq_broker.face.http.requests import DROP
from qmq_broker.face.limits import FaceLimits
from qmq_client.wire.requests import JSON_CONTENT_TYPE, encode_json

if TYPE_CHECKING:
    from uvicorn.server import ServerState

#: Most bytes of one read of heads, small requests and bodies of unknown length.
SHARED_BYTES: Final = 64 * 1024
#: Most bytes of a long body to wait for: half of a usual frame, so that one half arrives while the
#: other is read.
AWAITED_BYTES: Final = 256 * 1024

#: Headers with the length, the host and the credentials of a request: never more than once.
_ONCE: Final = (b"content-length", b"transfer-encoding", b"host", b"authorization")
_VERSIONS: Final = ("1.0", "1.1")
#: A host and a port (RFC 9112, section 3.2), or nothing.
_HOST: Final = re.compile(rb"[\w.~%!$&'()*+,;=:\[\]-]*\Z", re.ASCII)
#: The parser's errors for heads that two servers could read in two ways; they precede
#: `head_refusal`.
_AMBIGUOUS: Final = frozenset(
    {
        "Duplicate Content-Length",
        "Content-Length can't be present with Transfer-Encoding",
        "Transfer-Encoding can't be present with Content-Length",
        "Invalid `Transfer-Encoding` header value",
        "Unexpected whitespace after header value",
    }
)


def head_refusal(
    headers: Iterable[tuple[bytes, bytes]], version: str
) -> RequestRefusedError | None:
    """The reason why a head with these headers and this version of HTTP is refused; None if it is not."""
    found: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in _ONCE and name in found:
            return _ambiguous(f"header {name.decode()} is given twice", "Send it once.")
        found[name] = value
        if b"\n" in value or b"\r" in value:
            return _ambiguous("a header line is folded", "Send each header in one line.")
    if b"transfer-encoding" in found:
        if b"content-length" in found:
            return _ambiguous(
                "the request has both content-length and transfer-encoding", "Send one of the two."
            )
        if found[b"transfer-encoding"].strip().lower() != b"chunked":
            return _ambiguous("transfer-encoding is not chunked", "Send content-length, or chunks.")
    if version not in _VERSIONS:
        return no_request(
            f"HTTP/{version} is not supported; allowed: {', '.join(_VERSIONS)}", "Use HTTP/1.1."
        )
    if version == "1.1" and b"host" not in found:
        return no_request("the request has no Host header", "Send a Host header.")
    if not _HOST.match(found.get(b"host", b"")):
        return no_request("the Host header is not a host name", "Send a host and a port.")
    return None


def no_request(what: str, remedy: str) -> RequestRefusedError:
    """The refusal, with status 400, of a request that this broker cannot serve."""
    return refuse(400, "bad_request", what, remedy=remedy)


def _unparsed(error: HttpParserError) -> RequestRefusedError:
    if str(error) in _AMBIGUOUS:
        return _ambiguous(str(error), "Send content-length or transfer-encoding, once.")
    return no_request("this is not an HTTP request", "Use HTTP/1.1.")


def _ambiguous(what: str, remedy: str) -> RequestRefusedError:
    return refuse(400, "ambiguous_request", what, remedy=remedy)


class _Trailers(list[tuple[bytes, bytes]]):
    """Trailers, the header lines after a body: discarded, because the request may be running."""

    def append(self, _: tuple[bytes, bytes], /) -> None: ...


_TRAILERS: Final = _Trailers()


class Connection(asyncio.BufferedProtocol):
    """A connection with bounds; made by `bounded_connection`."""

    face: ClassVar[App]
    limits: ClassVar[FaceLimits]
    #: Open connections of each address.
    addresses: ClassVar[Counter[str]]
    #: Shared by all connections of one loop: a read is finished when `buffer_updated` returns.
    shared: ClassVar[memoryview]

    transport: asyncio.Transport
    flow: FlowControl
    #: None once the connection is lost.
    _parser: Any

    def __init__(self, server_state: ServerState, **_: Any) -> None:
        """The other arguments of a uvicorn server are not used."""
        self.server_state = server_state
        self.loop = asyncio.get_running_loop()
        #: Requests without a complete answer, oldest first; only the oldest is served.
        self.requests: deque[RequestResponse] = deque()
        self._served: RequestResponse | None = None
        #: The request whose body is being received.
        self._receiving: RequestResponse | None = None
        self._refusal: RequestRefusedError | None = None
        #: Bytes received since the last request or the last piece of a body.
        self._head_bytes = 0
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        #: The head of a request for an upgrade, without the upgrade; empty once it was parsed
        #: again.
        self._plain_head = b""
        self._is_shared = True
        #: Length of the buffer of the next read.
        self._room_bytes = 0
        #: None with TLS, where the bytes on the socket are not the bytes that are read.
        self._socket: socket.socket | None = None
        #: Bytes that must have arrived before the loop is woken.
        self._awaited_bytes = 1
        self.is_in_head = True
        #: Loop time since which a request is being received, or the first one is awaited; None
        #: between requests.
        self.receiving_since_s: float | None = self.loop.time()
        #: Loop time since which all its requests are answered.
        self.idle_since_s: float | None = None
        #: Loop time since which the client has left an answer unread.
        self.unread_since_s: float | None = None
        #: Whether the previous sweep found it too slow. Bytes that arrived while the loop was
        #: blocked, for example by a slow disk, are read between two sweeps.
        self.was_slow = False
        self._make_parser()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # a TCP server's, never another
        self.flow = FlowControl(self.transport)
        self.server_state.connections.add(cast("Any", self))
        is_plain = transport.get_extra_info("sslcontext") is None
        self._socket = transport.get_extra_info("socket") if is_plain else None
        client = transport.get_extra_info("peername")
        self._address = str(client[0]) if client else ""
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "scheme": "http" if is_plain else "https",
            "server": transport.get_extra_info("sockname"),
            "client": client,
            "root_path": "",
            "state": {
                CERTIFICATE_NAMES: certificate_names(transport.get_extra_info("peercert")),
                DROP: self.transport.abort,
            },
        }
        self.addresses[self._address] += 1
        connections = len(self.server_state.connections)
        if connections > self.limits.connections:
            self._refuse_raw(busy("open connections", connections, self.limits.connections))
        elif self.addresses[self._address] > self.limits.connections_per_address:
            count, limit = self.addresses[self._address], self.limits.connections_per_address
            self._refuse_raw(busy("open connections of one address", count, limit))

    def connection_lost(self, exc: Exception | None) -> None:
        self.server_state.connections.discard(cast("Any", self))
        # Each of several pipelined requests must be notified that the client has left.
        for request in (self._served, *self.requests):
            if request is not None:
                request.lose()
        self.requests.clear()
        self._served = self._receiving = self._parser = None
        self.addresses[self._address] -= 1
        if not self.addresses[self._address]:
            del self.addresses[self._address]
        self.flow.resume_writing()
        if exc is None:
            self.transport.close()

    def get_buffer(self, _hint: int) -> memoryview:
        """The buffer for the next read."""
        self._is_shared = not self._missing_bytes
        body = self._receiving
        room = self.shared if self._is_shared or body is None else body.room()
        self._room_bytes = len(room)
        return room

    def buffer_updated(self, count: int) -> None:
        """This many bytes were read."""
        if self._is_shared:
            self.data_received(bytes(self.shared[:count]))
        else:
            self._body_received(count)
        missing_bytes = self._missing_bytes
        is_short = count < self._room_bytes
        if self._awaited_bytes > 1 or (is_short and missing_bytes > SHARED_BYTES):
            self._await(min(missing_bytes, AWAITED_BYTES))

    def data_received(self, data: bytes) -> None:
        """Pass bytes to the parser, then serve the requests that they complete."""
        if self.transport.is_closing():
            return
        self._head_bytes += len(data)
        self._feed(data)
        if self._head_bytes > self.limits.head_bytes and not self.transport.is_closing():
            self._refuse_raw(self._head_too_long())
        self._serve()  # not earlier: the parser must have consumed the bytes

    @property
    def _missing_bytes(self) -> int:
        return 0 if self._receiving is None else self._receiving.missing_bytes

    def _body_received(self, count: int) -> None:
        """Bytes were received into the body's own memory; the parser does not see them."""
        request = self._receiving
        if request is None:
            return
        request.fill(count)
        if request.missing_bytes:
            self._hold_back(request)
        else:
            self._make_parser()  # the old timer would wait for this body forever
            self.on_message_complete()

    def _make_parser(self) -> None:
        self._parser = HttpRequestParser(self)
        # An answer may say "close" while further requests arrive: they are parsed and discarded
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def _await(self, count: int) -> None:
        """Wake the loop only when this many bytes have arrived, not for each piece.

        Requires: at least this many will arrive, or the connection ends, which also wakes the loop.
        """
        wanted_bytes = max(1, count)
        if self._socket is None or wanted_bytes == self._awaited_bytes:
            return
        self._awaited_bytes = wanted_bytes
        with suppress(OSError):  # it is closed
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted_bytes)

    def _feed(self, data: bytes) -> None:
        """Feed the parser; a head that asks for an upgrade is parsed again without the upgrade.

        Otherwise the parser would take the body of the request for data of the new protocol.
        """
        while data:
            try:
                self._parser.feed_data(data)
            except HttpParserError as error:
                self._refuse_raw(self._refusal or _unparsed(error))
            except HttpParserUpgrade as upgrade:
                data, self._plain_head = self._plain_head + data[upgrade.args[0] :], b""
                continue
            return

    def on_message_begin(self) -> None:
        """Called by the parser, as the others below."""
        self._url, self._headers = b"", []
        self.idle_since_s = None
        self.is_in_head = True
        self.receiving_since_s = self.loop.time()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._check_head()
        if self._parser.should_upgrade():
            self._plain_head = self._head_without_upgrade()
            return
        self._receiving = self._new_request()
        self.requests.append(self._receiving)
        if len(self.requests) > 1:
            self.flow.pause_reading()
        self._headers = _TRAILERS
        self.is_in_head = False

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        if self._receiving is not None:
            self._receiving.receive(body)
            self._hold_back(self._receiving)

    def on_message_complete(self) -> None:
        if self._plain_head:
            return
        request, self._receiving = self._receiving, None
        if request is not None:
            request.receive_end()
        self.receiving_since_s = None
        self.is_in_head = True
        self._head_bytes = 0

    def _new_request(self) -> RequestResponse:
        scope = {
            **self._scope,
            "http_version": self._parser.get_http_version(),
            "method": self._parser.get_method().decode("ascii"),
            "headers": self._headers,
            **_target(self._url),
        }
        named = dict(self._headers)
        length = named.get(b"content-length")
        return RequestResponse(
            scope,
            self.transport,
            self.flow,
            keep_alive=scope["http_version"] != "1.0" and self._parser.should_keep_alive(),
            on_end=self._on_answered,
            body_bytes=None if length is None else int(length),
            expects_continue=scope["http_version"] != "1.0"  # RFC 9110, 10.1.1
            and named.get(b"expect", b"").lower() == b"100-continue",
        )

    def _hold_back(self, request: RequestResponse) -> None:
        if request.is_waiting_to_be_read:
            self.flow.pause_reading()

    def _serve(self) -> None:
        """Start to serve the oldest request, unless it is being served."""
        if not self.requests or self._served is self.requests[0] or self.transport.is_closing():
            return
        request = self._served = self.requests[0]
        tasks = cast("set[SteppedCoroutine]", self.server_state.tasks)
        work = SteppedCoroutine(self.face.serve(request), request.end, tasks)
        work.step()

    def _on_answered(self) -> None:
        """The oldest request has its complete answer."""
        self.requests.popleft()
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        if self.flow.read_paused and self.receiving_since_s is not None:
            self.receiving_since_s = (
                self.loop.time()
            )  # the next request could not be received earlier
        self.flow.resume_reading()
        if self.requests:
            self.loop.call_soon(self._serve)
        else:
            self.idle_since_s = self.loop.time()

    def eof_received(self) -> bool:
        """The client has finished sending; returns whether the connection stays open for pending answers.

        Through TLS uvloop can send nothing after that, so such a connection is closed.
        """
        cut, self._receiving = self._receiving, None
        self.receiving_since_s = None
        if cut is not None and cut in self.requests:
            self.requests.remove(cut)
            cut.lose()
        if not self.requests or self.transport.get_extra_info("sslcontext") is not None:
            return False
        for request in self.requests:
            request.hurry()
        self.requests[-1].keep_alive = False
        return True

    def shutdown(self) -> None:
        """The server stops: close the connection once the received requests are answered."""
        if self.requests:
            self.requests[-1].keep_alive = False
        else:
            self.transport.close()

    def pause_writing(self) -> None:
        self.flow.pause_writing()
        self.unread_since_s = self.loop.time()

    def resume_writing(self) -> None:
        self.flow.resume_writing()
        self.unread_since_s = None

    def end_slow(self) -> None:
        """Answer 408 unless an answer has begun, and close."""
        self._refuse_raw(
            refuse(
                408,
                "too_slow",
                "the request did not arrive in time",
                limit=f"{self.limits.head_ms} ms for the headers, {self.limits.request_ms} ms in all",
                remedy="Send it without a pause.",
            )
        )

    def _head_without_upgrade(self) -> bytes:
        method, version = self._parser.get_method(), self._parser.get_http_version().encode()
        lines = [b"%b: %b" % header for header in self._headers if header[0] != b"upgrade"]
        return b"\r\n".join((b"%b %b HTTP/%b" % (method, self._url, version), *lines, b"", b""))

    def _check_head(self) -> None:
        """Raise the refusal of a bad head; the parser reports it as its own error to `_feed`."""
        head_bytes = len(self._url) + sum([len(name) + len(value) for name, value in self._headers])
        refusal = head_refusal(self._headers, self._parser.get_http_version())
        if head_bytes > self.limits.head_bytes:
            self._refusal = self._head_too_long()
        elif len(self._headers) > self.limits.headers:
            self._refusal = refuse(
                431,
                "too_many_headers",
                f"the request has {len(self._headers)} headers; allowed: {self.limits.headers}",
                field="headers",
                limit=f"{self.limits.headers} headers",
                value=f"{len(self._headers)} headers",
                remedy="Send fewer headers.",
            )
        elif refusal is not None:
            self._refusal = refusal
        elif len(self.requests) > self.limits.pipelined:
            count, limit = len(self.requests), self.limits.pipelined
            self._refusal = busy("unanswered requests of one connection", count, limit)
        elif self._parser.get_method() == b"CONNECT":
            self._refusal = no_request(
                "CONNECT: this is not a proxy", "Send requests to the broker itself."
            )
        if self._refusal is not None:
            raise self._refusal

    def _head_too_long(self) -> RequestRefusedError:
        where = "request line and headers" if self.is_in_head else "chunk headers and trailers"
        return refuse(
            431,
            "head_too_large",
            f"the {where} are longer than {self.limits.head_bytes} bytes",
            field=where,
            limit=f"{self.limits.head_bytes} bytes",
            remedy="Send fewer or shorter headers.",
        )

    def _refuse_raw(self, refusal: RequestRefusedError) -> None:
        """Refuse the request that is being received, unless it was answered, and close the connection.

        If earlier requests await answers, the client would take the refusal for one of these. Then
        nothing is sent, and the connection closes after the last of these answers.
        """
        before = list(self.requests)
        refused = None if self.is_in_head else self._receiving
        is_answered = refused is not None and refused.response_started
        if refused is not None and not is_answered:
            before.remove(refused)
        if before:
            before[-1].keep_alive = False
            self.flow.pause_reading()
            return
        if not is_answered:
            self.transport.write(raw_answer(refusal))
        self.transport.close()


def _target(url: bytes) -> dict[str, Any]:
    """The fields of a scope that describe the target of a request."""
    target = parse_url(url)
    path = target.path.decode("ascii")
    return {
        "path": unquote(path) if "%" in path else path,
        "raw_path": target.path,
        "query_string": target.query or b"",
    }


def bounded_connection(face: App, limits: FaceLimits) -> Callable[..., Connection]:
    """A factory of connections with these limits, for the servers of one loop."""
    members = {
        "face": face,
        "limits": limits,
        "addresses": Counter(),
        "shared": memoryview(bytearray(SHARED_BYTES)),
    }
    return type("BoundedConnection", (Connection,), members)


def raw_answer(refusal: RequestRefusedError) -> bytes:
    """A complete answer as bytes, after which the connection closes."""
    body = encode_json(error_answer(refusal))
    headers = [(b"content-type", JSON_CONTENT_TYPE.encode())]
    wait = retry_after(refusal)
    if wait is not None:
        headers.append((b"retry-after", wait))
    return answer_head(refusal.status, len(body), tuple(headers), keep_alive=False) + body
