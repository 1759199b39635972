"""`Message`: the value that an application sends and its handlers get.

A body may be bytes, text, or anything that JSON can express (dict, list, dataclass, msgspec or
pydantic model …). The consumer gets bytes, text or the JSON value back, or a typed object if its
handler has an annotation. Bodies become bytes here, before any SQL, and are never encoded twice. No
format that could carry code is read or written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, Final, Self

import msgspec
from msgspec.structs import astuple

from qmq_client.json_body import encode_json
from qmq_client.request_headers import (
    DEDUPE_HEADER,
    RESERVED_PREFIX,
    check_header_name,
    with_request_headers,
)
from qmq_client.typed import json_as
from qmq_client.wire import record as codec
from qmq_client.wire.delayed import check_due
from qmq_client.wire.errors import (
    EncodingError,
    InvalidMessageError,
    ProtocolError,
    TooLargeError,
)
from qmq_client.wire.limits import DEFAULT_LIMITS, Limits
from qmq_client.wire.message_id import (
    LEAVE_OUT,
    dedupe_message_id,
    format_message_id,
    parse_message_id,
)
from qmq_client.wire.names import OWN_PREFIX, check_name, check_not_own
from qmq_client.wire.record import BodyKind, Fields, Record
from qmq_client.wire.shown import shorten

#: A constant, because finding a member of an enumeration takes several steps of Python per message.
_BYTES: Final = BodyKind.BYTES
_OWN_FIRST: Final = OWN_PREFIX[0]
#: As long as an ordering key; only its hash is stored.
DEDUPE_KEY_BYTES_MAX: Final = 255
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
#: Size of the cache of times: messages that arrive together were mostly made within the same millisecond.
_MOMENTS_KEPT_MAX: Final = 64
#: Characters of a body that are shown in a log or a failed test; bodies may have megabytes.
_BODY_SHOWN_CHARACTERS_MAX: Final = 1_000


class _Addressed(msgspec.Struct, frozen=True):
    """The first fields of a `Message`, which may be positional arguments."""

    #: The subject: 1 to 127 of A-Z a-z 0-9 _ . -
    subject: str
    #: bytes, str, or anything that JSON can express.
    body: Any = b""


class Message(_Addressed, frozen=True, kw_only=True):
    """One message to a subject: a value, which may be sent any number of times.

    Each send without a `message_id` creates a message with a new id. It is a struct, like
    `Record`: one is made for every message sent or handled, and a frozen dataclass costs ten times as
    much.
    """

    #: Marks messages that belong together, up to 255 bytes; the broker can find messages by it.
    #: Messages of one subject and key keep their order if `ProducerOptions.order_by_key` is set.
    key: str | None = None
    #: Labels to filter by; the same characters as in a subject.
    tags: tuple[str, ...] = ()
    #: Small text pairs. Names that begin with `qmq-` are reserved.
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)
    #: 32 hex digits; None to generate one at the send.
    message_id: str | None = None
    #: A name of the event in the application, up to 255 bytes: `"order-17-paid"`. Messages with the
    #: same subject and dedupe key are the same message, so that a business transaction may be run
    #: again; within the broker's dedupe window. Takes the place of `message_id`.
    dedupe_key: str | None = None
    #: When the producer made it; None before it is sent.
    born_at: datetime | None = None
    #: How long after the send it may be delivered: a timedelta or seconds; zero or less means at once.
    delay: timedelta | float | None = None
    #: The same as a point in time, with a time zone; a past one means at once. Set in handlers.
    deliver_at: datetime | None = None
    #: Time to live, counted from the send or from the due time: a timedelta or seconds. A group
    #: that has not received it by then gets it as an expired dead letter.
    ttl: timedelta | float | None = None
    #: The same as a point in time, with a time zone. Set in handlers.
    expires_at: datetime | None = None

    def __repr__(self) -> str:
        parts = [repr(self.subject), _shown(self.body)]
        for name in self.__struct_fields__[2:]:
            value = getattr(self, name)
            if value not in (None, (), {}):
                parts.append(f"{name}={value!r}")
        return f"{type(self).__name__}({', '.join(parts)})"

    def replace(self, **changes: Any) -> Self:
        """A copy with other values of these fields; the original does not change.

        A received message has its id: pass `message_id=None` to make the copy a new message. With
        the old id it is a repeat, which the broker refuses if its content differs.
        """
        return msgspec.structs.replace(self, **changes)


def _shown(body: Any) -> str:
    """The body in the repr, shortened if it is long."""
    if isinstance(body, str | bytes):
        rest = len(body) - _BODY_SHOWN_CHARACTERS_MAX
        return repr(body) if rest <= 0 else f"{body[:-rest]!r}… ({len(body)} in all)"
    text = repr(body)
    rest = len(text) - _BODY_SHOWN_CHARACTERS_MAX
    return text if rest <= 0 else f"{text[:-rest]}… ({len(text)} characters)"


def message_to_record(
    message: Message, *, new_id: bytes, now_ms: int, limits: Limits = DEFAULT_LIMITS
) -> Record:
    """The message as a record, with the current request headers.

    Of `limits` only the latest due time is checked here. Raises `InvalidMessageError`.
    """
    return Record(*_fields_of(message, new_id, now_ms, limits))


def encode_message(
    message: Message, new_id: bytes, now_ms: int, limits: Limits = DEFAULT_LIMITS
) -> tuple[bytes, bytes]:
    """The message's id and the bytes of its record, without a `Record`; raises `InvalidMessageError`."""
    values = _fields_of(message, new_id, now_ms, limits)
    return values[0], codec.encode_fields(values, limits)


