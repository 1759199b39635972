"""The texts of a record, both ways: its key, its tags and its headers.

What an application has few of and every message carries, names of headers and combinations of tags,
is checked and converted once and then kept at hand, in bounds.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Final

from qmq_client.wire.errors import (
    EncodingError,
    InvalidMessageError,
    ProtocolError,
    TooLargeError,
)
from qmq_client.wire.limits import KEY_BYTES_MAX, Limits
from qmq_client.wire.names import check_name, is_name
from qmq_client.wire.shown import shorten

_PAIR: Final = struct.Struct(">BH")
_PAIR_BYTES: Final = _PAIR.size
_pack_pair: Final = _PAIR.pack
_unpack_pair: Final = _PAIR.unpack_from
_HEADER_NAMES_KEPT_MAX: Final = 4096
_TAGS_KEPT_MAX: Final = 1024
#: What is longer than a few names together is not kept: nobody is to fill the memory with it.
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
    if 0 in data:  # PostgreSQL has no text with it, and finds out in the middle of a transaction
        raise InvalidMessageError(
            field="key",
            limit="text without the character NUL",
            value=shorten(key),
            remedy="Take it out, or convert the key to hexadecimal digits.",
        )
    return data


def encode_tags(tags: tuple[str, ...], limits: Limits) -> bytes:
    """The tags, joined by commas. Requires: at least one."""
    if len(tags) > limits.tags:
        raise _too_large("tags", f"{limits.tags} tags", f"{len(tags)} tags")
    try:
        return _join_tags(tags)
    except TypeError:  # one of them is no text
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
        parts += (_pack_pair(len(name_data), len(value_data)), name_data, value_data)
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
    """Tags as they stand in a record; none when one of them is no name."""
    tags = tuple(joined.decode().split(","))
    return tags if all(map(is_name, tags)) else ()


def decode_headers(
    data: bytes, first: int, after: int, header_count: int
) -> tuple[tuple[str, str], ...]:
    """The headers in these bytes of a record, so many of them."""
    headers: list[tuple[str, str]] = []
    position = first
    try:
        for _ in range(header_count):
            name_position = position + _PAIR_BYTES
            if name_position > after:
                raise ProtocolError("record ends inside a header", offset=position)
            name_bytes, value_bytes = _unpack_pair(data, position)
            value_position = name_position + name_bytes
            next_position = value_position + value_bytes
            if next_position > after:
                raise ProtocolError("record ends inside a header", offset=position)
            name = _decode_header_name(data[name_position:value_position])
            if not name:
                raise ProtocolError("record has a header name that is no name", offset=position)
            headers.append((name, data[value_position:next_position].decode()))
            position = next_position
    except UnicodeDecodeError as error:
        raise _not_utf8(position) from error
    if position != after:
        raise ProtocolError("record has bytes behind its headers", offset=position)
    if header_count > 1 and len(dict(headers)) != header_count:
        raise ProtocolError("record has a header name twice", offset=first)
    return tuple(headers)


@lru_cache(maxsize=_HEADER_NAMES_KEPT_MAX)
def _decode_header_name(data: bytes) -> str:
    """The name; nothing for what is none."""
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
