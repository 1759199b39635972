"""Requests and answers of the broker's three hot routes, and how they become bytes.

One schema, two encodings: JSON (`application/json`) for people and other languages, and a CONTROL
frame around MessagePack (`application/vnd.qmq.frame`) with the frame's checksum. A send request is
a message frame itself and a pull's answer is a DELIVERIES frame (see `deliveries.py`).

Ranges are half open pairs of pull sequences. A *token* identifies the run of the broker that
delivered the messages: together with the pull sequence it identifies one delivery, also across
restarts and among all brokers.

Fields that came after the first version are left out of the bytes unless they are set (`UNSET`), so
that an older broker gets no unknown field.
"""

from __future__ import annotations

import struct
from typing import Annotated, Final, Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from qmq_client.wire.errors import EncodingError, ProtocolError
from qmq_client.wire.frame import FrameKind, build_frame, parse_frame
from qmq_client.wire.limits import NAME_BYTES_MAX
from qmq_client.wire.names import NAME_PATTERN
from qmq_client.wire.shown import shorten

FRAME_CONTENT_TYPE: Final = "application/vnd.qmq.frame"
JSON_CONTENT_TYPE: Final = "application/json"
CONTROL_BYTES_MAX: Final = 1024 * 1024
#: With a larger factor, the second wait would already be the longest one.
BACKOFF_FACTOR_MAX: Final = 100

_LENGTH: Final = struct.Struct(">I")

#: A count, sequence, offset or time: never negative, always within a signed 64-bit field.
Natural = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
#: Patterns of texts, for JSON schemas only: the decoder checks them with a more precise error.
NAME_FORM: Final = {"pattern": f"^{NAME_PATTERN}$", "maxLength": NAME_BYTES_MAX}
MESSAGE_ID_FORM: Final = {"pattern": "^[0-9a-f]{32}$"}
START_FORM: Final = {"pattern": "^(earliest|latest|(time|sequence):[0-9]{1,18})$"}
Name = Annotated[str, msgspec.Meta(extra_json_schema=NAME_FORM)]
MessageId = Annotated[str, msgspec.Meta(extra_json_schema=MESSAGE_ID_FORM)]
#: See `start.py`.
StartText = Annotated[str, msgspec.Meta(extra_json_schema=START_FORM)]
#: `first`, `next`: a half open range of pull sequences.
Range = tuple[Natural, Natural]


