"""The record: one encoded message, made by the producer and never changed by anybody after.

::

    offset bytes field
    0      4     CRC-32C of the subject's bytes and of bytes 4 … end
    4      16    message id: producer instance 8, counter 8
    20     1     flags: bits 0-1 body kind (0 bytes, 1 text, 2 JSON); bit 2 delayed
    21     1     key length
    22     2     tags length
    24     2     headers length
    26     2     number of headers
    28     8     born at, ms since 1970 UTC
    36     8     due at, ms since 1970 UTC; only when flag bit 2 is set
    …            key (UTF-8), tags (joined by ','), headers (pairs: name length 1, value length 2,
                 name, value), body up to the record's end

Big-endian. Fixed fields first and body last, so that a reader can gather columns without decoding
records one by one. The record's length stands in the frame. The subject is part of the checksum
but not of the record: it stands once per run in the frame, and a record delivered under another
subject is found out. Documented for people in `docs/format/record.md`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from qmq_client.wire.checksum import crc32c
from qmq_client.wire.errors import ChecksumError, EncodingError, ProtocolError, TooLargeError
from qmq_client.wire.limits import DEFAULT_LIMITS, KEY_BYTES_MAX, Limits
from qmq_client.wire.message_id import MESSAGE_ID_BYTES
from qmq_client.wire.names import check_name, is_name, shorten
from qmq_client.wire.tags import tag_hash

_FIXED: Final = struct.Struct(">I16sBBHHHQ")
_AFTER_CRC: Final = struct.Struct(">16sBBHHHQ")
_CRC: Final = struct.Struct(">I")
_DUE: Final = struct.Struct(">Q")
_PAIR: Final = struct.Struct(">BH")

RECORD_FIXED_BYTES: Final = _FIXED.size
MESSAGE_ID_POSITION: Final = 4
_FLAGS_POSITION: Final = 20
_BODY_KIND_MASK: Final = 0b011
_DELAYED_FLAG: Final = 0b100
_TIME_MAX_MS: Final = 2**63 - 1


class BodyKind(IntEnum):
    """How the body's bytes came to be, so that the consumer sees what the producer gave."""

    BYTES = 0
    TEXT = 1
    JSON = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One message as values; `encode_record` and `decode_record` turn it into bytes and back."""

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


def encode_record(record: Record, limits: Limits = DEFAULT_LIMITS) -> bytes:
    """The record's bytes. Raises `InvalidMessageError` naming what breaks which limit."""
    subject = check_name(record.subject, field="subject").encode()
    if len(record.message_id) != MESSAGE_ID_BYTES:
        raise _refuse("message_id", f"{MESSAGE_ID_BYTES} bytes", f"{len(record.message_id)} bytes")
    key = _encode_key(record.key)
    tags = _encode_tags(record.tags, limits)
    headers = _encode_headers(record.headers, limits)
    flags = int(record.body_kind)
    due = b""
    if record.due_at_ms is not None:
        flags |= _DELAYED_FLAG
        due = _DUE.pack(_check_time(record.due_at_ms, field="due_at_ms"))
    fixed = _AFTER_CRC.pack(
        record.message_id,
        flags,
        len(key),
        len(tags),
        len(headers),
        len(record.headers),
        _check_time(record.born_at_ms, field="born_at_ms"),
    )
    content = b"".join((fixed, due, key, tags, headers, record.body))
    record_bytes = len(content) + _CRC.size
    if record_bytes > limits.record_bytes:
        raise _refuse("message", f"{limits.record_bytes} bytes", f"{record_bytes} bytes")
    return _CRC.pack(crc32c(content, crc32c(subject))) + content


def decode_record(subject: str, data: bytes) -> Record:
    """The message of these bytes, its checksum verified.

    Raises `ChecksumError` when the bytes were altered or belong to another subject, and
    `ProtocolError` when they were never a record; nothing else.
    """
    verify_record(subject, data)
    _, message_id, flags, key_bytes, tags_bytes, headers_bytes, header_count, born_at_ms = (
        _FIXED.unpack_from(data)
    )
    if flags & ~(_BODY_KIND_MASK | _DELAYED_FLAG) or flags & _BODY_KIND_MASK > BodyKind.JSON:
        raise ProtocolError(f"record flags {flags:#04x} are not known", offset=_FLAGS_POSITION)
    position = RECORD_FIXED_BYTES
    due_at_ms = None
    if flags & _DELAYED_FLAG:
        if len(data) < position + _DUE.size:
            raise ProtocolError("record ends inside its due time", offset=position)
        (due_at_ms,) = _DUE.unpack_from(data, position)
        position += _DUE.size
    body_position = position + key_bytes + tags_bytes + headers_bytes
    if body_position > len(data):
        raise ProtocolError("record ends before its body", offset=len(data))
    tags_position = position + key_bytes
    headers_position = tags_position + tags_bytes
    return Record(
        message_id=message_id,
        subject=subject,
        body=data[body_position:],
        body_kind=BodyKind(flags & _BODY_KIND_MASK),
        key=_text(data[position:tags_position], position) if key_bytes else None,
        tags=_decode_tags(data[tags_position:headers_position], tags_position),
        headers=_decode_headers(data[headers_position:body_position], header_count),
        born_at_ms=born_at_ms,
        due_at_ms=due_at_ms,
    )