def record_to_message(record: Record, body_type: Any = Any) -> Message:
    """The message of a record; a JSON body becomes `body_type`. Raises `ProtocolError`."""
    return fields_to_message(astuple(record), body_type)


def decode_message(subject: str, data: bytes, body_type: Any = Any) -> Message:
    """The message of an encoded record, without a `Record`; raises `ProtocolError`."""
    return fields_to_message(codec.decode_fields(subject, data), body_type)


def _fields_of(message: Message, new_id: bytes, now_ms: int, limits: Limits) -> Fields:
    if not isinstance(message, Message):
        raise InvalidMessageError(
            field="message",
            limit="a Message",
            value=type(message).__name__,
            remedy="Give Message(subject, body).",
        )
    # All at once: in compiled code, reading each field takes as long as the rest of this function.
    subject, body, key, tags, headers, own_id, dedupe_key, _, delay, deliver_at, ttl, expires_at = (
        astuple(message)
    )
    # One character, because `startswith` takes three times as long.
    if type(subject) is str and subject and subject[0] == _OWN_FIRST:
        check_not_own(subject)
    body_kind = _BYTES
    if type(body) is not bytes:
        body_kind, body = encode_body(body)
    # Fields that most messages leave out cost no call: each call would be a tenth of the total time.
    message_id, due_at_ms, expires_at_ms = new_id, None, None
    if own_id is not None or dedupe_key is not None:
        message_id = _message_id(message)
    if delay is not None or deliver_at is not None:
        due_at_ms = _due_at_ms(message, now_ms, limits)
    if ttl is not None or expires_at is not None:
        expires_at_ms = _expires_at_ms(message, now_ms if due_at_ms is None else due_at_ms)
    pairs = with_request_headers(_as_headers(headers))
    if dedupe_key is not None:
        pairs = (*pairs, (DEDUPE_HEADER, dedupe_key))
    return (
        message_id,
        subject,
        body,
        now_ms,
        body_kind,
        key,
        tags if type(tags) is tuple else _as_tags(tags),
        pairs,
        due_at_ms,
        expires_at_ms,
    )


