"""Dead letters that are not in memory: one file for each block of them, while the broker runs.

::

    letters/<20 digits>    an array of dead letters in MessagePack

Derived from the snapshot and the action log, never synced and never read by another process: a
start and a clean stop remove them all. Their lengths and checksums stay in memory.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import Final
from weakref import finalize

from qmq_broker.errors import DiskError, disk_full
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.disk_port import Disk
from qmq_client.wire.checksum import crc32c

#: The reason why a page cannot be read.
NOT_AS_WRITTEN: Final = (
    "its content has changed since it was written; a restart of the broker writes the file again"
)
#: Files removed in one step: about two milliseconds.
_REMOVED_MAX: Final = 64


class LetterPage:
    """One file. It is removed once nothing refers to this object; see `LetterFiles.step`."""

    __slots__ = ("__weakref__", "_checksum", "_disk", "_length", "path")

    def __init__(self, disk: Disk, path: str, content: bytes) -> None:
        self._disk, self.path = disk, path
        self._length, self._checksum = len(content), crc32c(content)

    def read(self) -> bytes:
        """Its content, in any thread; raises `DiskError` if the content has changed."""
        file = self._disk.open(self.path)
        try:
            content = file.read(0, self._length)
        finally:
            file.close()
        if len(content) < self._length or crc32c(content) != self._checksum:
            raise DiskError(operation="read", path=self.path, reason=NOT_AS_WRITTEN)
        return content


class LetterFiles:
    """The dead letter files of one broker. One thread writes and removes them, any thread may read."""

    def __init__(self, disk: Disk, reserve_bytes: int) -> None:
        """Removes the files of the last run. Nothing is written below `reserve_bytes` of free space."""
        self._disk, self._reserve_bytes = disk, reserve_bytes
        self._next_number = 0
        #: Paths and lengths of pages that nothing refers to.
        self._unused: deque[tuple[str, int]] = deque()
        #: Length of all files, including those that will be removed in a later step.
        self.length_bytes = 0
        self.clear()

    def write(self, content: bytes) -> LetterPage:
        """Write a page, not durable; raises `NoRoomError` or `DiskError` with nothing left behind."""
        free_bytes, reserve_bytes = self._disk.free_bytes(), self._reserve_bytes
        if free_bytes < reserve_bytes + len(content):
            raise disk_full(
                free_bytes=free_bytes, needed_bytes=len(content), reserve_bytes=reserve_bytes
            )
        self._disk.make_directory(layout.LETTERS)
        path = layout.letters_path(self._next_number)
        self._next_number += 1
        try:
            file = self._disk.open(path, is_new=True)
            try:
                file.write(0, [content])
            finally:
                file.close()
        except BaseException:
            self._unused.append((path, 0))
            raise
        page = LetterPage(self._disk, path, content)
        finalize(page, self._unused.append, (path, len(content))).atexit = False
        self.length_bytes += len(content)
        return page

    def step(self) -> None:
        """Remove some of the files whose pages are no longer referenced."""
        for _ in range(min(_REMOVED_MAX, len(self._unused))):
            path, length_bytes = self._unused.popleft()
            self._remove(path)
            self.length_bytes -= length_bytes

    def clear(self) -> None:
        """Remove all files. Requires: no page is read any more."""
        for name in self._disk.names(layout.LETTERS):
            if layout.parse_number(name) is not None:
                self._remove(f"{layout.LETTERS}/{name}")
        self._unused.clear()
        self.length_bytes = 0

    def _remove(self, path: str) -> None:
        with suppress(DiskError):  # the next opening tries again
            self._disk.unlink(path)
