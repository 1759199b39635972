"""The only door to the operating system's files.

All storage code is written against `Disk` and `DiskFile` (`disk_port.py`). `OsDisk` is the real
one, rooted at a data directory; crash tests put a recording disk in its place. Paths are relative
to the root, with forward slashes. A symbolic link anywhere below the root is refused, so that
nobody can redirect writes.

Durability, by POSIX: `DiskFile.sync` makes the content and length of a file durable,
`sync_directory` makes names durable. Every `OSError` becomes `DiskError`, or `DiskFullError` when
there is no space, or `FilesFullError` when no more files may be open. A successful sync is believed
only if the file system still takes changes (`confirm`). Not for: caching, retries (a failed sync is
never tried again), memory maps (a fault in one cannot be caught).
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Lock
from typing import Final

from qmq_broker.errors import DiskError, DiskFullError, LockedError, StoreError
from qmq_broker.storage.files.disk_errors import translate
from qmq_broker.storage.files.disk_port import Disk, DiskFile, DiskLock

__all__ = ["Disk", "DiskFile", "DiskLock", "OsDisk", "OsFile", "OsLock", "link_file"]

#: Buffers in one gathering write; the operating system refuses more.
IOV_MAX: Final = 1024
#: Another file system, one without hard links, or one whose links are used up.
_NOT_LINKED: Final = frozenset(
    {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS}
)
#: A file that only others may write, or nobody.
_NOT_WRITABLE: Final = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
_FILE_MODE: Final = 0o600
_DIRECTORY_MODE: Final = 0o700
_HOLDER_BYTES_MAX: Final = 200
_NOT_SUPPORTED: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
_allocate = getattr(os, "posix_fallocate", None)
#: What syncs an open file or directory; raises `OSError`.
Sync = Callable[[int], object]


def choose_syncs(full: int | None, data: Sync | None, everything: Sync) -> tuple[Sync, Sync]:
    """How to sync content and length of a file, and how to sync everything, with what a system
    offers.

    `full` is its `fcntl` command that also flushes the drive's cache. macOS needs it: its `fsync`
    leaves the bytes in that cache (fsync(2) of macOS). `data` is its `fdatasync`.
    """
    if full is None:
        return data or everything, everything

    def sync_full(descriptor: int) -> object:
        return fcntl.fcntl(descriptor, full)

    return sync_full, sync_full


_sync_data, _sync_all = choose_syncs(
    getattr(fcntl, "F_FULLFSYNC", None), getattr(os, "fdatasync", None), os.fsync
)


class OsDisk:
    """The files of the machine below `root`, which is created if missing.

    Safe for several threads. Holds descriptors of the root and of the lock file until `close`. A
    read-only one creates nothing and asks for no right to write: for looking at a backup, at a disk
    that takes no more writes, or beside a broker of another user. It takes the lock like any other
    where it can.
    """

    def __init__(self, root: str, *, is_read_only: bool = False) -> None:
        self.root = os.path.abspath(root)
        self._access = os.O_RDONLY if is_read_only else os.O_RDWR
        self._witness: OsFile | None = None  # the lock file, once it is locked
        try:
            if not is_read_only:
                _make_root(self.root)
            self._root = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise translate(error, "open", self.root) from error

    def close(self) -> None:
        """Close the root; open files stay usable. Safe to call twice."""
        if self._root >= 0:
            os.close(self._root)
            self._root = -1
        if self._witness is not None:
            self._witness.close()

    def lock(self, path: str, holder: str) -> OsLock:
        try:
            descriptor, is_writable = self._open_lock(path)
        except OSError as error:
            raise translate(error, "open", path) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            text = os.pread(descriptor, _HOLDER_BYTES_MAX, 0).decode("ascii", "replace").strip()
            os.close(descriptor)
            raise LockedError(directory=self.root, holder=text) from error
        except OSError as error:
            os.close(descriptor)
            raise translate(error, "lock", path) from error
        try:
            if is_writable:
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, holder.encode(), 0)
                # Opened separately: a copy of the locked descriptor would keep the lock after its
                # release.
                self._witness = OsFile(path, self._open(path, os.O_RDWR))
            return OsLock(self.root, path, root=os.dup(self._root), descriptor=descriptor)
        except OSError as error:
            os.close(descriptor)
            raise translate(error, "write", path) from error

    def _open_lock(self, path: str) -> tuple[int, bool]:
        """A descriptor to lock, and whether the holder can be written into it."""
        try:
            return self._open(path, os.O_RDWR | os.O_CREAT), True
        except OSError as error:
            if self._access == os.O_RDWR or error.errno not in _NOT_WRITABLE:
                raise
        return self._open(path, os.O_RDONLY), False

    def open(self, path: str, *, is_new: bool = False) -> OsFile:
        is_made = is_new and self._access == os.O_RDWR
        flags = self._access | (os.O_CREAT if is_made else 0)
        try:
            return OsFile(path, self._open(path, flags), self._witness)
        except OSError as error:
            raise translate(error, "open", path) from error

    def names(self, directory: str) -> list[str]:
        try:
            with self._directory(directory) as descriptor:
                return sorted(os.listdir(descriptor))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise translate(error, "list", directory) from error

    def make_directory(self, path: str) -> None:
        try:
            with self._directory(path.rpartition("/")[0]) as parent:
                os.mkdir(path.rpartition("/")[2], _DIRECTORY_MODE, dir_fd=parent)
        except FileExistsError:
            return
        except OSError as error:
            raise translate(error, "make", path) from error

    def sync_directory(self, path: str) -> None:
        try:
            with self._directory(path) as descriptor:
                _sync_all(descriptor)
        except OSError as error:
            raise translate(error, "sync of directory", path) from error
        confirm(self._witness)

    def rename(self, old: str, new: str) -> None:
        try:
            with self._directory(old.rpartition("/")[0]) as parent:
                old_name, new_name = old.rpartition("/")[2], new.rpartition("/")[2]
                os.replace(old_name, new_name, src_dir_fd=parent, dst_dir_fd=parent)
        except OSError as error:
            raise translate(error, "rename", old) from error

    def unlink(self, path: str) -> None:
        try:
            with self._directory(path.rpartition("/")[0]) as parent:
                os.unlink(path.rpartition("/")[2], dir_fd=parent)
        except OSError as error:
            raise translate(error, "unlink", path) from error

    def free_bytes(self) -> int:
        try:
            status = os.fstatvfs(self._root)
        except OSError as error:
            raise translate(error, "free space", self.root) from error
        return status.f_bavail * status.f_frsize

    def _open(self, path: str, flags: int) -> int:
        flags |= os.O_CLOEXEC | os.O_NOFOLLOW
        with self._directory(path.rpartition("/")[0]) as parent:
            return os.open(path.rpartition("/")[2], flags, mode=_FILE_MODE, dir_fd=parent)

    @contextmanager
    def _directory(self, path: str) -> Iterator[int]:
        """A descriptor of a directory, reached step by step without following links."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.dup(self._root)
        for name in path.split("/") if path else ():
            try:
                below = os.open(name, flags, dir_fd=descriptor)
            finally:
                os.close(descriptor)
            descriptor = below
        try:
            yield descriptor
        finally:
            os.close(descriptor)


