"""Tunes glibc so that memory blocks of a frame's size are reused between requests.

The C library of most Linux systems (glibc) takes such a block from the operating system and returns
it at once, so at the next request each of its pages faults again: for frames of half a megabyte
that costs more than reading them. But glibc adapts: when a larger block than any before is freed,
it keeps blocks of up to that size, and twice as much in total (mallopt(3), M_MMAP_THRESHOLD).
"""

from __future__ import annotations

from functools import cache
from typing import Final

#: The length of the longest frame; twice as much memory may stay with the process.
LEARNED_BYTES: Final = 8 * 1024 * 1024


@cache
def learn_block_size() -> None:
    """Free one block, whose pages were never touched; does nothing without glibc.

    Only the first call in a process has an effect.
    """
    bytes(LEARNED_BYTES)
