"""The transport to the bundled broker: binary frames over HTTP/1.1.

Answers are not trusted: raw bytes up to a limit, no content encoding, no redirect, no proxy from the
environment, one deadline for the whole call, and an answer to a send must name the frame that was
sent. All failures are raised as subclasses of `TransportError` (`http_errors.py`). httpx is imported
when the first transport is made, so that `import qmq_client` stays cheap, but not later: if a
publisher's thread ran the import, a fork in the middle of it would leave the child with a partly
initialized module.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import weakref
from typing import TYPE_CHECKING, Final, TypeVar
from urllib.parse import urlsplit

from qmq_client.clock import SYSTEM_CLOCK
from qmq_client.errors import (
    BrokerAccessError,
    BrokerAnswerError,
    BrokerUnreachableError,
    ConfigurationError,
    ProtocolError,
)
from qmq_client.transport.address import BrokerAddress
from qmq_client.transport.http_errors import as_transport_error, check_head, check_status
from qmq_client.transport.tls import ClientTls
from qmq_client.wire.blocks import learn_block_size
from qmq_client.wire.delayed import CancelAnswer, Cancellation, CancelRequest
from qmq_client.wire.deliveries import Deliveries, parse_deliveries
from qmq_client.wire.frame import read_header
from qmq_client.wire.limits import DEFAULT_LIMITS, FRAME_OVERHEAD_BYTES_MAX, Limits
from qmq_client.wire.requests import (
    CONTROL_BYTES_MAX,
    FRAME_CONTENT_TYPE,
    JSON_CONTENT_TYPE,
    PullRequest,
    SendAnswer,
    SettleAnswer,
    SettleRequest,
    decode_control,
    decode_json,
    encode_control,
    encode_json,
)
from qmq_client.wire.shown import shorten

if TYPE_CHECKING:
    import httpx

    from qmq_client.transport.http_connections import CallDeadline, Connections, HttpAnswer
    from qmq_client.transport.plain_connection import Call

_log = logging.getLogger("qmq.transport")

DEFAULT_BROKER_URL: Final = "http://127.0.0.1:9470"
_URL_REMEDY: Final = f"Use a URL like {DEFAULT_BROKER_URL}."
CONNECT_TIMEOUT_S: Final = 5.0
#: Longer than a broker under full load needs for one sync, and still short for a caller.
ANSWER_TIMEOUT_S: Final = 30.0
#: Content types of routes with JSON answers.
_ANSWER_TYPES: Final = {"delayed/cancel": JSON_CONTENT_TYPE}
_HEADERS: Final = {
    "content-type": FRAME_CONTENT_TYPE,
    "accept": FRAME_CONTENT_TYPE,
    "accept-encoding": "identity",
    "user-agent": "qmq",
}
_Answer = TypeVar("_Answer")
_TRANSPORTS: Final[weakref.WeakSet[HttpTransport]] = weakref.WeakSet()


class HttpTransport:
    """`Transport` over HTTP. Safe for any number of threads; usable again in a forked child."""

    def __init__(
        self,
        broker: str | BrokerAddress = DEFAULT_BROKER_URL,
        *,
        limits: Limits = DEFAULT_LIMITS,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        answer_timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> None:
        import qmq_client.transport.http_connections  # noqa: F401  # see the module's text

        self._address = BrokerAddress.of(broker)
        self.broker_url = _check_url(self._address.url)
        _check_positive("connect_timeout_s", connect_timeout_s)
        _check_positive("answer_timeout_s", answer_timeout_s)
        self._limits = limits
        self._connect_timeout_s = connect_timeout_s
        self._answer_timeout_s = answer_timeout_s
        self._tls = ClientTls(self._address)
        self._headers = self._make_headers()
        #: Prepared calls by route, with the headers for which they were prepared.
        self._calls: dict[str, tuple[httpx.Headers, Call]] = {}
        self._lock = threading.Lock()
        self._connections: Connections | None = None
        self._deadline: CallDeadline | None = None
        self._is_closed = False
        learn_block_size()
        _TRANSPORTS.add(self)

    def send(self, frame: bytes) -> SendAnswer:
        """Send one message frame; see `Transport.send`."""
        header = read_header(frame)
        data = self._call("send", frame, CONTROL_BYTES_MAX, self._answer_timeout_s)
        answer = _decode(data, SendAnswer)
        if (answer.frame_crc, answer.count) != (header.body_crc, header.record_count):
            raise BrokerAnswerError(
                f"sent frame {header.body_crc:#010x} with {header.record_count} messages, the answer names "
                f"{answer.frame_crc:#010x} with {answer.count}"
            )
        return answer

    def pull(self, request: PullRequest) -> Deliveries:
        """Messages for a group; blocks up to `request.wait_ms` and the answer timeout."""
        timeout_s = self._answer_timeout_s + request.wait_ms / 1000
        answer_bytes_max = self._limits.frame_bytes + CONTROL_BYTES_MAX + FRAME_OVERHEAD_BYTES_MAX
        data = self._call("pull", encode_control(request), answer_bytes_max, timeout_s)
        try:
            deliveries = parse_deliveries(data, frame_bytes_max=answer_bytes_max)
        except ProtocolError as error:
            raise BrokerAnswerError(f"the answer to a pull cannot be read: {error}") from error
        if deliveries.head.subject != request.subject:
            raise BrokerAnswerError(
                f"asked for subject {request.subject}, got {shorten(deliveries.head.subject)}"
            )
        if len(deliveries.messages) > request.max_messages:
            raise BrokerAnswerError(
                f"asked for {request.max_messages} messages, got {len(deliveries.messages)}"
            )
        return deliveries

    def settle(self, request: SettleRequest) -> SettleAnswer:
        """Report outcomes; see `Transport.settle`."""
        frame = encode_control(request)
        data = self._call("settle", frame, CONTROL_BYTES_MAX, self._answer_timeout_s)
        return _decode(data, SettleAnswer)

    def cancel(
        self, message_ids: tuple[str, ...], *, withdrawn_from: str | None = None
    ) -> tuple[Cancellation, ...]:
        """Cancel delayed messages; see `Cancelling.cancel`."""
        request = CancelRequest(
            message_ids=message_ids,
            subject=withdrawn_from,
            withdrawn=withdrawn_from is not None,
        )
        body = encode_json(request)
        data = self._call("delayed/cancel", body, CONTROL_BYTES_MAX, self._answer_timeout_s)
        try:
            answer = decode_json(data, CancelAnswer)
        except ProtocolError as error:
            raise BrokerAnswerError(
                f"the answer is not a {CancelAnswer.__name__}: {error}"
            ) from error
        if len(answer.outcomes) != len(message_ids):
            raise BrokerAnswerError(
                f"asked to cancel {len(message_ids)} messages, got {len(answer.outcomes)} outcomes"
            )
        return answer.outcomes

    def close(self) -> None:
        """Close all connections; calls under way fail at once. Safe to call twice."""
        with self._lock:
            self._is_closed = True
            connections, self._connections = self._connections, None
        if connections is not None:
            connections.close()

    def renew_after_fork(self) -> None:
        """Forget the parent's connections without closing them; runs in the child first."""
        self._lock = threading.Lock()
        connections, self._connections = self._connections, None
        if connections is not None:
            connections.abandon()

    def _call(self, route: str, body: bytes, answer_bytes_max: int, timeout_s: float) -> bytes:
        headers = self._headers
        try:
            return self._call_as(headers, route, body, answer_bytes_max, timeout_s)
        except BrokerAccessError:
            self._renew_token()
            if self._headers == headers:
                raise
        return self._call_as(self._headers, route, body, answer_bytes_max, timeout_s)

    def _make_headers(self) -> httpx.Headers:
        import httpx

        try:
            host = httpx.URL(self.broker_url).netloc.decode("ascii")
        except (httpx.InvalidURL, UnicodeError) as error:
            raise ConfigurationError(
                setting="broker_url", value=shorten(self.broker_url), remedy=_URL_REMEDY
            ) from error
        return httpx.Headers({"host": host, **_HEADERS, **self._address.headers()})

    def _renew_token(self) -> None:
        """Read the token's file again: it may have been replaced while this process ran."""
        try:
            self._headers = self._make_headers()
        except ConfigurationError as error:
            _log.warning("the broker's token was not read again: %s", error)

    def _call_as(
        self,
        headers: httpx.Headers,
        route: str,
        body: bytes,
        answer_bytes_max: int,
        timeout_s: float,
    ) -> bytes:
        import httpx

        url = f"{self.broker_url}/v1/{route}"
        connections, deadline = self._open()
        deadline.ends_at_s = SYSTEM_CLOCK.monotonic_s() + timeout_s
        deadline.was_closed_by_peer = deadline.has_connected = False
        # Single steps are limited by the call's deadline; only connecting has its own limit.
        connect_s = min(timeout_s, self._connect_timeout_s)
        try:
            call = self._prepared(headers, route)
            with connections.exchange(call, body, connect_s) as answer:
                check_head(answer, _ANSWER_TYPES.get(route, FRAME_CONTENT_TYPE), url)
                data = _read_capped(answer, answer_bytes_max)
                check_status(answer, data, url)
                return data
        except (httpx.HTTPError, httpx.InvalidURL, RuntimeError, OSError, UnicodeError) as error:
            raise as_transport_error(
                error,
                url=url,
                was_closed_by_peer=deadline.was_closed_by_peer,
                certificate=self._address.cert_file,
                has_connected=deadline.has_connected,
            ) from error

    def _prepared(self, headers: httpx.Headers, route: str) -> Call:
        """The common parts of all calls of a route, prepared once for each token."""
        known = self._calls.get(route)
        if known is not None and known[0] is headers:
            return known[1]
        from qmq_client.transport.http_connections import prepare_call

        call = prepare_call(f"{self.broker_url}/v1/{route}", headers.raw)
        self._calls[route] = headers, call
        return call

    def _open(self) -> tuple[Connections, CallDeadline]:
        from qmq_client.transport.http_connections import CallDeadline, Connections

        with self._lock:
            if self._is_closed:
                raise BrokerUnreachableError(
                    f"{self.broker_url}: this transport was closed. Create a new one."
                )
            if self._connections is None or self._deadline is None:
                self._deadline = CallDeadline()
                self._connections = Connections(SYSTEM_CLOCK, self._deadline, self._tls.context)
            return self._connections, self._deadline


