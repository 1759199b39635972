"""The record: one encoded message, made by the producer and never changed afterwards.

::

    offset bytes field
    0      4     CRC-32C of the subject's bytes and of bytes 4 … end
    4      16    message id: producer instance 8, counter 8
    20     1     flags: bits 0-1 body kind (0 bytes, 1 text, 2 JSON); bit 2 delayed; bit 3 expires
    21     1     key length
    22     2     tags length
    24     2     headers length
    26     2     number of headers
    28     8     born at, ms since 1970 UTC, up to the year 9999
    36     8     due at, the same; only when flag bit 2 is set
    …            key (UTF-8), tags (joined by ','), headers (pairs: name length 1, value length 2,
                 name, value), expires at (8, only when flag bit 3 is set), body up to the record's end

Big-endian. Fixed fields first and body last, so that a reader can gather columns without decoding
records one by one. The record's length is in the frame. The subject is part of the checksum but not
of the record: it is in the frame once per run, and a record under another subject is detected.
Documented for people in `docs/format/record.md`.

Names of headers and combinations of tags, of which an application has few, are checked and converted
once and then cached, in bounds.

The tag hash is a 64-bit filter for the tags of a message. Each tag sets two bits chosen
by its CRC-32C (a Bloom signature), so that one 8-byte field of the consume queue answers AND and OR
filters over several tags; a match is confirmed on the tags. 0 means no tags.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from enum import IntEnum
from functools import lru_cache
from operator import itemgetter
from typing import Final, TypeAlias

import msgspec
from msgspec.structs import astuple

from qmq_client.wire import packing
from qmq_client.wire.checksum import crc32c
from qmq_client.wire.errors import (
    ChecksumError,
    EncodingError,
    InvalidMessageError,
    InvalidNameError,
    ProtocolError,
    TooLargeError,
    UnknownVersionError,
)
from qmq_client.wire.limits import DEFAULT_LIMITS, KEY_BYTES_MAX, Limits
from qmq_client.wire.message_id import MESSAGE_ID_BYTES
from qmq_client.wire.names import check_name, is_name
from qmq_client.wire.shown import shorten


@lru_cache(maxsize=4096)
def _bits(tag: bytes) -> int:
    value = crc32c(tag)
    return (1 << (value & 63)) | (1 << ((value >> 6) & 63))


def tag_hash(tags: Iterable[bytes]) -> int:
    """The hash of a message with these encoded tags, 0 … 2⁶⁴-1."""
    value = 0
    for tag in tags:
        value |= _bits(tag)
    return value


#: Combinations of tags that are cached; an application has few, a frame has thousands of messages.
_JOINED_KEPT_MAX: Final = 1024


@lru_cache(maxsize=_JOINED_KEPT_MAX)
def joined_tags_hash(joined: bytes) -> int:
    """The hash of tags in their stored form: encoded and joined by commas."""
    return tag_hash(joined.split(b","))


_PAIR_BYTES: Final = packing.PAIR.size
_HEADER_NAMES_KEPT_MAX: Final = 4096
_TAGS_KEPT_MAX: Final = 1024
#: Texts longer than a few names together are not cached, because they would fill the memory.
_TAGS_KEPT_BYTES_MAX: Final = 1024


def encode_key(key: str) -> bytes:
    """The key's bytes."""
    try:
        data = key.encode()
    except (UnicodeEncodeError, AttributeError) as error:
        raise _not_text("key", key) from error
    if not data:
        raise InvalidMessageError(
            field="key",
            limit=f"1 to {KEY_BYTES_MAX} bytes of UTF-8",
            value="an empty text",
            remedy="Give None for a message without a key.",
        )
    if len(data) > KEY_BYTES_MAX:
        raise _too_large("key", f"{KEY_BYTES_MAX} bytes of UTF-8", f"{len(data)} bytes")
    if (
        0 in data
    ):  # PostgreSQL cannot store it in a text, and would fail in the middle of a transaction
        raise InvalidMessageError(
            field="key",
            limit="text without the character NUL",
            value=shorten(key),
            remedy="Remove it, or convert the key to hexadecimal digits.",
        )
    return data


