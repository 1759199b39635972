"""Reads the field at the same place of every record of a frame, in one step.

A frame has hundreds of records, and a step of Python for each costs more than the field itself. If
all records have one length, as those of one kind of event mostly do, it is a slice with a stride.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from qmq_client.wire.checksum import crc32c
from qmq_client.wire.frame import MessageFrame

_CHECKSUM_BYTES: Final = 4


def byte_column(frame: MessageFrame, place: int) -> bytes:
    """The byte at `place` of each record, in order. Requires: each record has one there."""
    data, positions = frame.data, frame.positions
    if isinstance(positions, range):
        return data[positions.start + place : positions.stop : positions.step]
    return bytes([data[position + place] for position in positions])


def checksums(region: bytes | memoryview, lengths: Sequence[int]) -> Iterator[tuple[int, bytes]]:
    """The checksum that each record carries, and the bytes it covers, in order.

    Requires: `region` holds records of these lengths back to back, none too short for it.
    """
    if lengths.count(lengths[0]) == len(lengths):
        return struct.iter_unpack(f">I{lengths[0] - _CHECKSUM_BYTES}s", region)
    pattern = ">" + "I%ds" * len(lengths) % tuple([each - _CHECKSUM_BYTES for each in lengths])
    # Not the module's function, which would cache each of these patterns.
    cells = struct.Struct(pattern).unpack_from(region)
    return zip(cells[::2], cells[1::2], strict=True)


def first_broken(records: Iterable[tuple[int, bytes]], seed: int) -> int | None:
    """The index of the first wrong checksum of these; None if all are right.

    `seed` is the checksum of the records' subject.
    """
    # Compares all of them, because a loop that can end early takes a third longer.
    are_right = [crc32c(content, seed) == checksum for checksum, content in records]
    return None if all(are_right) else are_right.index(False)
