"""Consume queue entries made from a frame, all in one step.

Lengths and tag hashes are columns of the same bytes in the frame, and of the physical offset only
the lower half changes within a frame. So all entries start as copies of the first one, and the
columns that differ are written over them word by word. That takes a tenth of the time of packing
five hundred entries one by one.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from qmq_broker.storage.queues.queue_files import ENTRY_BYTES
from qmq_client.wire.frame import MessageFrame

_FIRST: Final = struct.Struct(">Q")
_WORD_BYTES: Final = 4
_WORDS: Final = ENTRY_BYTES // _WORD_BYTES
#: The parts of an entry in words, see `consume_queue.py`.
_OFFSET: Final = slice(0, None, _WORDS)
_LOW_OFFSET: Final = slice(1, None, _WORDS)
_LENGTH: Final = slice(2, None, _WORDS)
_HASH: Final = slice(3, None, _WORDS)
_LOW_HASH: Final = slice(4, None, _WORDS)
_HASH_BYTES: Final = 8
_WORD_END: Final = 2**32


def pack_entries(frame: MessageFrame, physical_offset: int) -> bytearray:
    """The consume queue entries of all records of a frame at `physical_offset`."""
    data, positions, count = frame.data, frame.positions, frame.header.record_count
    first_position = positions[0]
    hashes_first = first_position - _HASH_BYTES * count
    lengths_first = hashes_first - _WORD_BYTES * count
    hashes = data[hashes_first:first_position]
    first_offset = physical_offset + first_position
    first = b"".join(
        (
            _FIRST.pack(first_offset),
            data[lengths_first : lengths_first + _WORD_BYTES],
            hashes[:_HASH_BYTES],
        )
    )
    entries = bytearray(first * count)
    if count == 1:
        return entries
    # Words are copied as they are: the machine's byte order does not matter.
    words = memoryview(entries).cast("I")
    low = first_offset % _WORD_END
    if low + positions[-1] - first_position < _WORD_END:
        words[_LOW_OFFSET] = memoryview(_low_words(low, positions)).cast("I")
    else:
        offsets = struct.pack(f">{count}Q", *(physical_offset + each for each in positions))
        _put_pairs(words, _OFFSET, _LOW_OFFSET, offsets)
    if not isinstance(positions, range):
        words[_LENGTH] = memoryview(data[lengths_first:hashes_first]).cast("I")
    if hashes != first[-_HASH_BYTES:] * count:
        _put_pairs(words, _HASH, _LOW_HASH, hashes)
    return entries


def _put_pairs(words: memoryview[int], high: slice, low: slice, numbers: bytes) -> None:
    """Write eight-byte numbers to two columns."""
    pairs = memoryview(numbers).cast("I")
    words[high], words[low] = pairs[::2], pairs[1::2]


def _low_words(low: int, positions: Sequence[int]) -> bytes:
    """The positions as words, shifted so that the first is `low`.

    Requires: none exceeds a word then.

    Many words are one large number; adding a number times 1 in every word shifts each of them.
    """
    count = len(positions)
    if isinstance(positions, range):
        ones, multiples = _steps(count, positions.step)
        return (low * ones + multiples).to_bytes(_WORD_BYTES * count)
    words = int.from_bytes(struct.pack(f">{count}I", *positions))
    words += (low - positions[0]) * _ones(count)
    return words.to_bytes(_WORD_BYTES * count)


@lru_cache(maxsize=16)
def _ones(count: int) -> int:
    return int.from_bytes(b"\0\0\0\1" * count)


@lru_cache(maxsize=64)
def _steps(count: int, step: int) -> tuple[int, int]:
    """Words of ones, and of 0, `step`, 2 `step` and so on. Requires: none exceeds a word."""
    multiples = struct.pack(f">{count}I", *range(0, count * step, step))
    return _ones(count), int.from_bytes(multiples)