def verify_record(subject: str, data: bytes) -> None:
    """Check the checksum alone; raises `ProtocolError` when it does not fit."""
    if len(data) < RECORD_FIXED_BYTES:
        raise ProtocolError(f"record of {len(data)} bytes is shorter than {RECORD_FIXED_BYTES}")
    if not is_name(subject):
        raise ProtocolError(f"subject {shorten(subject)} is not a name")
    if crc32c(data[_CRC.size :], crc32c(subject.encode())) != _CRC.unpack_from(data)[0]:
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
    _, _, flags, key_bytes, tags_bytes, _, _, _ = _FIXED.unpack_from(data)
    if not tags_bytes:
        return 0
    first = RECORD_FIXED_BYTES + (_DUE.size if flags & _DELAYED_FLAG else 0) + key_bytes
    return tag_hash(data[first : first + tags_bytes].split(b","))


def is_delayed_record(data: bytes) -> bool:
    """Whether an encoded record carries a due time."""
    return bool(data[_FLAGS_POSITION] & _DELAYED_FLAG)


def _encode_key(key: str | None) -> bytes:
    if key is None:
        return b""
    data = _utf8(key, field="key")
    if not data:
        raise _refuse("key", "1 or more bytes, or None", "an empty text")
    if len(data) > KEY_BYTES_MAX:
        raise _refuse("key", f"{KEY_BYTES_MAX} bytes of UTF-8", f"{len(data)} bytes")
    return data


def _encode_tags(tags: tuple[str, ...], limits: Limits) -> bytes:
    if len(tags) > limits.tags:
        raise _refuse("tags", f"{limits.tags} tags", f"{len(tags)} tags")
    return ",".join([check_name(tag, field="tag") for tag in tags]).encode()


def _encode_headers(headers: tuple[tuple[str, str], ...], limits: Limits) -> bytes:
    if not headers:
        return b""
    if len(headers) > limits.headers:
        raise _refuse("headers", f"{limits.headers} headers", f"{len(headers)} headers")
    parts: list[bytes] = []
    for name, value in headers:
        name_data = check_name(name, field="header name").encode()
        value_data = _utf8(value, field=f"header {name}")
        if len(value_data) > limits.headers_bytes:
            raise _refuse(
                f"header {name}", f"{limits.headers_bytes} bytes", f"{len(value_data)} bytes"
            )
        parts += (_PAIR.pack(len(name_data), len(value_data)), name_data, value_data)
    data = b"".join(parts)
    if len(data) > limits.headers_bytes:
        raise _refuse("headers", f"{limits.headers_bytes} bytes in all", f"{len(data)} bytes")
    return data


def _decode_tags(data: bytes, position: int) -> tuple[str, ...]:
    if not data:
        return ()
    tags = tuple(_text(data, position).split(","))
    if not all(is_name(tag) for tag in tags):
        raise ProtocolError("record has a tag that is not a name", offset=position)
    return tags


def _decode_headers(data: bytes, header_count: int) -> tuple[tuple[str, str], ...]:
    headers: list[tuple[str, str]] = []
    position = 0
    for _ in range(header_count):
        if position + _PAIR.size > len(data):
            raise ProtocolError("record ends inside a header", offset=position)
        name_bytes, value_bytes = _PAIR.unpack_from(data, position)
        value_position = position + _PAIR.size + name_bytes
        next_position = value_position + value_bytes
        if next_position > len(data):
            raise ProtocolError("record ends inside a header", offset=position)
        name = _text(data[position + _PAIR.size : value_position], position)
        headers.append((name, _text(data[value_position:next_position], value_position)))
        position = next_position
    if position != len(data):
        raise ProtocolError("record has bytes behind its headers", offset=position)
    return tuple(headers)


def _text(data: bytes, position: int) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ProtocolError("text of a record is not UTF-8", offset=position) from error


def _utf8(text: str, *, field: str) -> bytes:
    try:
        return text.encode()
    except (UnicodeEncodeError, AttributeError) as error:
        raise EncodingError(
            field=field,
            limit="text that can be encoded as UTF-8",
            value=shorten(text),
            remedy="Remove lone surrogates, or convert the value to text.",
        ) from error


def _check_time(time_ms: int, *, field: str) -> int:
    if not 0 <= time_ms <= _TIME_MAX_MS:
        raise _refuse(field, f"0 to {_TIME_MAX_MS} ms since 1970", str(time_ms))
    return time_ms


def _refuse(field: str, limit: str, value: str) -> TooLargeError:
    return TooLargeError(field=field, limit=limit, value=value, remedy="Make it smaller.")
