"""Reads single fields of an encoded record without decoding the rest, for code that reads many records.

All functions require a record made by `encode_record`; `record.py` shows its format.
"""

from __future__ import annotations

import struct
from typing import Final

from qmq_client.wire.record import (
    BORN_POSITION,
    DELAYED_FLAG,
    DUE_BYTES,
    EXPIRES_FLAG,
    FLAGS_POSITION,
    RECORD_FIXED_BYTES,
)

#: Flags and the lengths of key, tags and headers.
_LENGTHS: Final = struct.Struct(">BBHH")
_TIME: Final = struct.Struct(">Q")


def record_tags(data: bytes) -> bytes:
    """The stored tags, joined by commas; empty for none."""
    flags, key_bytes, tags_bytes, _ = _LENGTHS.unpack_from(data, FLAGS_POSITION)
    first = RECORD_FIXED_BYTES + (DUE_BYTES if flags & DELAYED_FLAG else 0) + key_bytes
    return bytes(data[first : first + tags_bytes])


def record_made_at_ms(data: bytes) -> int:
    """When the message was born, or was due when it was delayed."""
    position = RECORD_FIXED_BYTES if data[FLAGS_POSITION] & DELAYED_FLAG else BORN_POSITION
    value: int = _TIME.unpack_from(data, position)[0]
    return value


def record_expires_at_ms(data: bytes) -> int | None:
    """When the message expires; None for never."""
    if not data[FLAGS_POSITION] & EXPIRES_FLAG:
        return None
    flags, key_bytes, tags_bytes, headers_bytes = _LENGTHS.unpack_from(data, FLAGS_POSITION)
    first = RECORD_FIXED_BYTES + (DUE_BYTES if flags & DELAYED_FLAG else 0)
    position = first + key_bytes + tags_bytes + headers_bytes
    if position + _TIME.size > len(data):
        return None  # never a record: decoding it raises
    value: int = _TIME.unpack_from(data, position)[0]
    return value