def _read_capped(answer: HttpAnswer, bytes_max: int) -> bytes:
    parts: list[bytes] = []
    length = 0
    for part in answer.parts:
        length += len(part)
        if length > bytes_max:
            if answer.status_code != 200:
                return b""  # no broker's error is so long
            raise BrokerAnswerError(f"the answer is longer than {bytes_max} bytes")
        parts.append(part)
    return b"".join(parts)


def _decode(data: bytes, kind: type[_Answer]) -> _Answer:
    try:
        return decode_control(data, kind)
    except ProtocolError as error:
        raise BrokerAnswerError(f"the answer is not a {kind.__name__}: {error}") from error


def _check_url(broker_url: str) -> str:
    remedy = _URL_REMEDY
    try:
        parts = urlsplit(broker_url)
        is_good = parts.port != 0 and bool(parts.hostname) and not re.search(r"\s", broker_url)
    except ValueError as error:
        raise ConfigurationError(setting="broker_url", value=str(error), remedy=remedy) from error
    if not is_good or parts.scheme not in {"http", "https"} or parts.query or parts.fragment:
        raise ConfigurationError(setting="broker_url", value=shorten(broker_url), remedy=remedy)
    if "@" in parts.netloc:  # the value is not shown: it may hold a password
        raise ConfigurationError(
            setting="broker_url", value="carries a user or password", remedy=remedy
        )
    return broker_url.rstrip("/")


def _check_positive(setting: str, seconds: float) -> None:
    if not 0 < seconds < float("inf"):
        raise ConfigurationError(
            setting=setting, value=str(seconds), remedy="Give a number of seconds above 0."
        )


def _renew_all_after_fork() -> None:
    for transport in list(_TRANSPORTS):
        transport.renew_after_fork()


os.register_at_fork(after_in_child=_renew_all_after_fork)