class Nack(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Return messages for redelivery."""

    range: Range
    #: Wait before the next delivery; None for the group's backoff.
    delay_ms: Natural | None = None
    #: The reason, for the history of the message; the broker shortens it.
    error: str = ""
    #: False: no handler started, or a stop of the consumer interrupted it, so this delivery is not
    #: an attempt. From the second such return of a message on, it waits at least a second.
    was_begun: bool | UnsetType = UNSET


class Reject(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Send messages to the group's dead letters now."""

    range: Range
    reason: str = ""


class Extend(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prolong leases: they end `lease_ms` from now."""

    range: Range
    lease_ms: Natural


class Settlement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Outcomes of messages delivered under one token."""

    token: Natural
    acks: tuple[Range, ...] = ()
    nacks: tuple[Nack, ...] = ()
    rejects: tuple[Reject, ...] = ()
    extends: tuple[Extend, ...] = ()


class Tags(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The filter of a group: messages with at least one tag of `any` and with all of `all`."""

    #: Empty: any message.
    any: tuple[Name, ...] = ()
    all: tuple[Name, ...] = ()


class Backoff(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The wait of a group before it redelivers a message: grows with each attempt, bounded."""

    first_ms: Natural = 1_000
    #: Each wait is the previous one multiplied by this.
    factor: Annotated[float, msgspec.Meta(ge=1, le=BACKOFF_FACTOR_MAX)] = 2.0
    max_ms: Natural = 600_000


#: Whether the group of a broadcast consumer is removed minutes after its last sign of life, or kept for days.
Broadcast = Literal["ephemeral", "named"]


class BroadcastMember(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The same with the identity of the process: two processes with one name would share its messages."""

    kind: Broadcast
    #: Random; each process chooses it when it starts.
    instance: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


class SettleRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settlements and extensions by one consumer of a group."""

    subject: Name
    group: Name
    consumer: Name
    settlements: tuple[Settlement, ...]
    #: As in the pull that delivered the messages.
    broadcast: Broadcast | UnsetType = UNSET


class SettleAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Which ranges were refused, because their lease had ended: (token, first, next)."""

    settled: Natural
    stale: tuple[tuple[Natural, Natural, Natural], ...] = ()


class PullRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ask for messages; may carry settlements of earlier ones."""

    # At most fifteen fields: from sixteen on MessagePack begins with another byte, even for fields
    # that are left out. Further fields go into a nested struct.

    subject: Name
    group: Name
    consumer: Name
    max_messages: Natural = 100
    max_bytes: Natural = 1024 * 1024
    #: How long the broker may hold the request while there is no message.
    wait_ms: Natural = 0
    #: How long the messages stay with this consumer without a sign of life.
    lease_ms: Natural = 30_000
    #: Deliveries of one message before it becomes a dead letter of the group.
    max_attempts: Natural = 16
    #: The starting point of a group that does not exist yet.
    start: StartText = "earliest"
    settlements: tuple[Settlement, ...] = ()
    #: Stored with the group: a pull with another filter is refused, and a pull without one uses the stored filter.
    tags: Tags | UnsetType = UNSET
    #: Deliver the next message of a key only when the previous one is settled; stored with the group.
    ordered: bool | UnsetType = UNSET
    #: Ack messages before delivery: each is delivered at most once, some perhaps never.
    at_most_once: bool | UnsetType = UNSET
    #: Make this consumer a group of its own: every consumer gets every message.
    broadcast: Broadcast | BroadcastMember | UnsetType = UNSET
    #: Stored with the group; the latest value counts.
    backoff: Backoff | UnsetType = UNSET


class SubjectPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where the records of one subject of a request were stored."""

    subject: str
    first_sequence: Natural
    count: Natural


class SendAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The messages of one request are accepted: stored as `durability` says."""

    #: Body CRC of the accepted frame: names the request that this answers, with all its ids.
    frame_crc: Natural
    #: Accepted messages, including those that an earlier request had stored.
    count: Natural
    #: How many of them were already stored and were not stored again.
    duplicates: Natural
    physical_offset: Natural
    stored_at_ms: Natural
    #: "durable": synced to the disk before this answer.
    durability: str
    places: tuple[SubjectPlace, ...] = ()
    #: Only in answer to JSON: the ids in the order of the request.
    message_ids: tuple[str, ...] = ()


#: Status and code of the answer to an unknown path, or to an unknown method of a path. A client
#: that receives one is newer than the broker; a missing subject or group has another code.
UNKNOWN_ROUTES: Final = {404: "unknown_path", 405: "method_not_allowed"}


class ErrorAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a request was refused; no part of it was carried out."""

    code: str
    message: str
    field: str = ""
    limit: str = ""
    value: str = ""
    remedy: str = ""
    #: The invalid message, if a single one is the cause.
    message_id: str = ""


T = TypeVar("T")


def encode_control(value: msgspec.Struct) -> bytes:
    """A request or answer as a CONTROL frame; raises `EncodingError` for a lone surrogate."""
    try:
        content = msgspec.msgpack.encode(value)
    except UnicodeEncodeError as error:
        raise _not_text(value) from error
    return build_frame(FrameKind.CONTROL, _LENGTH.pack(len(content)) + content)


def decode_control(data: bytes, kind: type[T]) -> T:
    """A request or answer of type `kind` from a CONTROL frame; raises `ProtocolError`."""
    header = parse_frame(data, frame_bytes_max=CONTROL_BYTES_MAX)
    if header.kind is not FrameKind.CONTROL:
        raise ProtocolError(f"a frame of kind {header.kind.name} is not a request", offset=5)
    return decode_msgpack(sized_part(data, header.head_bytes), kind)


def encode_json(value: msgspec.Struct) -> bytes:
    """A request or answer as JSON; raises `EncodingError` for a lone surrogate."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError as error:
        raise _not_text(value) from error


def decode_json(data: bytes, kind: type[T]) -> T:
    """A request or answer of type `kind` from JSON; raises `ProtocolError`."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"JSON: {error}") from error


def decode_msgpack(data: bytes, kind: type[T]) -> T:
    """A value of type `kind` from MessagePack; raises `ProtocolError`."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"MessagePack: {error}") from error


def _not_text(value: msgspec.Struct) -> EncodingError:
    return EncodingError(
        field=type(value).__name__,
        limit="text that can be encoded as UTF-8",
        value=shorten(value),
        remedy="Remove lone surrogates.",
    )


def sized_part(data: bytes, position: int) -> bytes:
    """The bytes after a 4-byte length at `position`; raises `ProtocolError` when cut short."""
    first = position + _LENGTH.size
    if first > len(data):
        raise ProtocolError("frame ends inside a length", offset=position)
    (length,) = _LENGTH.unpack_from(data, position)
    if first + length > len(data):
        raise ProtocolError(f"frame ends inside a part of {length} bytes", offset=position)
    return data[first : first + length]


#: Annotations are resolved at import, in one thread: msgspec would do it at the first use, and two
#: threads that do it at the same time end the process (see `qmq_client/typed.py`).
_READ_NOW: Final = [
    msgspec.json.Decoder(kind)
    for kind in (SettleRequest, SettleAnswer, PullRequest, SendAnswer, ErrorAnswer)
]