def encode_tags(tags: tuple[str, ...], limits: Limits) -> bytes:
    """The tags, joined by commas. Requires: at least one."""
    if len(tags) > limits.tags:
        raise _too_large("tags", f"{limits.tags} tags", f"{len(tags)} tags")
    try:
        return _join_tags(tags)
    except TypeError:  # one of them is not a text
        return _join_tags.__wrapped__(tags)


@lru_cache(maxsize=_TAGS_KEPT_MAX)
def _join_tags(tags: tuple[str, ...]) -> bytes:
    return ",".join([check_name(tag, field="tag") for tag in tags]).encode()


def encode_headers(headers: tuple[tuple[str, str], ...], limits: Limits) -> bytes:
    """The headers, pair by pair. Requires: at least one."""
    if len(headers) > limits.headers:
        raise _too_large("headers", f"{limits.headers} headers", f"{len(headers)} headers")
    parts: list[bytes] = []
    for name, value in headers:
        name_data = _encode_header_name(name)
        try:
            value_data = value.encode()
        except (UnicodeEncodeError, AttributeError) as error:
            raise _not_text(f"header {name}", value) from error
        if len(value_data) > limits.headers_bytes:
            raise _too_large(
                f"header {name}", f"{limits.headers_bytes} bytes", f"{len(value_data)} bytes"
            )
        parts += (packing.pack_pair(len(name_data), len(value_data)), name_data, value_data)
    if len(headers) > 1 and len(dict(headers)) != len(headers):
        raise InvalidMessageError(
            field="headers",
            limit="each name once",
            value=f"{len(headers)} headers with {len(dict(headers))} names",
            remedy="Join the values under one name.",
        )
    data = b"".join(parts)
    if len(data) > limits.headers_bytes:
        raise _too_large("headers", f"{limits.headers_bytes} bytes in all", f"{len(data)} bytes")
    return data


@lru_cache(maxsize=_HEADER_NAMES_KEPT_MAX)
def _encode_header_name(name: str) -> bytes:
    return check_name(name, field="header name").encode()


def decode_tags(data: bytes, first: int, after: int) -> tuple[str, ...]:
    """The tags in these bytes of a record."""
    joined = data[first:after]
    try:
        tags = (
            _split_tags(joined)
            if len(joined) <= _TAGS_KEPT_BYTES_MAX
            else _split_tags.__wrapped__(joined)
        )
    except UnicodeDecodeError as error:
        raise _not_utf8(first) from error
    if not tags:
        raise ProtocolError("record has a tag that is not a name", offset=first)
    return tags


@lru_cache(maxsize=_TAGS_KEPT_MAX)
def _split_tags(joined: bytes) -> tuple[str, ...]:
    """The tags in a record; none if one of them is not a name."""
    tags = tuple(joined.decode().split(","))
    return tags if all(map(is_name, tags)) else ()


def decode_headers(
    data: bytes, first: int, after: int, header_count: int
) -> tuple[tuple[str, str], ...]:
    """This many headers from these bytes of a record."""
    headers: list[tuple[str, str]] = []
    position = first
    try:
        for _ in range(header_count):
            name_position = position + _PAIR_BYTES
            if name_position > after:
                raise ProtocolError("record ends inside a header", offset=position)
            name_bytes, value_bytes = packing.unpack_pair(data, position)
            value_position = name_position + name_bytes
            next_position = value_position + value_bytes
            if next_position > after:
                raise ProtocolError("record ends inside a header", offset=position)
            name = _decode_header_name(data[name_position:value_position])
            if not name:
                raise ProtocolError("record has an invalid header name", offset=position)
            headers.append((name, data[value_position:next_position].decode()))
            position = next_position
    except UnicodeDecodeError as error:
        raise _not_utf8(position) from error
    if position != after:
        raise ProtocolError("record has bytes after its headers", offset=position)
    if header_count > 1 and len(dict(headers)) != header_count:
        raise ProtocolError("record has a header name twice", offset=first)
    return tuple(headers)


@lru_cache(maxsize=_HEADER_NAMES_KEPT_MAX)
def _decode_header_name(data: bytes) -> str:
    """The name; empty if it is invalid."""
    name = data.decode()
    return name if is_name(name) else ""


def decode_key(data: bytes, first: int, after: int) -> str:
    """The key in these bytes of a record; raises `ProtocolError`."""
    try:
        key = data[first:after].decode()
    except UnicodeDecodeError as error:
        raise _not_utf8(first) from error
    if "\0" in key:
        raise ProtocolError("key of a record has the character NUL", offset=first)
    return key


