"""Blocks of memory of a frame's size, which come and go with every request.

The C library of most Linux systems (glibc) takes such a block from the operating system and gives it
back at once, so that each of its pages is a fault again at the next request: with frames of half a
megabyte that is more than reading them. But it learns: when a larger block than any before is freed,
it keeps blocks of up to that size for itself, and twice as much in all (mallopt(3), M_MMAP_THRESHOLD).
"""

from __future__ import annotations

from functools import cache
from typing import Final

#: As long as the longest frame; so twice as much may stay with the process.
LEARNED_BYTES: Final = 8 * 1024 * 1024


@cache
def learn_block_size() -> None:
    """Free one block, of which no page was touched; elsewhere than with glibc this does nothing.

    Once in a process, however often it is called.
    """
    bytes(LEARNED_BYTES)
