"""Messages as JSON, for people and other languages: send requests in, deliveries out.

In a send, `body` is a text (kept as text) or any other JSON value (kept as the JSON that was given,
byte for byte), and `body_base64` is bytes. A message without an id gets one; one with a delay is
delivered later. In an answer, a body has the form in which it was sent. Bytes that do not match
their kind are returned as `body_base64`, and a record that cannot be decoded at all is returned
whole as `record_base64` with the reason: it is never hidden.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from typing import Annotated

import msgspec

from qmq_broker.service.delivery.delivery import HandOut
from qmq_broker.service.delivery.in_group import PastAttempt
from qmq_broker.service.query import DeadLetterStatus
from qmq_client.wire.delayed import check_due
from qmq_client.wire.errors import EncodingError, InvalidMessageError, ProtocolError
from qmq_client.wire.frame import FrameKind, build_message_frame
from qmq_client.wire.limits import Limits
from qmq_client.wire.message_id import LEAVE_OUT, format_message_id, parse_message_id
from qmq_client.wire.record import BodyKind, Record, decode_record, encode_record
from qmq_client.wire.requests import MessageId, Name, Natural, decode_json
from qmq_client.wire.shown import shorten


class JsonMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One message of a send."""

    subject: Name
    body: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    body_base64: str | None = None
    key: str | None = None
    tags: tuple[Name, ...] = ()
    headers: dict[Name, str] = {}
    message_id: MessageId | None = None
    #: Ms since 1970 UTC; not delivered from then on.
    expires_at_ms: Natural | None = None
    #: Delivered this many ms after the request …
    delay_ms: Natural | None = None
    #: … or at this time, ms since 1970 UTC.
    deliver_at_ms: Natural | None = None