def fields_to_message(values: Fields, body_type: Any = Any) -> Message:
    """The message of these values of a record; raises the same errors as `record_to_message`."""
    (
        message_id,
        subject,
        body,
        born_at_ms,
        body_kind,
        key,
        tags,
        pairs,
        due_at_ms,
        expires_at_ms,
    ) = values
    headers = dict(pairs) if pairs else {}
    for name, _ in pairs:
        if name.startswith(RESERVED_PREFIX):
            del headers[name]
    return Message(
        subject,
        body
        if body_type is Any and body_kind is _BYTES
        else decode_body(body_kind, body, body_type),
        key=key,
        tags=tags,
        headers=headers,
        message_id=format_message_id(message_id),
        born_at=_moment(born_at_ms),
        deliver_at=None if due_at_ms is None else _moment(due_at_ms),
        expires_at=None if expires_at_ms is None else _moment(expires_at_ms),
    )


def encode_body(body: Any) -> tuple[BodyKind, bytes]:
    """The body's bytes and their kind; raises `EncodingError`."""
    if isinstance(body, bytes):
        return BodyKind.BYTES, body
    if isinstance(body, bytearray | memoryview):
        return BodyKind.BYTES, bytes(body)
    try:
        if isinstance(body, str):
            return BodyKind.TEXT, body.encode()
        return BodyKind.JSON, encode_json(body)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise EncodingError(
            field="body",
            limit="bytes, text, or a value that JSON can express",
            value=f"{type(body).__name__} ({shorten(str(error))})",
            remedy="Convert it to one of these before the send.",
        ) from error


def decode_body(body_kind: BodyKind, body: bytes, body_type: Any = Any) -> Any:
    """The body as the producer passed it, or as `body_type` if it is JSON."""
    if body_kind is BodyKind.BYTES:
        return body
    if body_kind is BodyKind.TEXT:
        try:
            return body.decode()
        except UnicodeDecodeError as error:
            raise ProtocolError("text body is not UTF-8") from error
    validate = getattr(body_type, "model_validate_json", None)
    try:
        if validate is not None:  # a pydantic model, where the application uses pydantic
            return validate(body)
        return json_as(body, body_type)
    except (ValueError, TypeError, RecursionError, msgspec.MsgspecError) as error:
        raise not_decoded(error) from None


def not_decoded(error: Exception) -> ProtocolError:
    """The errors of a body with their places, but without values, which are content of a message."""
    errors = getattr(error, "errors", None)
    if not callable(errors):
        return ProtocolError(f"JSON body: {error}")
    wrong = errors(include_url=False, include_context=False, include_input=False)
    places = [f"{'.'.join(map(str, each['loc'])) or 'body'}: {each['msg']}" for each in wrong]
    return ProtocolError(f"JSON body: {'; '.join(places)}")


def _as_tags(tags: Any) -> tuple[str, ...]:
    if isinstance(tags, str):
        return (tags,)
    try:
        return tuple(tags)
    except TypeError as error:
        raise _not_of_form("tags", "a tuple of names", tags) from error


def _as_headers(headers: Any) -> tuple[tuple[str, str], ...]:
    if not headers and (type(headers) is dict or isinstance(headers, Mapping)):
        return ()
    try:
        pairs = tuple(headers.items())
    except AttributeError as error:
        raise _not_of_form("headers", "a mapping of names to texts", headers) from error
    for name, _ in pairs:
        check_header_name(name)
    return pairs


