"""Translates failures of HTTP requests into subclasses of `TransportError`.

The only place that knows httpx's errors and HTTP's status codes.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping
from typing import Final, Protocol

from qmq_client.errors import (
    BrokerAccessError,
    BrokerAnswerError,
    BrokerBusyError,
    BrokerRefusedError,
    BrokerUnreachableError,
    NotTheBrokerError,
    ProtocolError,
    TransportError,
)
from qmq_client.transport.tls import certificate_fault
from qmq_client.wire.requests import (
    FRAME_CONTENT_TYPE,
    JSON_CONTENT_TYPE,
    ErrorAnswer,
    decode_control,
    decode_json,
)
from qmq_client.wire.shown import printable, shorten

#: The longest wait that a broker may request by `Retry-After`.
RETRY_AFTER_S_MAX: Final = 300.0
_RETRY_AFTER_S: Final = 1.0
#: 408: the body came too slowly; 429: too many; 503: not now; 507: the disk's reserve is reached.
_BUSY: Final = frozenset({408, 429, 503, 507})
#: 401: the broker does not know the client; 403: it knows the client and does not allow the request.
_ACCESS: Final = frozenset({401, 403})
#: Content types in which a broker gives the reason of a refusal.
_ERROR_TYPES: Final = (FRAME_CONTENT_TYPE, JSON_CONTENT_TYPE)
#: Longest reason of the broker that is shown: some reasons are texts of an operator.
_SAID_CHARACTERS_MAX: Final = 1_000
#: The reasons of OpenSSL, before 3.5 and since, when the peer answers a handshake in plain text.
_SAID_WITHOUT_TLS: Final = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE")
#: OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED.
_OUT_OF_DATE_CODES: Final = (9, 10)
_OUT_OF_DATE: Final = "Renew it at the broker; or this machine's clock is wrong."
_OF_ANOTHER: Final = (
    "Give the authority that signed it (broker.ca_file), and the host name that it names."
)
#: Error numbers and source lines of libraries: of no use to the reader of an error.
_REASON: Final = re.compile(r"^\[Errno -?\d+\] | \(_ssl\.c:\d+\)$")


class Status(Protocol):
    """The parts of an answer that are checked before its body is read."""

    @property
    def status_code(self) -> int:
        """The HTTP status code."""
        ...

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers by lower-case names."""
        ...


def as_transport_error(
    error: Exception,
    *,
    url: str,
    was_closed_by_peer: bool = False,
    certificate: str = "",
    has_connected: bool = True,
) -> TransportError:
    """Translate an error of the HTTP library.

    A protocol error of a peer that closed the connection is a lost connection; that of any other peer
    is the answer of something other than a broker. All other errors are failures of the connection.
    `certificate` is the file of the client certificate that was presented in a handshake for this
    call, if any; a connection that is older than the call has already passed its handshake.
    """
    import httpx

    if (refused := _refused_certificate(error)) is not None:
        hint = _OUT_OF_DATE if refused.verify_code in _OUT_OF_DATE_CODES else _OF_ANOTHER
        return BrokerUnreachableError(
            f"{url}: the broker's certificate is not accepted: {refused.verify_message}. {hint}"
        )
    text = f"{url}: {type(error).__name__}: {shorten(str(error))}"
    if has_connected and url.startswith("https:") and _may_be_our_certificate(error):
        text = f"{text}. {_certificate_hint(certificate)}"
    elif isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        reason = shorten(_REASON.sub("", str(error)))
        text = f"{url}: no connection: {reason}. {_connection_hint(error)}"
    elif url.startswith("http:") and isinstance(error, httpx.RemoteProtocolError):
        text = f"{text}. If the broker speaks TLS, its address begins with https://."
    nonsense = (
        httpx.RemoteProtocolError,
        httpx.DecodingError,
        httpx.TooManyRedirects,
        httpx.HTTPStatusError,
    )
    is_silent = "without sending" in str(error)  # there was no answer
    if isinstance(error, nonsense) and not was_closed_by_peer and not is_silent:
        return NotTheBrokerError(url=url, answer=f"{type(error).__name__}: {shorten(str(error))}")
    return BrokerUnreachableError(text)