def _not_utf8(offset: int) -> ProtocolError:
    return ProtocolError("text of a record is not UTF-8", offset=offset)


def _not_text(field: str, value: object) -> EncodingError:
    return EncodingError(
        field=field,
        limit="text that can be encoded as UTF-8",
        value=shorten(value),
        remedy="Remove lone surrogates, or convert the value to text.",
    )


def _too_large(field: str, limit: str, value: str) -> TooLargeError:
    return TooLargeError(field=field, limit=limit, value=value, remedy="Make it smaller.")


_CRC: Final = struct.Struct(">I")
_CRC_BYTES: Final = _CRC.size
_DUE: Final = struct.Struct(">Q")
_EXPIRES: Final = struct.Struct(">Q")
#: Flags, key length and tags length: the fields to find the tags.
_TO_TAGS: Final = struct.Struct(">BBH")

RECORD_FIXED_BYTES: Final = _CRC.size + packing.HEAD.size
#: The field of a delayed record between the fixed part and its key.
DUE_BYTES: Final = _DUE.size
MESSAGE_ID_POSITION: Final = 4
FLAGS_POSITION: Final = 20
#: One byte: the length of the key, 0 for none.
KEY_BYTES_POSITION: Final = 21
_SHAPE_TO_TAGS: Final = itemgetter(slice(FLAGS_POSITION, FLAGS_POSITION + _TO_TAGS.size))
BORN_POSITION: Final = 28
DELAYED_FLAG: Final = 0b100
EXPIRES_FLAG: Final = 0b1000
#: The last millisecond of the year 9999: the latest of `datetime`.
TIME_MAX_MS: Final = 253_402_300_799_999
#: Cached checksums of subjects: each begins the checksum of every record under it.
_SUBJECTS_KEPT_MAX: Final = 4096


class BodyKind(IntEnum):
    """The kind of a body, so that the consumer gets the same type as the producer passed."""

    BYTES = 0
    TEXT = 1
    JSON = 2


#: The body kind of each known value of the flags.
_BODY_KINDS: Final = {
    kind | delayed | expires: kind
    for kind in BodyKind
    for delayed in (0, DELAYED_FLAG)
    for expires in (0, EXPIRES_FLAG)
}
#: The known values; a record with another one is of a later version.
KNOWN_FLAGS: Final = bytes(_BODY_KINDS)


class Record(msgspec.Struct, frozen=True, gc=False):
    """One message as values; `encode_record` and `decode_record` turn it into bytes and back.

    A struct, because one is made for every message and a frozen dataclass costs ten times as much.
    It is not tracked by the garbage collector, because it cannot be part of a reference cycle.
    """

    #: 16 bytes, see `message_id.py`.
    message_id: bytes
    subject: str
    body: bytes
    #: When the message was made, by the producer's clock.
    born_at_ms: int
    body_kind: BodyKind = BodyKind.BYTES
    key: str | None = None
    tags: tuple[str, ...] = ()
    #: Name and value pairs in the order given; names are unique.
    headers: tuple[tuple[str, str], ...] = ()
    #: The due time; None for at once.
    due_at_ms: int | None = None
    #: The expiry time, after which it becomes a dead letter instead of being delivered.
    expires_at_ms: int | None = None


#: The values of a `Record` in its order, for callers that need no `Record`: creating one takes half as
#: long as encoding a small message by compiled code.
Fields: TypeAlias = tuple[
    bytes,
    str,
    bytes,
    int,
    BodyKind,
    str | None,
    tuple[str, ...],
    tuple[tuple[str, str], ...],
    int | None,
    int | None,
]


def encode_record(record: Record, limits: Limits = DEFAULT_LIMITS) -> bytes:
    """The record's bytes. Raises `InvalidMessageError` with the field and its limit."""
    return encode_fields(astuple(record), limits)


