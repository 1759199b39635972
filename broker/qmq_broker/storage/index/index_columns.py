"""Numbers of the key index as bytes, packed column by column: one by one would cost ten times as
much.

`key_index_file.py` says what the columns mean.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence
from typing import Final

_ENTRY_BYTES: Final = 20


def big_endian(numbers: array[int]) -> bytes:
    """Four-byte numbers, half a million in one step, without blocking other threads for long."""
    copy = numbers[:]
    if sys.byteorder == "little":
        copy.byteswap()
    return copy.tobytes()


def entry_hashes(entries: bytes) -> array[int]:
    """The first column of packed entries."""
    words = array("I", entries)[:: _ENTRY_BYTES // 4]
    if sys.byteorder == "little":
        words.byteswap()
    return words


def pack_entries(
    hashes: Sequence[int], previous: Sequence[int], *, offset: int, seconds: int
) -> bytes:
    """The entries of one frame, assembled column by column from four-byte words."""
    count = len(hashes)
    entries = bytearray(_ENTRY_BYTES * count)
    words = memoryview(entries).cast("I")
    high, low = divmod(offset, 2**32)
    for column, values in ((0, hashes), (4, previous)):
        words[column::5] = memoryview(struct.pack(f">{count}I", *values)).cast("I")
    for column, value in ((1, high), (2, low), (3, seconds)):
        words[column::5] = memoryview(struct.pack(">I", value) * count).cast("I")
    return bytes(entries)