def _message_id(message: Message) -> bytes:
    """The message's id, from `message_id` or `dedupe_key`."""
    if message.dedupe_key is None:
        return parse_message_id(message.message_id, remedy=LEAVE_OUT)
    if message.message_id is not None:
        raise InvalidMessageError(
            field="dedupe_key",
            limit="no message_id with it",
            value=shorten(message.dedupe_key),
            remedy="Give one of the two: the id is derived from the dedupe key.",
        )
    check_name(message.subject, field="subject")
    try:
        key_bytes = len(message.dedupe_key.encode())
    except (UnicodeEncodeError, AttributeError) as error:
        raise _not_of_form("dedupe_key", "text that can be encoded", message.dedupe_key) from error
    if not key_bytes:
        raise InvalidMessageError(
            field="dedupe_key",
            limit=f"1 to {DEDUPE_KEY_BYTES_MAX} bytes of UTF-8",
            value="an empty text",
            remedy="Name the event, or leave it out.",
        )
    if key_bytes > DEDUPE_KEY_BYTES_MAX:
        raise TooLargeError(
            field="dedupe_key",
            limit=f"1 to {DEDUPE_KEY_BYTES_MAX} bytes of UTF-8",
            value=f"{key_bytes} bytes",
            remedy="Use a shorter name, or a hash of it.",
        )
    return dedupe_message_id(message.subject, message.dedupe_key)


def _due_at_ms(message: Message, now_ms: int, limits: Limits) -> int | None:
    """The due time of a message with a delay; None for at once."""
    if message.delay is not None and message.deliver_at is not None:
        raise InvalidMessageError(
            field="delay",
            limit="no deliver_at with it",
            value=shorten(message.delay),
            remedy="Give one of the two.",
        )
    if message.delay is not None:
        field, due_at_ms = "delay", now_ms + _span_ms("delay", message.delay)
    else:
        field, due_at_ms = "deliver_at", _moment_ms("deliver_at", message.deliver_at)
    check_due(due_at_ms, now_ms, limits, field=field)
    return due_at_ms if due_at_ms > now_ms else None


def _expires_at_ms(message: Message, from_ms: int) -> int:
    """The expiry time of a message; `from_ms` is its due time."""
    if message.ttl is not None and message.expires_at is not None:
        raise InvalidMessageError(
            field="ttl",
            limit="no expires_at with it",
            value=shorten(message.ttl),
            remedy="Give one of the two.",
        )
    if message.ttl is not None:
        ttl_ms = _span_ms("ttl", message.ttl)
        if ttl_ms > 0:
            return from_ms + ttl_ms
        raise InvalidMessageError(
            field="ttl",
            limit="more than 0",
            value=shorten(message.ttl),
            remedy="Leave it out for a message that does not expire.",
        )
    return max(0, _moment_ms("expires_at", message.expires_at))


def _span_ms(field: str, span: Any) -> int:
    """A span in milliseconds, rounded up so that a message is never early."""
    if isinstance(span, timedelta):
        # With a negative unit, because the longest timedelta cannot be negated.
        return -(span // -timedelta(milliseconds=1))
    if isinstance(span, int) and not isinstance(span, bool):
        return span * 1000
    if not isinstance(span, float) or not math.isfinite(span * 1000):
        raise _not_of_form(field, "a timedelta or a number of seconds", span)
    return math.ceil(span * 1000)


@lru_cache(maxsize=_MOMENTS_KEPT_MAX)
def _moment(time_ms: int) -> datetime:
    # Positional arguments, days to milliseconds: keyword arguments take half as long again, for every message.
    return _EPOCH + timedelta(0, 0, 0, time_ms)


def _moment_ms(field: str, moment: Any) -> int:
    if not isinstance(moment, datetime) or moment.tzinfo is None or moment.utcoffset() is None:
        raise InvalidMessageError(
            field=field,
            limit="a datetime with a time zone",
            value=shorten(moment),
            remedy="Give it a zone: datetime(…, tzinfo=UTC), or datetime.now(UTC) + delay.",
        )
    milliseconds: int = -((_EPOCH - moment) // timedelta(milliseconds=1))
    return milliseconds


def _not_of_form(field: str, limit: str, value: object) -> EncodingError:
    return EncodingError(
        field=field, limit=limit, value=shorten(value), remedy="Leave it out for none."
    )
