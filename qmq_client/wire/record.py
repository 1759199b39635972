"""The record: one encoded message, made by the producer and never changed by anybody after.

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
records one by one. The record's length stands in the frame. The subject is part of the checksum
but not of the record: it stands once per run in the frame, and a record delivered under another
subject is found out. Documented for people in `docs/format/record.md`.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from functools import lru_cache
from typing import Final

import msgspec

from qmq_client.wire.checksum import crc32c
from qmq_client.wire.errors import (
    ChecksumError,
    EncodingError,
    InvalidMessageError,
    ProtocolError,
    TooLargeError,
)
from qmq_client.wire.limits import DEFAULT_LIMITS, KEY_BYTES_MAX, Limits
from qmq_client.wire.message_id import MESSAGE_ID_BYTES
from qmq_client.wire.names import check_name, is_name, shorten
from qmq_client.wire.tags import joined_tags_hash

_FIXED: Final = struct.Struct(">I16sBBHHHQ")
_AFTER_CRC: Final = struct.Struct(">16sBBHHHQ")
_CRC: Final = struct.Struct(">I")
_DUE: Final = struct.Struct(">Q")
_EXPIRES: Final = struct.Struct(">Q")
_PAIR: Final = struct.Struct(">BH")
#: Flags, key length and tags length: what finding the tags needs.
_TO_TAGS: Final = struct.Struct(">BBH")

RECORD_FIXED_BYTES: Final = _FIXED.size
#: What a delayed record has between the fixed part and its key.
DUE_BYTES: Final = _DUE.size
MESSAGE_ID_POSITION: Final = 4
FLAGS_POSITION: Final = 20
#: One byte: how long the key is, 0 for none.
KEY_BYTES_POSITION: Final = 21
BORN_POSITION: Final = 28
_BODY_KIND_MASK: Final = 0b011
DELAYED_FLAG: Final = 0b100
EXPIRES_FLAG: Final = 0b1000
_KNOWN_FLAGS: Final = _BODY_KIND_MASK | DELAYED_FLAG | EXPIRES_FLAG
#: The last millisecond of the year 9999: the latest that `datetime` can say.
TIME_MAX_MS: Final = 253_402_300_799_999
#: Checksums of subjects kept at hand: each begins the checksum of every record under it.
_SUBJECTS_KEPT_MAX: Final = 4096


class BodyKind(IntEnum):
    """How the body's bytes came to be, so that the consumer sees what the producer gave."""

    BYTES = 0
    TEXT = 1
    JSON = 2


_BODY_KINDS: Final = tuple(BodyKind)


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One message as values; `encode_record` and `decode_record` turn it into bytes and back.

    A struct, because one is made for every message and a frozen dataclass costs ten times as much.
    """

    #: 16 bytes, see `message_id.py`.
    message_id: bytes
    subject: str
    body: bytes
    body_kind: BodyKind = BodyKind.BYTES
    key: str | None = None
    tags: tuple[str, ...] = ()
    #: Name and value pairs in the order given; names are unique.
    headers: tuple[tuple[str, str], ...] = ()
    #: When the message was made, by the producer's clock.
    born_at_ms: int
    #: When it may be delivered; None for at once.
    due_at_ms: int | None = None
    #: When it is of no use any more and becomes a dead letter instead of being delivered.
    expires_at_ms: int | None = None


def encode_record(record: Record, limits: Limits = DEFAULT_LIMITS) -> bytes:
    """The record's bytes. Raises `InvalidMessageError` naming what breaks which limit."""
    subject_crc = _subject_crc(check_name(record.subject, field="subject"))
    if len(record.message_id) != MESSAGE_ID_BYTES:
        raise InvalidMessageError(
            field="message_id",
            limit=f"{MESSAGE_ID_BYTES} bytes",
            value=f"{len(record.message_id)} bytes",
            remedy="Leave it out to have one made.",
        )
    key = _encode_key(record.key)
    tags = _encode_tags(record.tags, limits)
    headers = _encode_headers(record.headers, limits)
    flags = int(record.body_kind)
    due = expires = b""
    if record.due_at_ms is not None:
        flags |= DELAYED_FLAG
        due = _DUE.pack(_check_time(record.due_at_ms, field="due_at_ms"))
    if record.expires_at_ms is not None:
        flags |= EXPIRES_FLAG
        expires = _EXPIRES.pack(_check_time(record.expires_at_ms, field="expires_at_ms"))
    fixed = _AFTER_CRC.pack(
        record.message_id,
        flags,
        len(key),
        len(tags),
        len(headers),
        len(record.headers),
        _check_time(record.born_at_ms, field="born_at_ms"),
    )
    content = b"".join((fixed, due, key, tags, headers, expires, record.body))
    record_bytes = len(content) + _CRC.size
    if record_bytes > limits.record_bytes:
        raise _too_large("message", f"{limits.record_bytes} bytes", f"{record_bytes} bytes")
    return _CRC.pack(crc32c(content, subject_crc)) + content


