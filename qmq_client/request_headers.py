"""`request_headers`: headers for every message sent inside a block, and for the messages that follow from it.

A request has trace data: its W3C `traceparent` and `tracestate`, a tenant, a user. Inside `with
request_headers({...})` each message carries these in addition to its own headers, and a handler
runs inside the headers of its message, so its messages carry them too. They are ordinary headers of
the record, in outbox and broker; another header, `qmq-carried`, lists the ones to pass on, so that
headers of a single message are not passed on.

When the application has loaded OpenTelemetry, its current span becomes the trace of the messages,
and a handler runs with the sender's span as its remote parent. This module never imports
OpenTelemetry.

A context variable holds the headers, so they belong to the task, not the thread.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final

from qmq_client.wire.errors import EncodingError, InvalidMessageError, TooLargeError
from qmq_client.wire.names import check_name
from qmq_client.wire.shown import shorten

TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"
_TRACE: Final = (TRACEPARENT, TRACESTATE)
#: Prefix of QMQ's own header names.
RESERVED_PREFIX: Final = "qmq-"
#: Header with the dedupe key from which the id was derived; distinguishes such an id from one that only looks like it.
DEDUPE_HEADER: Final = "qmq-dedupe"
#: Header with the names of the headers to pass on, joined by commas; trace headers are always passed on.
_CARRIED: Final = "qmq-carried"
#: The module in which OpenTelemetry keeps the current span, once an application has loaded it.
_SPANS: Final = "opentelemetry.trace"
#: Half of the default limits of a message, so that it has room for its own headers.
REQUEST_HEADERS_MAX: Final = 32
REQUEST_HEADERS_BYTES_MAX: Final = 4 * 1024
#: Version, trace id, parent id, flags; a later version may have more after it.
_TRACEPARENT_FORM: Final = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(?:-[!-~]{1,200})?\Z"
)
_TRACESTATE_CHARACTERS_MAX: Final = 512
#: Names of headers known to be valid; only valid ones are cached.
_NAMES_KEPT_MAX: Final = 4096

_NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})
_headers: Final[ContextVar[Mapping[str, str]]] = ContextVar(
    "qmq_request_headers", default=_NO_HEADERS
)
#: The state outside any block; never entered, so it may be shared.
_NOTHING: Final = nullcontext()


@contextmanager
def request_headers(headers: Mapping[str, str | None]) -> Iterator[None]:
    """Add these headers to every message sent inside the block, and those of outer blocks.

    A value of None removes a name, so values that may be missing in a web request can be passed unchanged.
    `traceparent` and `tracestate` are recognized in upper and lower case; an invalid `traceparent`
    is left out together with its state, as the W3C specification requires. Raises
    `InvalidMessageError` for any other invalid name or value. A header of the
    message itself wins.
    """
    merged = {**_headers.get(), **_checked(headers)}
    _check_room(merged)
    token = _headers.set(merged)
    try:
        yield
    finally:
        _headers.reset(token)


def current_request_headers() -> dict[str, str]:
    """The headers that a message sent here would carry, including the current span."""
    return {**_headers.get(), **_current_span()}


def with_request_headers(own: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """The headers of a message, merged with the current request headers."""
    around: Mapping[str, str] = _headers.get()
    if _SPANS in sys.modules and (span := _current_span()):
        around = {**{n: v for n, v in around.items() if n not in _TRACE}, **span}
    if not around:
        return own
    names = {name for name, _ in own}
    if TRACEPARENT in names:
        names.update(_TRACE)  # a state belongs to its trace
    added = [(name, value) for name, value in around.items() if name not in names]
    if travelling := [name for name in around if name not in _TRACE]:
        added.append((_CARRIED, ",".join(travelling)))
    return (*own, *added)


def handling(headers: Sequence[Mapping[str, str]]) -> AbstractContextManager[None]:
    """The context of a handler's call: the headers that all of its messages pass on.

    Requires: at least one message.
    """
    carried = _carried_by_all(headers)
    # The common case: no headers, outside any block. It costs almost nothing.
    return _inside(carried) if carried or _headers.get() else _NOTHING


def _carried_by_all(headers: Sequence[Mapping[str, str]]) -> dict[str, str]:
    carried = _carried_on(headers[0])
    for each in headers[1:] if carried else ():
        others = _carried_on(each)
        carried = {name: value for name, value in carried.items() if others.get(name) == value}
    if TRACEPARENT not in carried:
        carried.pop(TRACESTATE, None)
    return carried


@contextmanager
def _inside(carried: dict[str, str]) -> Iterator[None]:
    token = _headers.set(carried)
    try:
        with _remote_parent(carried):
            yield
    finally:
        _headers.reset(token)


def _carried_on(headers: Mapping[str, str]) -> dict[str, str]:
    if _CARRIED not in headers and TRACEPARENT not in headers:
        return {}
    names = headers.get(_CARRIED, "").split(",")
    carried = {
        name: headers[name]
        for name in names[:REQUEST_HEADERS_MAX]
        if name in headers and not name.startswith(RESERVED_PREFIX)
    }
    return {**carried, **_trace(headers.get(TRACEPARENT), headers.get(TRACESTATE))}


def _checked(headers: Any) -> dict[str, str]:
    if not isinstance(headers, Mapping):
        raise EncodingError(
            field="request headers",
            limit="a mapping of names to texts",
            value=shorten(headers),
            remedy="Give a dict.",
        )
    given = {
        name.lower() if isinstance(name, str) and name.lower() in _TRACE else name: value
        for name, value in headers.items()
        if value is not None
    }
    checked = _trace(given.pop(TRACEPARENT, None), given.pop(TRACESTATE, None))
    for name, value in given.items():
        check_header_name(name)
        if not isinstance(value, str):
            raise EncodingError(
                field=f"header {name}",
                limit="text",
                value=shorten(value),
                remedy="Convert the value to text.",
            )
        checked[name] = value
    return checked


@lru_cache(maxsize=_NAMES_KEPT_MAX)
def check_header_name(name: object) -> None:
    """Raise `InvalidMessageError` for an invalid name, and for one that is reserved for QMQ."""
    if check_name(name, field="header name").startswith(RESERVED_PREFIX):
        raise InvalidMessageError(
            field="header name",
            limit=f"names that do not begin with {RESERVED_PREFIX}",
            value=shorten(name),
            remedy="Choose another name.",
        )


def _check_room(headers: Mapping[str, str]) -> None:
    header_bytes = sum(
        len(name) + len(value.encode(errors="replace")) for name, value in headers.items()
    )
    if len(headers) > REQUEST_HEADERS_MAX or header_bytes > REQUEST_HEADERS_BYTES_MAX:
        raise TooLargeError(
            field="request headers",
            limit=f"{REQUEST_HEADERS_MAX} headers of {REQUEST_HEADERS_BYTES_MAX} bytes in all",
            value=f"{len(headers)} headers of {header_bytes} bytes",
            remedy="Pass an id, and store the rest where it can be looked up.",
        )


def _trace(traceparent: object, tracestate: object) -> dict[str, str]:
    if not isinstance(traceparent, str) or _TRACEPARENT_FORM.match(traceparent) is None:
        return {}
    if not isinstance(tracestate, str) or not 0 < len(tracestate) <= _TRACESTATE_CHARACTERS_MAX:
        return {TRACEPARENT: traceparent}
    return {TRACEPARENT: traceparent, TRACESTATE: tracestate}


def _current_span() -> dict[str, str]:
    """The current span of OpenTelemetry; None if it is not loaded."""
    trace: Any = sys.modules.get(_SPANS)
    if trace is None:
        return {}
    span = trace.get_current_span().get_span_context()
    if not span.is_valid:
        return {}
    parent = f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"
    return _trace(parent, span.trace_state.to_header())


@contextmanager
def _remote_parent(headers: Mapping[str, str]) -> Iterator[None]:
    trace: Any = sys.modules.get(_SPANS)
    match = _TRACEPARENT_FORM.match(headers.get(TRACEPARENT, ""))
    if trace is None or match is None:
        yield
        return
    context: Any = sys.modules["opentelemetry.context"]
    trace_id, span_id, flags = (int(part, 16) for part in match.groups())
    span = trace.SpanContext(
        trace_id,
        span_id,
        is_remote=True,
        trace_flags=trace.TraceFlags(flags),
        trace_state=trace.TraceState.from_header([headers.get(TRACESTATE, "")]),
    )
    token = context.attach(trace.set_span_in_context(trace.NonRecordingSpan(span)))
    try:
        yield
    finally:
        context.detach(token)
