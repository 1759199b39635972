"""What stands at the same place of every record of a frame, cut out in one go.

A frame has hundreds of records, and a step of Python for each costs more than what it looks at. Where
all records have one length, as those of one kind of event mostly do, the cut is a stride.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

from qmq_client.wire.frame import MessageFrame

_CHECKSUM_BYTES: Final = 4


def byte_column(frame: MessageFrame, place: int) -> bytes:
    """The byte at `place` of each record, in order. Requires: each record has one there."""
    data, positions = frame.data, frame.positions
    if isinstance(positions, range):
        return data[positions.start + place : positions.stop : positions.step]
    return bytes([data[position + place] for position in positions])


def checksums(frame: MessageFrame) -> Iterator[tuple[int, bytes]]:
    """The checksum that each record carries, and what it is of, in order."""
    first, lengths = frame.positions[0], frame.lengths
    if isinstance(frame.positions, range):
        region = memoryview(frame.data)[first : frame.positions.stop]
        return struct.iter_unpack(f">I{lengths[0] - _CHECKSUM_BYTES}s", region)
    pattern = ">" + "I%ds" * len(lengths) % tuple([each - _CHECKSUM_BYTES for each in lengths])
    # Not by a function of the module, which would remember each of these patterns.
    cells = struct.Struct(pattern).unpack_from(frame.data, first)
    return zip(cells[::2], cells[1::2], strict=True)