def encode_fields(values: Fields, limits: Limits) -> bytes:
    """The bytes of a record with these values; raises the same errors as `encode_record`."""
    (
        message_id,
        subject,
        body,
        born_at_ms,
        body_kind,
        key_text,
        tag_names,
        header_pairs,
        due_at_ms,
        expires_at_ms,
    ) = values
    try:
        subject_crc = _name_crc(subject)
    except TypeError:  # it has no hash, so it is not a text
        subject_crc = crc32c(check_name(subject, field="subject").encode())
    if len(message_id) != MESSAGE_ID_BYTES:
        raise _no_id(message_id)
    key = b"" if key_text is None else encode_key(key_text)
    tags = encode_tags(tag_names, limits) if tag_names else b""
    headers = encode_headers(header_pairs, limits) if header_pairs else b""
    flags: int = body_kind
    due = expires = b""
    if due_at_ms is not None:
        flags |= DELAYED_FLAG
        due = _DUE.pack(_check_time(due_at_ms, field="due_at_ms"))
    if expires_at_ms is not None:
        flags |= EXPIRES_FLAG
        expires = _EXPIRES.pack(_check_time(expires_at_ms, field="expires_at_ms"))
    if not 0 <= born_at_ms <= TIME_MAX_MS:
        raise _no_time(born_at_ms, field="born_at_ms")
    head = packing.pack_head(
        message_id, flags, len(key), len(tags), len(headers), len(header_pairs), born_at_ms
    )
    if key or tags or headers or due or expires:
        head = b"".join((head, due, key, tags, headers, expires))
    record_bytes = _CRC_BYTES + len(head) + len(body)
    if record_bytes > limits.record_bytes:
        raise TooLargeError(
            field="message",
            limit=f"{limits.record_bytes} bytes",
            value=f"{record_bytes} bytes",
            remedy="Make it smaller.",
        )
    return packing.seal(subject_crc, head, body)


def decode_record(subject: str, data: bytes) -> Record:
    """Decode a message from these bytes, and verify its checksum.

    Raises `ChecksumError` when the bytes were altered or belong to another subject, `UnknownVersionError`
    when only a later version can read them, and `ProtocolError` when they were never a record.
    """
    return Record(*decode_fields(subject, data))


def decode_fields(subject: str, data: bytes) -> Fields:
    """The values of the record of these bytes; raises the same errors as `decode_record`."""
    if type(data) is not bytes:
        raise TypeError(f"a record is bytes, not {type(data).__name__}: its body is a part of them")
    record = data  # a second name, whose type is in `record.pxd`
    if len(record) < RECORD_FIXED_BYTES:
        raise _too_short(record)
    try:
        seed = _name_crc(subject)
    except (InvalidNameError, TypeError) as error:
        raise _no_subject(subject) from error
    if not packing.is_sealed(seed, record):
        raise _altered(subject)
    flags, key_bytes, tags_bytes, headers_bytes, header_count, born_at_ms = packing.unpack_head(
        record
    )
    body_kind = _BODY_KINDS.get(flags)
    if body_kind is None:
        raise UnknownVersionError(f"record flags {flags:#04x} are not known", offset=FLAGS_POSITION)
    position = RECORD_FIXED_BYTES
    due_at_ms = expires_at_ms = None
    if flags & DELAYED_FLAG:
        due_at_ms = _decode_time(record, position, "due")
        position += _DUE.size
    if born_at_ms > TIME_MAX_MS:
        raise ProtocolError("record has a time beyond the year 9999", offset=BORN_POSITION)
    tags_position = position + key_bytes
    headers_position = tags_position + tags_bytes
    body_position = after_headers = headers_position + headers_bytes
    if flags & EXPIRES_FLAG:
        expires_at_ms = _decode_time(record, after_headers, "expiry")
        body_position += _EXPIRES.size
    if body_position > len(record):
        raise ProtocolError("record ends before its body", offset=len(record))
    return (
        record[MESSAGE_ID_POSITION:FLAGS_POSITION],
        subject,
        record[body_position:],
        born_at_ms,
        body_kind,
        decode_key(record, position, tags_position) if key_bytes else None,
        decode_tags(record, tags_position, headers_position) if tags_bytes else (),
        decode_headers(record, headers_position, after_headers, header_count)
        if header_count or headers_bytes
        else (),
        due_at_ms,
        expires_at_ms,
    )


