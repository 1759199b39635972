"""Blocks of memory of a frame's size, which come and go with every request.

The C library of most Linux systems (glibc) takes such a block from the operating system and returns
it at once, so at the next request each of its pages faults again: for frames of half a megabyte
that costs more than reading them. But glibc learns: when a larger block than any before is freed,
it keeps blocks of up to that size for itself, and twice as much in all (mallopt(3),
M_MMAP_THRESHOLD).
"""

from __future__ import annotations

from functools import cache
from typing import Final

#: The length of the longest frame; so twice as much may stay with the process.
LEARNED_BYTES: Final = 8 * 1024 * 1024


@cache
def learn_block_size() -> None:
    """Free one block, whose pages were never touched; does nothing without glibc.

    Runs once in a process, however often it is called.
    """
    bytes(LEARNED_BYTES)
