"""Making written bytes durable, with the call that each system has for it.

Linux: `fdatasync` for content and length, `fsync` for names. On macOS `fsync` leaves the bytes in the
drive's cache, and only `F_FULLFSYNC` has them written out (fsync(2) of macOS), so it is used for both.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from typing import Final

#: What syncs an open file or directory; raises `OSError`.
Sync = Callable[[int], object]


def choose(full: int | None, data: Sync | None, everything: Sync) -> tuple[Sync, Sync]:
    """How to sync data, and how to sync everything, with what a system has.

    `full` is its command for `fcntl` that writes out the drive's cache, `data` its `fdatasync`.
    """
    if full is None:
        return data or everything, everything

    def sync_full(descriptor: int) -> object:
        return fcntl.fcntl(descriptor, full)

    return sync_full, sync_full


_CHOSEN: Final = choose(
    getattr(fcntl, "F_FULLFSYNC", None), getattr(os, "fdatasync", None), os.fsync
)
#: Content and length of a file are durable on return.
sync_data: Final = _CHOSEN[0]
#: All of a file or directory is durable on return, names included.
sync_all: Final = _CHOSEN[1]
