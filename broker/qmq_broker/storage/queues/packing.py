"""Consume queue entries made from a frame, all at once.

Lengths and tag hashes stand in the frame as columns of the same bytes, and of the physical offset only
the lower half changes within a frame. So entries are copies of the first one, into which the columns
that are not the same in all of them are written byte by byte: forty copies of five hundred bytes cost
a tenth of packing five hundred entries.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from qmq_broker.storage.queues.queue_files import ENTRY_BYTES
from qmq_client.wire.frame import MessageFrame

_FIRST: Final = struct.Struct(">Q")
#: Where the parts of an entry stand, see `consume_queue.py`; of the offset its lower half.
_OFFSET_POSITION: Final = 4
_LENGTH_POSITION: Final = 8
_HASH_POSITION: Final = 12
_WORD_BYTES: Final = 4
_HASH_BYTES: Final = 8
_WORD_END: Final = 2**32


def pack_entries(frame: MessageFrame, physical_offset: int) -> bytes:
    """The consume queue entries of all records of a frame that stands at `physical_offset`."""
    data, positions, count = frame.data, frame.positions, frame.header.record_count
    hashes_first = positions[0] - _HASH_BYTES * count
    lengths = data[hashes_first - _WORD_BYTES * count : hashes_first]
    hashes = data[hashes_first : positions[0]]
    first_offset = physical_offset + positions[0]
    first = _FIRST.pack(first_offset) + lengths[:_WORD_BYTES] + hashes[:_HASH_BYTES]
    if count == 1:
        return first
    entries = bytearray(first * count)
    low = first_offset % _WORD_END
    if low + positions[-1] - positions[0] < _WORD_END:
        _put(entries, _OFFSET_POSITION, _low_words(low, positions), _WORD_BYTES)
    else:
        offsets = [physical_offset + position for position in positions]
        _put(entries, 0, struct.pack(f">{count}Q", *offsets), _FIRST.size)
    if lengths != lengths[:_WORD_BYTES] * count:
        _put(entries, _LENGTH_POSITION, lengths, _WORD_BYTES)
    if hashes != hashes[:_HASH_BYTES] * count:
        _put(entries, _HASH_POSITION, hashes, _HASH_BYTES)
    return bytes(entries)


def _put(entries: bytearray, position: int, column: bytes, width: int) -> None:
    """Write a column of numbers of `width` bytes to `position` of each entry."""
    for place in range(width):
        entries[position + place :: ENTRY_BYTES] = column[place::width]


def _low_words(low: int, positions: Sequence[int]) -> bytes:
    """The positions as words, moved so that the first is `low`. Requires: none is over a word then.

    Many words stand in one number, and a number times that of as many ones is added to each of them.
    """
    count = len(positions)
    if isinstance(positions, range):
        words = low * _ones(count) + positions.step * _indexes(count)
    else:
        words = int.from_bytes(struct.pack(f">{count}I", *positions))
        words += (low - positions[0]) * _ones(count)
    return words.to_bytes(_WORD_BYTES * count)


@lru_cache(maxsize=16)
def _ones(count: int) -> int:
    return int.from_bytes(b"\0\0\0\1" * count)


@lru_cache(maxsize=16)
def _indexes(count: int) -> int:
    return int.from_bytes(struct.pack(f">{count}I", *range(count)))
