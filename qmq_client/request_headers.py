"""`request_headers`: headers that go with every message sent inside a block, and with what it causes.

A request that enters a system leaves a trail: its W3C `traceparent` and `tracestate`, a tenant, a user.
Inside `with request_headers({...})` each message carries these next to its own headers, and a handler
runs inside the headers of the message it handles, so what it sends carries them on. They travel in
the record, through the outbox and the broker, as ordinary headers; which of them travel on stands in
one more, `qmq-carried`, so that headers given to one message only stay with that one.

When the application has loaded OpenTelemetry, its current span is the trace of what is sent, and a
handler runs with the sender's span as its remote parent. It is never imported from here.

Follows the task, not the thread: a context variable.
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
#: Prefix of our own names.
RESERVED_PREFIX: Final = "qmq-"
#: The dedupe key that a message's id was made of; tells such an id from one that only looks like it.
DEDUPE_HEADER: Final = "qmq-dedupe"
#: Names of the headers that travel on, joined by commas; those of the trace always do.
_CARRIED: Final = "qmq-carried"
#: Where OpenTelemetry keeps the current span, once an application has loaded it.
_SPANS: Final = "opentelemetry.trace"
#: Half of what a message may have by default, so that it has room for headers of its own.
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
    """Give these headers to every message sent inside the block, besides those of blocks around it.

    A value of None leaves a name out, so the headers of a web framework's request fit as they are.
    `traceparent` and `tracestate` are recognized in upper and lower case; a `traceparent` that is not
    of the W3C's form is left out together with its state, as the specification asks. Raises
    `InvalidMessageError` for any other name or value that no message could carry. A header of the
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
    """What a message sent here would carry: the headers around this code, and the current span."""
    return {**_headers.get(), **_current_span()}


def with_request_headers(own: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """The headers of a message, and those around the code that sends it."""
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
    """Around a handler's call: inside the headers that all of its messages carry on.

    Requires: at least one message.
    """
    carried = _carried_by_all(headers)
    # Most messages carry none, outside any block: that costs a call next to nothing.
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
    """Raise `InvalidMessageError` for what is no name, and for one that is kept for us."""
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
            remedy="Carry an id, and keep the rest where it can be looked up.",
        )


def _trace(traceparent: object, tracestate: object) -> dict[str, str]:
    if not isinstance(traceparent, str) or _TRACEPARENT_FORM.match(traceparent) is None:
        return {}
    if not isinstance(tracestate, str) or not 0 < len(tracestate) <= _TRACESTATE_CHARACTERS_MAX:
        return {TRACEPARENT: traceparent}
    return {TRACEPARENT: traceparent, TRACESTATE: tracestate}


def _current_span() -> dict[str, str]:
    """The current span of OpenTelemetry; none where it is not loaded."""
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
