"""Frames as a version that is not written yet would leave them in a log."""

from __future__ import annotations

import struct
from collections.abc import Callable

from qmq_client.wire.checksum import crc32c


def frames_in(content: bytes | bytearray) -> list[int]:
    """Where the frames of a segment begin."""
    found, position = [], 0
    while content[position : position + 4] == b"QMQF":
        found.append(position)
        position += struct.unpack_from(">I", content, position + 8)[0]
    return found


def stamped_as(number: int, field: int, value: int) -> Callable[[bytes], bytes]:
    """A frame with another version (field 4) or kind (5), with the checksums that its writer would give it."""

    def change(content: bytes) -> bytes:
        altered = bytearray(content)
        first = frames_in(altered)[number]
        length, subjects = struct.unpack_from(">I", altered, first + 8)[0], altered[first + 7]
        head_bytes = 56 + 8 * subjects
        frame = altered[first : first + length]
        frame[field] = value
        frame[16:20] = crc32c(bytes(frame[head_bytes:]), crc32c(bytes(frame[:16]))).to_bytes(4)
        frame[20:24] = crc32c(bytes(frame[24:head_bytes]), crc32c(bytes(frame[:20]))).to_bytes(4)
        altered[first : first + length] = frame
        return bytes(altered)

    return change


def with_flags(record: bytes, flags: int) -> bytes:
    """A record of the subject `orders` with these flags, with the checksum that its producer would give it."""
    content = record[4:20] + bytes([record[20] | flags]) + record[21:]
    return crc32c(content, crc32c(b"orders")).to_bytes(4) + content