def check_head(response: Status, wanted_type: str, url: str) -> None:
    """Raise `NotTheBrokerError` for an answer that no broker gives, before its body is read.

    A broker's answer has no content encoding, and has the requested type or one of the two types of an error.
    """
    types = (wanted_type,) if response.status_code == 200 else _ERROR_TYPES
    encoding = response.headers.get("content-encoding", "identity").lower()
    if _content_type(response) not in types or encoding != "identity":
        raise _not_the_broker(response, url)


def check_status(response: Status, data: bytes, url: str) -> None:
    """Raise the error for a status other than 200.

    An answer in another form comes from something else at this address: treating it as a refusal
    would park valid messages.
    """
    status = response.status_code
    if status == 200:
        return
    if (answer := _error_answer(_content_type(response), data)) is None:
        raise _not_the_broker(response, url)
    if status >= 500 and status not in _BUSY:
        text = f"{answer.code}: {said(f'{answer.message}. {answer.remedy}')}"
        raise BrokerAnswerError(f"status {status}: {text}")
    raise refusal(status, answer, response.headers.get("retry-after", ""))


def refusal(status: int, answer: ErrorAnswer, retry_after: str = "") -> TransportError:
    """The error for a broker's refusal."""
    if status in _BUSY:
        text = f"{status}: {said(answer.message)}"
        return BrokerBusyError(text, retry_after_s=_retry_after_s(retry_after))
    kind = BrokerAccessError if status in _ACCESS else BrokerRefusedError
    return kind(status, answer)


def _not_the_broker(response: Status, url: str) -> TransportError:
    """The error for an answer of something other than a broker; its status may ask for a later
    attempt, like a broker's.
    """
    status, headers = response.status_code, response.headers
    kind = shorten(_content_type(response)) if _content_type(response) else "unknown"
    shown = f"status {status} of type {kind}"
    for name in ("content-encoding", "server", "location"):
        if value := headers.get(name):
            shown = f"{shown}, {name} {shorten(value)}"
    error = NotTheBrokerError(url=url, answer=shown, status=status)
    if status not in _BUSY:
        return error
    return BrokerBusyError(str(error), retry_after_s=_retry_after_s(headers.get("retry-after", "")))


def _content_type(response: Status) -> str:
    return response.headers.get("content-type", "").split(";")[0].strip().lower()


def said(text: str) -> str:
    """The broker's text, printable and bounded."""
    shown = printable(text[:_SAID_CHARACTERS_MAX])
    return shown if len(text) <= _SAID_CHARACTERS_MAX else f"{shown}…"


def _refused_certificate(error: BaseException | None) -> ssl.SSLCertVerificationError | None:
    """Why TLS rejected the peer's certificate; None if another error occurred."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return error
        error = error.__cause__ or error.__context__
    return None


def _may_be_our_certificate(error: Exception) -> bool:
    """Whether the peer closed the connection like one that got no acceptable client certificate.

    With TLS 1.3 it does so after the handshake succeeded on the client's side, and its alert may be lost.
    """
    import httpx

    if isinstance(error, httpx.RemoteProtocolError | httpx.ReadError | httpx.WriteError):
        return True
    return isinstance(error, httpx.ConnectError) and "alert" in str(error).lower()


def _connection_hint(error: BaseException) -> str:
    """The remedy for a failed connection."""
    if any(said in str(error) for said in _SAID_WITHOUT_TLS):
        return "The server there does not speak TLS: begin the address with http://."
    return "Start a broker there, or give the address of a running one."


def _certificate_hint(certificate: str) -> str:
    if certificate:
        if fault := certificate_fault(certificate):
            return f"The certificate of {certificate} {fault}. Renew it."
        return f"It may be that the broker does not accept the certificate of {certificate}."
    return (
        "It may be that the broker asks for a client certificate: "
        "give broker.cert_file and broker.key_file."
    )


def _error_answer(content_type: str, data: bytes) -> ErrorAnswer | None:
    try:
        if content_type == FRAME_CONTENT_TYPE:
            return decode_control(data, ErrorAnswer)
        if content_type == JSON_CONTENT_TYPE:
            return decode_json(data, ErrorAnswer)
    except ProtocolError:
        return None
    return None


def _retry_after_s(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        return _RETRY_AFTER_S
    return min(seconds, RETRY_AFTER_S_MAX) if seconds >= 0 else _RETRY_AFTER_S