def verify_record(subject: str, data: bytes) -> None:
    """Verify only the checksum; raises `ProtocolError` if it does not match."""
    if len(data) < RECORD_FIXED_BYTES:
        raise _too_short(data)
    try:
        seed = _name_crc(subject)
    except (InvalidNameError, TypeError) as error:
        raise _no_subject(subject) from error
    if not packing.is_sealed(seed, data):
        raise _altered(subject)


def record_message_id(data: bytes) -> bytes:
    """The message id of an encoded record, without decoding the rest."""
    return bytes(data[MESSAGE_ID_POSITION : MESSAGE_ID_POSITION + MESSAGE_ID_BYTES])


def record_crc(data: bytes) -> int:
    """The stored checksum of an encoded record; equal for the same id and content."""
    value: int = _CRC.unpack_from(data)[0]
    return value


def record_tag_hash(data: bytes) -> int:
    """The tag hash of an encoded record. Requires: a record made by `encode_record`."""
    flags, key_bytes, tags_bytes = _TO_TAGS.unpack_from(data, FLAGS_POSITION)
    if not tags_bytes:
        return 0
    first = RECORD_FIXED_BYTES + (_DUE.size if flags & DELAYED_FLAG else 0) + key_bytes
    return joined_tags_hash(data[first : first + tags_bytes])


def record_tag_hashes(records: Sequence[bytes]) -> list[int]:
    """The tag hash of each record. Requires: at least one, each made by `encode_record`.

    If keys and tags of all records have the same lengths, as mostly for one kind of event, it needs
    no Python step per record.
    """
    shapes = set(map(_SHAPE_TO_TAGS, records))
    if len(shapes) > 1:
        return list(map(record_tag_hash, records))
    flags, key_bytes, tags_bytes = _TO_TAGS.unpack(shapes.pop())
    if not tags_bytes:
        return [0] * len(records)
    first = RECORD_FIXED_BYTES + (_DUE.size if flags & DELAYED_FLAG else 0) + key_bytes
    return list(map(joined_tags_hash, map(itemgetter(slice(first, first + tags_bytes)), records)))


def record_key(data: bytes) -> bytes:
    """The key of an encoded record, empty for none, without decoding the rest."""
    first = RECORD_FIXED_BYTES + (_DUE.size if data[FLAGS_POSITION] & DELAYED_FLAG else 0)
    return bytes(data[first : first + data[KEY_BYTES_POSITION]])


def is_delayed_record(data: bytes) -> bool:
    """Whether an encoded record carries a due time."""
    return bool(data[FLAGS_POSITION] & DELAYED_FLAG)


def _no_id(message_id: bytes) -> InvalidMessageError:
    return InvalidMessageError(
        field="message_id",
        limit=f"{MESSAGE_ID_BYTES} bytes",
        value=f"{len(message_id)} bytes",
        remedy="Leave it out to have one made.",
    )


def _too_short(data: bytes) -> ProtocolError:
    return ProtocolError(f"record of {len(data)} bytes is shorter than {RECORD_FIXED_BYTES}")


def _altered(subject: str) -> ChecksumError:
    return ChecksumError(f"record does not fit its checksum under subject {subject}")


def _no_subject(subject: object) -> ProtocolError:
    return ProtocolError(f"subject {shorten(subject)} is not a name")


@lru_cache(maxsize=_SUBJECTS_KEPT_MAX)
def _name_crc(subject: str) -> int:
    """The checksum of a subject's bytes; raises `InvalidNameError`."""
    return crc32c(check_name(subject, field="subject").encode())


def _decode_time(data: bytes, position: int, what: str) -> int:
    if len(data) < position + _DUE.size:
        raise ProtocolError(f"record ends inside its {what} time", offset=position)
    time_ms: int = _DUE.unpack_from(data, position)[0]
    if time_ms > TIME_MAX_MS:
        raise ProtocolError("record has a time beyond the year 9999", offset=position)
    return time_ms


def _check_time(time_ms: int, *, field: str) -> int:
    if not 0 <= time_ms <= TIME_MAX_MS:
        raise _no_time(time_ms, field=field)
    return time_ms


def _no_time(time_ms: int, *, field: str) -> InvalidMessageError:
    return InvalidMessageError(
        field=field,
        limit=f"0 to {TIME_MAX_MS} ms since 1970",
        value=shorten(time_ms),
        remedy="Give a time from 1970 to 9999 in milliseconds.",
    )