def link_file(source: OsDisk, path: str, target: OsDisk) -> bool:
    """Give a file the same path below `target` too; False where the file system cannot do that.

    Durable after the next sync of the directory. What is written under one name is then seen under
    the other; `Segments.adopt` makes sure that a linked segment is not recycled.
    """
    try:
        os.link(f"{source.root}/{path}", f"{target.root}/{path}", follow_symlinks=False)
    except OSError as error:
        if error.errno in _NOT_LINKED:
            return False
        raise translate(error, "link", path) from error
    return True


class OsFile:
    """One file of the machine.

    Closed at the latest when nothing refers to it any more. A file dropped while it is being read
    stays open until that read ends and no longer, because only then does the disk get its room
    back.

    Linux reports a failed sync once for an open file, to whoever asks first: another thread that asks a
    moment later is told that all is well. So one thread at a time is let through, and a file whose
    sync failed fails each later one.
    """

    def __init__(self, path: str, descriptor: int, witness: OsFile | None = None) -> None:
        """Takes over the descriptor; see `confirm` for the witness."""
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
        """Go on after a short write until everything is written; returns the position behind it."""
        while rest:
            written = os.pwrite(self._descriptor, rest, position)
            if not written:
                raise OSError(errno.EIO, "nothing was written")
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
            _sync_data(self._descriptor)
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
            # Without this call the space is not reserved, and a full disk would fail a write.
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
    """Raise unless the file system still takes changes, so that the sync just made may be believed.

    After an error, some ext4 file systems report success for syncs that stored nothing
    (docs/decisions/0037). They then refuse even to allocate the first byte of the lock file, which
    it already has. The synced file itself is not used for this test: its next sync would have to
    wait for it.
    """
    if witness is not None and witness.is_open:
        with suppress(DiskFullError):  # refused for want of room: what is synced stays
            witness.allocate(1)


class OsLock:
    """An advisory lock on an open file; it ends with the process at the latest.

    It holds a file, not a path: if the file or the directory is removed or moved, another process
    may lock what stands there then. `check` notices that.
    """

    def __init__(self, directory: str, path: str, *, root: int, descriptor: int) -> None:
        """Takes over both descriptors."""
        self._directory = directory
        self._path = path
        self._root = root
        self._descriptor = descriptor
        # An open file never becomes another one; its name may lead to another one.
        self._root_inode = _inode(os.fstat(root))
        self._inode = _inode(os.fstat(descriptor))

    def check(self) -> None:
        try:
            root = os.stat(self._directory)
            found = os.stat(self._path, dir_fd=self._root, follow_symlinks=False)
        except OSError as error:
            raise translate(error, "look", f"{self._directory}/{self._path}") from error
        if _inode(root) != self._root_inode or _inode(found) != self._inode:
            raise DiskError(
                operation="look",
                path=f"{self._directory}/{self._path}",
                reason="replaced while this process worked on the data directory",
            )

    def release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            os.close(self._root)
            self._descriptor = self._root = -1


def _inode(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _make_root(root: str) -> None:
    """Create a directory and its missing parents, durable before anything is put into it.

    An empty directory may have been made by a process that was killed before it could sync. So for
    it too, every name that leads there is synced, as far up as this process may look and as the
    same disk reaches.
    """
    os.makedirs(root, mode=_DIRECTORY_MODE, exist_ok=True)
    if os.listdir(root):
        return
    device, above = os.stat(root).st_dev, os.path.dirname(root)
    while os.stat(above).st_dev == device:
        try:
            _sync_names(above)
        except PermissionError:
            return  # whoever may not look into it has made no name in it
        if above == os.path.dirname(above):
            return
        above = os.path.dirname(above)


def _sync_names(directory: str) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _sync_all(descriptor)
    finally:
        os.close(descriptor)
