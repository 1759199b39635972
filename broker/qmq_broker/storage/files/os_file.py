"""One open file of the operating system, whose syncs are checked.

A successful sync counts only if the file system still accepts changes (`confirm`). After a failed
sync, every later sync of the same file fails too. Only `disk.py` opens files.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Final

from qmq_broker.errors import DiskError, DiskFullError, StoreError
from qmq_broker.storage.files.disk_errors import translate

#: Most buffers of one gathering write; the operating system refuses more.
IOV_MAX: Final = 1024
_NOT_SUPPORTED: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
_allocate = getattr(os, "posix_fallocate", None)
#: lseek(2): reserved space that was not written is a hole, unless the page cache has more.
_SEEK_DATA: Final[int | None] = (
    getattr(os, "SEEK_DATA", None) if hasattr(os, "posix_fadvise") else None
)
#: Syncs an open file or directory by its descriptor; raises `OSError`.
Sync = Callable[[int], object]


def choose_syncs(full: int | None, data: Sync | None, everything: Sync) -> tuple[Sync, Sync]:
    """Choose the functions that sync content and length of a file, and all of its metadata.

    `full` is the `fcntl` command that also flushes the drive's cache. macOS needs it: its `fsync`
    leaves the bytes in that cache (fsync(2) of macOS). `data` is the system's `fdatasync`.
    """
    if full is None:
        return data or everything, everything

    def sync_full(descriptor: int) -> object:
        return fcntl.fcntl(descriptor, full)

    return sync_full, sync_full


sync_data, sync_all = choose_syncs(
    getattr(fcntl, "F_FULLFSYNC", None), getattr(os, "fdatasync", None), os.fsync
)


class OsFile:
    """One open file.

    It is closed at the latest when its last reference is dropped. A deleted file that is being read
    stays open only until the read ends, because its space is freed when it is closed.

    Linux reports a failed sync only once for an open file: a second thread that syncs a moment later
    gets a success. So threads sync one at a time, and after a failed sync every later one fails.
    """

    def __init__(self, path: str, descriptor: int, witness: OsFile | None = None) -> None:
        """Take over the descriptor; `confirm` uses the witness."""
        self.path, self._descriptor, self._witness = path, descriptor, witness
        self._syncing = Lock()
        self._failed_sync = ""

    def read(self, position: int, count: int) -> bytes:
        try:
            data = os.pread(self._descriptor, count, position)
            while len(data) < count:
                more = os.pread(self._descriptor, count - len(data), position + len(data))
                if not more:
                    break
                data += more
        except OSError as error:
            raise translate(error, "read", self.path) from error
        return data

    def data_from(self, position: int) -> int:
        if _SEEK_DATA is None:
            return position
        try:
            # Pages that the system read ahead do not count as a hole while they are in the page cache.
            os.posix_fadvise(self._descriptor, position, 0, os.POSIX_FADV_DONTNEED)
            return os.lseek(self._descriptor, position, _SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only a hole, or beyond the end
                return max(position, self.length())
            if error.errno in _NOT_SUPPORTED:
                return position
            raise translate(error, "seek", self.path) from error

    def write(self, position: int, parts: Sequence[bytes | memoryview]) -> None:
        try:
            for first in range(0, len(parts), IOV_MAX):
                batch = parts[first : first + IOV_MAX]
                count = sum(map(len, batch))
                written = os.pwritev(self._descriptor, batch, position)
                position += written
                if written < count:
                    position = self._write_rest(position, memoryview(b"".join(batch))[written:])
        except OSError as error:
            raise translate(error, "write", self.path) from error

    def _write_rest(self, position: int, rest: memoryview) -> int:
        """Continue after a short write until everything is written; returns the position after it."""
        while rest:
            written = os.pwrite(self._descriptor, rest, position)
            if not written:
                raise OSError(errno.EIO, "no byte was written")
            position += written
            rest = rest[written:]
        return position

    def sync(self) -> None:
        with self._syncing:
            if self._failed_sync:
                reason = f"not tried again after a failed one ({self._failed_sync})"
                raise DiskError(operation="sync", path=self.path, reason=reason)
            try:
                self._sync()
            except StoreError as error:
                self._failed_sync = str(error)
                raise

    def _sync(self) -> None:
        try:
            sync_data(self._descriptor)
            names = os.fstat(self._descriptor).st_nlink
        except OSError as error:
            raise translate(error, "sync", self.path) from error
        if not names:
            raise DiskError(operation="sync", path=self.path, reason="the file was removed")
        confirm(self._witness)

    def allocate(self, length: int) -> None:
        try:
            if _allocate is not None:
                try:
                    _allocate(self._descriptor, 0, length)
                    return
                except OSError as error:
                    if error.errno not in _NOT_SUPPORTED:
                        raise
            # Without `posix_fallocate` no space is reserved: a later write may find the disk full.
            if os.fstat(self._descriptor).st_size < length:
                os.ftruncate(self._descriptor, length)
        except OSError as error:
            raise translate(error, "allocate", self.path) from error

    def truncate(self, length: int) -> None:
        try:
            os.ftruncate(self._descriptor, length)
        except OSError as error:
            raise translate(error, "truncate", self.path) from error

    def length(self) -> int:
        try:
            return os.fstat(self._descriptor).st_size
        except OSError as error:
            raise translate(error, "length", self.path) from error

    def links(self) -> int:
        try:
            return os.fstat(self._descriptor).st_nlink
        except OSError as error:
            raise translate(error, "look", self.path) from error

    @property
    def is_open(self) -> bool:
        return self._descriptor >= 0

    def close(self) -> None:
        if self.is_open:
            os.close(self._descriptor)
            self._descriptor = -1

    __del__ = close


def confirm(witness: OsFile | None) -> None:
    """Raise unless the file system still accepts changes: only then does the last sync count.

    After an error, some ext4 file systems report success for syncs that stored nothing
    (docs/decisions/0037). They then refuse even to allocate the first byte of the lock file (the
    witness), although it already exists. The test does not use the synced file itself, because that
    file's next sync would wait for it.
    """
    if witness is not None and witness.is_open:
        try:
            witness.allocate(1)
        except DiskFullError:  # a full disk does not undo the sync
            return