def decode_record(subject: str, data: bytes) -> Record:
    """The message of these bytes, its checksum verified.

    Raises `ChecksumError` when the bytes were altered or belong to another subject, and
    `ProtocolError` when they were never a record; nothing else.
    """
    verify_record(subject, data)
    _, message_id, flags, key_bytes, tags_bytes, headers_bytes, header_count, born_at_ms = (
        _FIXED.unpack_from(data)
    )
    if flags & ~_KNOWN_FLAGS or flags & _BODY_KIND_MASK > BodyKind.JSON:
        raise ProtocolError(f"record flags {flags:#04x} are not known", offset=FLAGS_POSITION)
    position = RECORD_FIXED_BYTES
    due_at_ms = expires_at_ms = None
    if flags & DELAYED_FLAG:
        due_at_ms = _decode_time(data, position, "due")
        position += _DUE.size
    if born_at_ms > TIME_MAX_MS:
        raise ProtocolError("record has a time beyond the year 9999", offset=BORN_POSITION)
    tags_position = position + key_bytes
    headers_position = tags_position + tags_bytes
    body_position = after_headers = headers_position + headers_bytes
    if flags & EXPIRES_FLAG:
        expires_at_ms = _decode_time(data, after_headers, "expiry")
        body_position += _EXPIRES.size
    if body_position > len(data):
        raise ProtocolError("record ends before its body", offset=len(data))
    return Record(
        message_id=message_id,
        subject=subject,
        body=data[body_position:],
        body_kind=_BODY_KINDS[flags & _BODY_KIND_MASK],
        key=_decode_key(data, position, tags_position) if key_bytes else None,
        tags=_decode_tags(data, tags_position, headers_position) if tags_bytes else (),
        headers=_decode_headers(data, headers_position, after_headers, header_count),
        born_at_ms=born_at_ms,
        due_at_ms=due_at_ms,
        expires_at_ms=expires_at_ms,
    )


def verify_record(subject: str, data: bytes) -> None:
    """Check the checksum alone; raises `ProtocolError` when it does not fit."""
    if len(data) < RECORD_FIXED_BYTES:
        raise ProtocolError(f"record of {len(data)} bytes is shorter than {RECORD_FIXED_BYTES}")
    if not is_name(subject):
        raise ProtocolError(f"subject {shorten(subject)} is not a name")
    if crc32c(data[_CRC.size :], _subject_crc(subject)) != _CRC.unpack_from(data)[0]:
        raise ChecksumError(f"record checksum under subject {subject}")


def record_message_id(data: bytes) -> bytes:
    """The message id of an encoded record, without decoding the rest."""
    return bytes(data[MESSAGE_ID_POSITION : MESSAGE_ID_POSITION + MESSAGE_ID_BYTES])


def record_crc(data: bytes) -> int:
    """The stored checksum of an encoded record: equal for equal content of one id."""
    value: int = _CRC.unpack_from(data)[0]
    return value


def record_tag_hash(data: bytes) -> int:
    """The tag hash of an encoded record. Requires: a record made by `encode_record`."""
    flags, key_bytes, tags_bytes = _TO_TAGS.unpack_from(data, FLAGS_POSITION)
    if not tags_bytes:
        return 0
    first = RECORD_FIXED_BYTES + (_DUE.size if flags & DELAYED_FLAG else 0) + key_bytes
    return joined_tags_hash(data[first : first + tags_bytes])


def record_key(data: bytes, position: int = 0) -> bytes:
    """The key of the encoded record at `position`, empty for none, without decoding the rest."""
    first = position + RECORD_FIXED_BYTES
    if data[position + FLAGS_POSITION] & DELAYED_FLAG:
        first += _DUE.size
    return bytes(data[first : first + data[position + KEY_BYTES_POSITION]])


def is_delayed_record(data: bytes) -> bool:
    """Whether an encoded record carries a due time."""
    return bool(data[FLAGS_POSITION] & DELAYED_FLAG)


