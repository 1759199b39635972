"""The port to the disk: the protocols that all storage code is written against.

`disk.py` has the real one and documents durability; crash tests use a recording one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class DiskFile(Protocol):
    """One open file. Reads and syncs may come from any thread, everything else from one at a time."""

    def read(self, position: int, count: int) -> bytes:
        """`count` bytes from `position`; fewer only at the end of the file."""
        ...

    def data_from(self, position: int) -> int:
        """The position of the next byte that may be non-zero; the file's length if there is none.

        Reserved space that was never written is skipped without reading it if the file system knows
        it; otherwise returns `position` itself.
        """
        ...

    def write(self, position: int, parts: Sequence[bytes | memoryview]) -> None:
        """Write `parts` back to back from `position` on; not durable on return."""
        ...

    def sync(self) -> None:
        """Make everything written so far, and the length, durable; fails for a removed file.

        After one failure it always fails, in every thread: the content of the disk is unknown.
        """
        ...

    def allocate(self, length: int) -> None:
        """Reserve space up to `length`; new bytes read as zeros. Never shortens."""
        ...

    def truncate(self, length: int) -> None:
        """Cut the file to `length`."""
        ...

    def length(self) -> int:
        """Bytes in the file."""
        ...

    def links(self) -> int:
        """How many names this file has, here and in other directories of the same file system."""
        ...

    def close(self) -> None:
        """Close the file. Safe to call twice."""
        ...


class DiskLock(Protocol):
    """Exclusive use of a data directory."""

    def check(self) -> None:
        """Raise `DiskError` if the directory or the lock file is no longer at its path."""
        ...

    def release(self) -> None:
        """Release the lock. Safe to call twice."""
        ...


class Disk(Protocol):
    """The files below one data directory."""

    def lock(self, path: str, holder: str) -> DiskLock:
        """Take the lock file and write `holder` into it; raises `LockedError` at once."""
        ...

    def open(self, path: str, *, is_new: bool = False) -> DiskFile:
        """Open for reading and writing; if missing, created with `is_new`, otherwise `DiskError`."""
        ...

    def names(self, directory: str) -> list[str]:
        """Sorted names in a directory; none if there is no such directory."""
        ...

    def make_directory(self, path: str) -> None:
        """Create a directory in an existing one; does nothing if it is there."""
        ...

    def sync_directory(self, path: str) -> None:
        """Make the names in a directory durable; the root is the empty path."""
        ...

    def rename(self, old: str, new: str) -> None:
        """Rename a file within its directory, replacing any file of that name."""
        ...

    def unlink(self, path: str) -> None:
        """Remove a file."""
        ...

    def free_bytes(self) -> int:
        """Space that this process may still use."""
        ...
