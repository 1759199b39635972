"""One connection: uvicorn's HTTP/1.1 protocol with bounds on what an untrusted client may send and how slowly.

Refused here, before any request reaches the application: too many connections, a head that is too
long or has too many headers, heads that two servers could read in two ways (several lengths, both
length and transfer encoding, several hosts, another transfer encoding than chunked, folded lines).
Deadlines are kept by one sweep over all connections (`listener.py`) instead of timers, so a request
costs no timer.

Requests to the hot routes, as clients send them, take the fast path (`direct.py`); all others, and
those behind one that is not answered yet, go on through uvicorn and ASGI.

Nothing is refused out of turn: requests before the refused one get their own answers first, and then the
connection is closed. What a client asks to upgrade to is ignored, and what comes behind a chunked body is
passed over, within the bounds of a head.

The parser itself (llhttp) refuses bad lengths, bad chunks and control characters with a 400.

What the head of a request must say: one host, one length, and a version that is spoken here.

The parser (llhttp) refuses what is no head at all; this refuses what two servers could read in two ways.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from qmq_broker.face.answers import RequestRefusedError, error_answer, refuse, retry_after
from qmq_broker.face.app import App, HotRoute
from qmq_broker.face.callers.door import CERTIFICATE_NAMES, certificate_names
from qmq_broker.face.connection.direct import DirectExchange, SteppedCoroutine, answer_head
from qmq_broker.face.exchanges.requests import DROP
from qmq_broker.face.limits import FaceLimits
from qmq_client.wire.requests import JSON_CONTENT_TYPE, encode_json

if TYPE_CHECKING:
    from starlette.types import Scope
    from uvicorn.config import Config
    from uvicorn.server import ServerState


#: Headers that say where a request ends, whom it is for and whose it is: never more than once.
_ONCE: Final = (b"content-length", b"transfer-encoding", b"host", b"authorization")
_VERSIONS: Final = ("1.0", "1.1")


def head_refusal(
    headers: Iterable[tuple[bytes, bytes]], version: str
) -> RequestRefusedError | None:
    """Why a head with these headers and this version of HTTP is refused; None if it is not."""
    found: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in _ONCE and name in found:
            return _ambiguous(f"header {name.decode()} given twice")
        found[name] = value
        if b"\n" in value or b"\r" in value:
            return _ambiguous("a header line is folded")
    if b"transfer-encoding" in found:
        if b"content-length" in found:
            return _ambiguous("both content-length and transfer-encoding")
        if found[b"transfer-encoding"].strip().lower() != b"chunked":
            return _ambiguous("a transfer encoding other than chunked")
    if version not in _VERSIONS:
        return no_request(f"HTTP/{version} is not spoken here", "Speak HTTP/1.1.")
    if version == "1.1" and b"host" not in found:
        return no_request("the request names no host", "Send a Host header.")
    return None


def no_request(what: str, remedy: str) -> RequestRefusedError:
    """The refusal of what is no request to this broker."""
    return refuse(400, "bad_request", what, remedy=remedy)


def _ambiguous(what: str) -> RequestRefusedError:
    return refuse(400, "ambiguous_request", what, remedy="Say it once.")


class _Trailers(list[tuple[bytes, bytes]]):
    """Header lines behind a body: they say nothing about the request, which may be under way, and are not kept."""

    def append(self, _: tuple[bytes, bytes], /) -> None: ...


_TRAILERS: Final = _Trailers()


class BoundedProtocol(HttpToolsProtocol):
    """A connection with bounds; made by `bounded_protocol`."""

    face: ClassVar[App]
    limits: ClassVar[FaceLimits]
    #: Open connections of each address.
    addresses: ClassVar[Counter[str]]

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._refusal: RequestRefusedError | None = None
        #: Bytes that came in since the last request or the last piece of a body.
        self._head_bytes = 0
        #: The head of a request that asks for an upgrade, without that; empty when it was read so.
        self._plain_head = b""
        self.is_in_head = True
        #: Loop time since when a request, or a first one, is awaited; None between requests.
        self.receiving_since_s: float | None = self.loop.time()
        #: Requests whose answer is not complete: uvicorn itself remembers only the newest.
        self._open_cycles: list[RequestResponseCycle] = []
        #: The newest request that took the fast path, and whether it is the newest of all.
        self._direct: DirectExchange | None = None
        self._is_direct = False
        #: The route of a request whose head was just read.
        self._starting: SteppedCoroutine | None = None
        #: Routes of the fast path that are under way: one, or one that has just been answered and the next.
        self.routes = 0
        #: Length of its body, by its head.
        self._body_bytes = 0
        #: Loop time since when it was answered and asks for nothing.
        self.idle_since_s: float | None = None
        #: Loop time since when the client has left an answer unread.
        self.unread_since_s: float | None = None
        #: Whether the pass before found it too slow. What came while the loop stood still, for a slow
        #: disk for one, is read between two passes.
        self.was_slow = False

    def connection_made(
        self,
        transport: asyncio.Transport,  # type: ignore[override]  # a TCP server's, never another
    ) -> None:
        super().connection_made(transport)
        names = certificate_names(transport.get_extra_info("peercert"))
        self.app_state = {**self.app_state, CERTIFICATE_NAMES: names, DROP: transport.abort}
        self._address = self.client[0] if self.client else ""
        self.addresses[self._address] += 1
        if len(self.connections) > self.limits.connections:
            self._refuse_connection(f"{len(self.connections)} connections are open")
        elif self.addresses[self._address] > self.limits.connections_per_address:
            self._refuse_connection(f"{self.addresses[self._address]} connections are yours")

    def connection_lost(self, exc: Exception | None) -> None:
        # Of several requests one behind the other, each has to know that nobody is there any more.
        for cycle in self._open_cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self._open_cycles.clear()
        if self._direct is not None:
            self._direct.lose()
        if self._is_direct:
            self.cycle = None  # type: ignore[assignment]  # as before the first request
        self.addresses[self._address] -= 1
        if not self.addresses[self._address]:
            del self.addresses[self._address]
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._head_bytes += len(data)
        self._feed(data)
        if self._head_bytes > self.limits.head_bytes and not self.transport.is_closing():
            self._refuse_raw(self._head_too_long())
        starting, self._starting = self._starting, None
        if starting is not None:  # not before: the parser is done with what came
            starting.step()

    def _feed(self, data: bytes) -> None:
        """Let the parser have it; a head that asks for an upgrade is read again without.

        The parser would take the body of such a request for what the client speaks after the upgrade.
        """
        while data:
            try:
                self.parser.feed_data(data)
            except HttpParserError:
                self.send_400_response("")
            except HttpParserUpgrade as upgrade:
                data, self._plain_head = self._plain_head + data[upgrade.args[0] :], b""
                continue
            return

    @property
    def missing_body_bytes(self) -> int:
        """What is still to come of a body of the fast path; 0: what comes is for `data_received`."""
        exchange = self._direct
        if not self._is_direct or exchange is None or exchange.is_whole:
            return 0
        return self._body_bytes - exchange.arrived_bytes

    def room(self, missing_bytes: int) -> memoryview:
        """Where to receive more of a body. Requires: `missing_bytes` is `missing_body_bytes`, not 0."""
        assert self._direct is not None
        return self._direct.room(missing_bytes)

    def body_received(self, count: int) -> None:
        """So many bytes were received into `room`; the parser does not see them."""
        assert self._direct is not None
        self._direct.fill(count)
        if not self.missing_body_bytes:
            # The one that is there waits for this body forever.
            self.parser = HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
            self.on_message_complete()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.idle_since_s = None
        self.is_in_head = True
        self.receiving_since_s = self.loop.time()

    def on_headers_complete(self) -> None:
        self._check_head()
        if self.parser.should_upgrade():
            self._plain_head = self._head_without_upgrade()
            return
        route = self.face.hot_route(self.url) if self._is_usual() else None
        self._is_direct = route is not None
        if route is None:
            super().on_headers_complete()
            self._open_cycles = [one for one in self._open_cycles if not one.response_complete]
            self._open_cycles.append(self.cycle)
        else:
            self._begin_direct(route)
        self.headers = _TRAILERS
        self.is_in_head = False

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        if self._is_direct and self._direct is not None:
            self._direct.receive(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._plain_head:
            return
        if self._is_direct and self._direct is not None:
            self._direct.receive_end()
        else:
            super().on_message_complete()
        self.receiving_since_s = None
        self.is_in_head = True
        self._head_bytes = 0

    def on_response_complete(self) -> None:
        if self.flow.read_paused and self.receiving_since_s is not None:
            self.receiving_since_s = self.loop.time()  # the next request could not come before
        if self.pipeline:
            super().on_response_complete()
        else:  # the same, without its timer for each answer
            self.server_state.total_requests += 1
            if not self.transport.is_closing():
                self.flow.resume_reading()
                self.idle_since_s = self.loop.time()

    def eof_received(self) -> bool:  # type: ignore[override]  # what asyncio asks for
        """The client sends no more; returns whether the connection stays: until what came before is answered.

        Requires what uvloop does: through TLS nothing can be answered after that.
        """
        open_ones = self._unanswered()
        is_whole = self.receiving_since_s is None
        if not open_ones or not is_whole or self.transport.get_extra_info("sslcontext") is not None:
            return False
        if any(one.scope["path"] == "/v1/pull" for one in open_ones if one is not self._direct):
            return False  # it would wait for a client that may have ended
        if self._direct is not None:
            self._direct.hurry()
        open_ones[-1].keep_alive = False
        return True

    def pause_writing(self) -> None:
        super().pause_writing()
        self.unread_since_s = self.loop.time()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.unread_since_s = None

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn when the parser or one of the callbacks above refused the request."""
        self._refuse_raw(self._refusal or no_request("this is no HTTP request", "Speak HTTP/1.1."))

    def end_slow(self) -> None:
        """Answer 408 unless an answer has begun, and close."""
        self._refuse_raw(
            refuse(408, "too_slow", "the request did not arrive in time", remedy="Send it at once.")
        )

    def _refuse_connection(self, why: str) -> None:
        self._refuse_raw(_busy(why))

    def _is_usual(self) -> bool:
        """Whether the request has the form that our clients give it, and none is before it."""
        return (
            self.parser.get_method() == b"POST"
            and self.parser.get_http_version() == "1.1"
            and not self.expect_100_continue
            and not self._has_open_request()
            and self._has_length()
        )

    def _has_length(self) -> bool:
        length = dict(self.headers).get(b"content-length")
        self._body_bytes = int(length) if length is not None else 0
        return length is not None

    def _has_open_request(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    def _begin_direct(self, route: HotRoute) -> None:
        self.scope["method"], self.scope["path"] = "POST", self.url.decode()
        exchange = DirectExchange(
            cast("Scope", self.scope),
            self.transport,
            self.flow,
            keep_alive=self.parser.should_keep_alive(),
            on_end=self.on_response_complete,
        )
        self._direct, self.cycle = exchange, cast("RequestResponseCycle", exchange)
        work = self.face.serve(exchange, partial(route, exchange))
        self._starting = SteppedCoroutine(work, partial(self._end_direct, exchange))
        self.routes += 1

    def _end_direct(self, exchange: DirectExchange) -> None:
        self.routes -= 1
        exchange.end()

    def _head_without_upgrade(self) -> bytes:
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        lines = [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join((b"%b %b HTTP/%b" % (method, self.url, version), *lines, b"", b""))

    def _check_head(self) -> None:
        """Raise what the parser takes for its own refusal, which `send_400_response` then tells."""
        head_bytes = len(self.url) + sum([len(name) + len(value) for name, value in self.headers])
        refusal = head_refusal(self.headers, self.parser.get_http_version())
        if head_bytes > self.limits.head_bytes:
            self._refusal = self._head_too_long()
        elif len(self.headers) > self.limits.headers:
            self._refusal = refuse(
                431,
                "too_many_headers",
                "the request has too many headers",
                limit=f"{self.limits.headers} headers",
                remedy="Send fewer headers.",
            )
        elif refusal is not None:
            self._refusal = refusal
        elif len(self.pipeline) >= self.limits.pipelined:
            self._refusal = _busy(f"{len(self.pipeline)} requests are before this one")
        elif self.parser.get_method() == b"CONNECT":
            self._refusal = no_request("this is no proxy", "Send requests to the broker itself.")
        if self._refusal is not None:
            raise self._refusal

    def _head_too_long(self) -> RequestRefusedError:
        where = "request line and headers" if self.is_in_head else "chunk headers and trailers"
        return refuse(
            431,
            "head_too_large",
            f"too long: {where}",
            limit=f"{self.limits.head_bytes} bytes",
            remedy="Send less in headers.",
        )

    def _unanswered(self) -> list[DirectExchange | RequestResponseCycle]:
        return [
            cycle
            for cycle in (self._direct, *self._open_cycles)
            if cycle is not None and not cycle.response_complete
        ]

    def _refuse_raw(self, refusal: RequestRefusedError) -> None:
        """Refuse what is being received, unless it was answered, and close.

        A request before it would take the refusal for its own answer: then the answer to that one closes.
        """
        unanswered = self._unanswered()
        is_answered = not self.is_in_head and self.cycle.response_started
        if not self.is_in_head and not is_answered:
            unanswered.pop()  # the one that is refused
        if unanswered:
            unanswered[-1].keep_alive = False
            self.flow.pause_reading()
            return
        if not is_answered:
            self.transport.write(raw_answer(refusal))
        self.transport.close()


def _busy(why: str) -> RequestRefusedError:
    return refuse(503, "busy", f"{why}: come back later", retry_after_s=1.0)


def bounded_protocol(face: App, limits: FaceLimits) -> type[BoundedProtocol]:
    """The class of connections with these bounds; their transports know them through `ReceivingProtocol`."""
    members = {"face": face, "limits": limits, "addresses": Counter()}
    return type("BoundedProtocol", (BoundedProtocol,), members)


def raw_answer(refusal: RequestRefusedError) -> bytes:
    """A whole answer as bytes, after which the connection closes."""
    body = encode_json(error_answer(refusal))
    headers = [(b"content-type", JSON_CONTENT_TYPE.encode())]
    wait = retry_after(refusal)
    if wait is not None:
        headers.append((b"retry-after", wait))
    return answer_head(refusal.status, len(body), tuple(headers), keep_alive=False) + body