@lru_cache(maxsize=_SUBJECTS_KEPT_MAX)
def _subject_crc(subject: str) -> int:
    return crc32c(subject.encode())


def _encode_key(key: str | None) -> bytes:
    if key is None:
        return b""
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
    if 0 in data:  # PostgreSQL has no text with it, and finds out in the middle of a transaction
        raise InvalidMessageError(
            field="key",
            limit="text without the character NUL",
            value=shorten(key),
            remedy="Take it out, or convert the key to hexadecimal digits.",
        )
    return data


def _encode_tags(tags: tuple[str, ...], limits: Limits) -> bytes:
    if not tags:
        return b""
    if len(tags) > limits.tags:
        raise _too_large("tags", f"{limits.tags} tags", f"{len(tags)} tags")
    return ",".join([check_name(tag, field="tag") for tag in tags]).encode()


def _encode_headers(headers: tuple[tuple[str, str], ...], limits: Limits) -> bytes:
    if not headers:
        return b""
    if len(headers) > limits.headers:
        raise _too_large("headers", f"{limits.headers} headers", f"{len(headers)} headers")
    parts: list[bytes] = []
    for name, value in headers:
        name_data = check_name(name, field="header name").encode()
        try:
            value_data = value.encode()
        except (UnicodeEncodeError, AttributeError) as error:
            raise _not_text(f"header {name}", value) from error
        if len(value_data) > limits.headers_bytes:
            raise _too_large(
                f"header {name}", f"{limits.headers_bytes} bytes", f"{len(value_data)} bytes"
            )
        parts += (_PAIR.pack(len(name_data), len(value_data)), name_data, value_data)
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


def _decode_tags(data: bytes, first: int, after: int) -> tuple[str, ...]:
    tags = tuple(_decode_text(data, first, after).split(","))
    if not all(map(is_name, tags)):
        raise ProtocolError("record has a tag that is not a name", offset=first)
    return tags


def _decode_headers(
    data: bytes, first: int, after: int, header_count: int
) -> tuple[tuple[str, str], ...]:
    headers: dict[str, str] = {}
    position = first
    for _ in range(header_count):
        name_position = position + _PAIR.size
        if name_position > after:
            raise ProtocolError("record ends inside a header", offset=position)
        name_bytes, value_bytes = _PAIR.unpack_from(data, position)
        value_position = name_position + name_bytes
        next_position = value_position + value_bytes
        if next_position > after:
            raise ProtocolError("record ends inside a header", offset=position)
        name = _decode_text(data, name_position, value_position)
        if not is_name(name) or name in headers:
            raise ProtocolError(
                "record has a header name twice or that is no name", offset=position
            )
        headers[name] = _decode_text(data, value_position, next_position)
        position = next_position
    if position != after:
        raise ProtocolError("record has bytes behind its headers", offset=position)
    return tuple(headers.items())


def _decode_key(data: bytes, first: int, after: int) -> str:
    if 0 in data[first:after]:
        raise ProtocolError("key of a record has the character NUL", offset=first)
    return _decode_text(data, first, after)


def _decode_time(data: bytes, position: int, what: str) -> int:
    if len(data) < position + _DUE.size:
        raise ProtocolError(f"record ends inside its {what} time", offset=position)
    time_ms: int = _DUE.unpack_from(data, position)[0]
    if time_ms > TIME_MAX_MS:
        raise ProtocolError("record has a time beyond the year 9999", offset=position)
    return time_ms


def _decode_text(data: bytes, first: int, after: int) -> str:
    try:
        return data[first:after].decode()
    except UnicodeDecodeError as error:
        raise ProtocolError("text of a record is not UTF-8", offset=first) from error


def _not_text(field: str, value: object) -> EncodingError:
    return EncodingError(
        field=field,
        limit="text that can be encoded as UTF-8",
        value=shorten(value),
        remedy="Remove lone surrogates, or convert the value to text.",
    )


def _check_time(time_ms: int, *, field: str) -> int:
    if not 0 <= time_ms <= TIME_MAX_MS:
        raise InvalidMessageError(
            field=field,
            limit=f"0 to {TIME_MAX_MS} ms since 1970",
            value=shorten(time_ms),
            remedy="Give a time from 1970 to 9999 in milliseconds.",
        )
    return time_ms


def _too_large(field: str, limit: str, value: str) -> TooLargeError:
    return TooLargeError(field=field, limit=limit, value=value, remedy="Make it smaller.")
