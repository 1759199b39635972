"""What the storage asks of a disk: the protocols that all its code is written against.

`disk.py` has the real one and says what is durable when; crash tests put a recording one in its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class DiskFile(Protocol):
    """One open file. Reads may come from any thread, all else from one at a time."""

    def read(self, position: int, count: int) -> bytes:
        """`count` bytes from `position`; fewer only at the end of the file."""
        ...

    def write(self, position: int, parts: Sequence[bytes | memoryview]) -> None:
        """Put `parts` one behind the other from `position` on; not durable on return."""
        ...

    def sync(self) -> None:
        """Make everything written so far, and the length, durable; fails for a removed file."""
        ...

    def allocate(self, length: int) -> None:
        """Take space up to `length`; what was not there reads as zeros. Never shortens."""
        ...

    def truncate(self, length: int) -> None:
        """Cut the file to `length`."""
        ...

    def length(self) -> int:
        """Bytes in the file."""
        ...

    def links(self) -> int:
        """Names that this file has, here and in other directories of the same file system."""
        ...

    def close(self) -> None:
        """Give the file back. Safe to call twice."""
        ...


class DiskLock(Protocol):
    """Exclusive use of a data directory."""

    def check(self) -> None:
        """Raise `DiskError` when the directory or the lock file is not at its path any more."""
        ...

    def release(self) -> None:
        """Let others in. Safe to call twice."""
        ...


class Disk(Protocol):
    """The files below one data directory."""

    def lock(self, path: str, holder: str) -> DiskLock:
        """Take the lock file and write `holder` into it; raises `LockedError` at once."""
        ...

    def open(self, path: str, *, is_new: bool = False) -> DiskFile:
        """Open for reading and writing; made when absent and `is_new`, else `DiskError`."""
        ...

    def names(self, directory: str) -> list[str]:
        """Sorted names in a directory; none when there is no such directory."""
        ...

    def make_directory(self, path: str) -> None:
        """Make a directory in an existing one; nothing happens when it is there."""
        ...

    def sync_directory(self, path: str) -> None:
        """Make the names in a directory durable; the root is the empty path."""
        ...

    def rename(self, old: str, new: str) -> None:
        """Give a file another name in the same directory, replacing what has it."""
        ...

    def unlink(self, path: str) -> None:
        """Remove a file."""
        ...

    def free_bytes(self) -> int:
        """Space that this process may still take."""
        ...