class JsonSend(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A send: stored wholly or not at all."""

    messages: Annotated[tuple[JsonMessage, ...], msgspec.Meta(min_length=1)]


class JsonDelivered(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One message of an answer or a listing."""

    sequence: int
    pull_sequence: int | None = None
    attempt: int | None = None
    message_id: str = ""
    born_at_ms: int = 0
    expires_at_ms: int | None = None
    deliver_at_ms: int | None = None
    key: str | None = None
    tags: tuple[str, ...] = ()
    headers: dict[str, str] = {}
    body: msgspec.Raw | str | None = None
    body_base64: str | None = None
    record_base64: str | None = None
    error: str = ""


class JsonDeliveries(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a pull."""

    subject: str
    token: int
    lease_ms: int
    messages: list[JsonDelivered]
    stale: tuple[tuple[int, int, int], ...]


def json_to_frame(
    request: JsonSend, *, new_id: Callable[[], bytes], now_ms: int, latest_ms: int, limits: Limits
) -> tuple[bytes, tuple[str, ...]]:
    """The request as a message frame, and its message ids in the order of the request.

    Delays are counted from `now_ms`, by the clock that releases; the limit of due times from
    `latest_ms`.
    """
    records: dict[str, list[bytes]] = {}
    ids: list[str] = []
    for message in request.messages:
        message_id = (
            new_id()
            if message.message_id is None
            else parse_message_id(message.message_id, remedy=LEAVE_OUT)
        )
        ids.append(format_message_id(message_id))
        body_kind, body = _body_in(message)
        record = Record(
            message_id=message_id,
            subject=message.subject,
            body=body,
            body_kind=body_kind,
            key=message.key,
            tags=message.tags,
            headers=tuple(message.headers.items()),
            born_at_ms=now_ms,
            due_at_ms=_due_at_ms(message, now_ms, latest_ms, limits),
            expires_at_ms=message.expires_at_ms,
        )
        records.setdefault(message.subject, []).append(encode_record(record, limits))
    kind = _kind(request)
    return build_message_frame(records, kind=kind, limits=limits), tuple(ids)


def deliveries_to_json(given: HandOut) -> bytes:
    """The answer to a pull."""
    head = given.head
    places = (
        (run.first_sequence + index, run.attempt) for run in head.runs for index in range(run.count)
    )
    messages = [
        record_to_json(head.subject, record, sequence, pull_sequence, attempt)
        for pull_sequence, ((sequence, attempt), record) in enumerate(
            zip(places, given.records, strict=True), start=head.first_pull_sequence
        )
    ]
    return msgspec.json.encode(
        JsonDeliveries(
            subject=head.subject,
            token=head.token,
            lease_ms=head.lease_ms,
            messages=messages,
            stale=head.stale,
        )
    )


class JsonDead(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A dead letter, with its message if that was asked for and still exists."""

    subject: str
    group: str
    sequence: int
    attempts: int
    reason: str
    error: str
    at_ms: int
    history: tuple[PastAttempt, ...]
    message: JsonDelivered | None = None


def dead_to_json(letter: DeadLetterStatus) -> JsonDead:
    """One dead letter as JSON."""
    fields = msgspec.structs.asdict(letter)
    record = fields.pop("record")
    message = None if record is None else record_to_json(letter.subject, record, letter.sequence)
    return JsonDead(**fields, message=message)


def record_to_json(
    subject: str,
    data: bytes,
    sequence: int,
    pull_sequence: int | None = None,
    attempt: int | None = None,
) -> JsonDelivered:
    """One stored message as JSON."""
    try:
        record = decode_record(subject, data)
    except ProtocolError as error:
        return JsonDelivered(
            sequence=sequence,
            pull_sequence=pull_sequence,
            attempt=attempt,
            record_base64=_base64(data),
            error=str(error),
        )
    body = _body_out(record)
    return JsonDelivered(
        sequence=sequence,
        pull_sequence=pull_sequence,
        attempt=attempt,
        message_id=format_message_id(record.message_id),
        born_at_ms=record.born_at_ms,
        expires_at_ms=record.expires_at_ms,
        deliver_at_ms=record.due_at_ms,
        key=record.key,
        tags=record.tags,
        headers=dict(record.headers),
        body=body,
        body_base64=_base64(record.body) if body is None else None,
    )


def _kind(request: JsonSend) -> FrameKind:
    """One request is one frame, and delayed messages need frames of their own."""
    delayed = sum(map(_is_delayed, request.messages))
    if delayed not in (0, len(request.messages)):
        raise InvalidMessageError(
            field="messages",
            limit="all of them with delay_ms or deliver_at_ms, or none",
            value=f"{delayed} of {len(request.messages)}",
            remedy="Send two requests.",
        )
    return FrameKind.DELAYED if delayed else FrameKind.MESSAGES


def _is_delayed(message: JsonMessage) -> bool:
    return message.delay_ms is not None or message.deliver_at_ms is not None


def _due_at_ms(message: JsonMessage, now_ms: int, latest_ms: int, limits: Limits) -> int | None:
    if message.delay_ms is not None and message.deliver_at_ms is not None:
        raise InvalidMessageError(
            field="delay_ms",
            limit="delay_ms or deliver_at_ms",
            value="both",
            remedy="Give one of them.",
        )
    if message.delay_ms is not None:
        check_due(now_ms + message.delay_ms, now_ms, limits, field="delay_ms")
        return now_ms + message.delay_ms
    if message.deliver_at_ms is not None:
        check_due(message.deliver_at_ms, latest_ms, limits, field="deliver_at_ms")
    return message.deliver_at_ms


def _body_in(message: JsonMessage) -> tuple[BodyKind, bytes]:
    raw = bytes(message.body)
    if message.body_base64 is not None:
        if raw:
            raise InvalidMessageError(
                field="body",
                limit="body or body_base64",
                value="both",
                remedy="Give one of them.",
            )
        return BodyKind.BYTES, _from_base64(message.body_base64)
    if raw.startswith(b'"'):
        return BodyKind.TEXT, decode_json(raw, str).encode()
    if raw:
        decode_json(raw, object)  # it was not decoded (raw); a JSON answer must be able to hold it
    return (BodyKind.JSON, raw) if raw else (BodyKind.BYTES, b"")


def _body_out(record: Record) -> msgspec.Raw | str | None:
    """The body as a JSON value; None if it must be shown as bytes."""
    try:
        if record.body_kind is BodyKind.TEXT:
            return record.body.decode()
        if record.body_kind is BodyKind.JSON:
            record.body.decode()
            msgspec.json.decode(record.body)
            return msgspec.Raw(record.body)
    except (ValueError, RecursionError, msgspec.MsgspecError):
        return None
    return None


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise EncodingError(
            field="body_base64",
            limit="base64 with padding",
            value=shorten(text),
            remedy="Encode the bytes again.",
        ) from error
