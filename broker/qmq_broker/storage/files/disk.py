"""The only module that calls the operating system's file functions, with `os_file.py` for open files.

All storage code is written against `Disk` and `DiskFile` (`disk_port.py`). `OsDisk` is the real
one, rooted at a data directory; crash tests put a recording disk in its place. Paths are relative
to the root, with forward slashes. A symbolic link anywhere below the root is refused, so that
writes cannot be redirected.

Durability, by POSIX: `DiskFile.sync` makes the content and length of a file durable,
`sync_directory` makes names durable. Every `OSError` becomes `DiskError`, or `DiskFullError` when
there is no space, or `FilesFullError` when no more files may be open. Not for: caching, retries (a
failed sync is never tried again), memory maps (a fault in one cannot be caught).
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from qmq_broker.errors import DiskError, LockedError
from qmq_broker.storage.files.disk_errors import translate
from qmq_broker.storage.files.os_file import OsFile, confirm, sync_all

#: The target is on another file system, or the file system has no hard links, or no more for this file.
_NOT_LINKED: Final = frozenset(
    {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS}
)
#: Errors for a file that this process may not write.
_NOT_WRITABLE: Final = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
_FILE_MODE: Final = 0o600
_DIRECTORY_MODE: Final = 0o700
#: The fixed length of a lock file; the text about the holder is shorter.
_HOLDER_BYTES_MAX: Final = 200


class OsDisk:
    """The files of the machine below `root`, which is created if missing.

    Safe for several threads. Holds descriptors of the root and of the lock file until `close`. A
    read-only one creates nothing and asks for no right to write: for reading a backup, a disk that
    accepts no more writes, or the directory of another user's broker. It takes the lock if it can.
    """

    def __init__(self, root: str, *, is_read_only: bool = False) -> None:
        self.root = os.path.abspath(root)
        self._access = os.O_RDONLY if is_read_only else os.O_RDWR
        self._witness: OsFile | None = None  # the lock file, once this process has locked it
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
            raise LockedError(directory=self.root, holder=text or "another process") from error
        except OSError as error:
            os.close(descriptor)
            raise translate(error, "lock", path) from error
        try:
            if is_writable:
                # The length never changes, so that a full disk does not prevent the write.
                os.pwrite(descriptor, holder.encode().ljust(_HOLDER_BYTES_MAX), 0)
                # Opened separately: a copy of the locked descriptor would keep the lock after its
                # release.
                self._witness = OsFile(path, self._open(path, os.O_RDWR))
            return OsLock(self.root, path, root=self._root, descriptor=descriptor)
        except OSError as error:
            os.close(descriptor)
            raise translate(error, "write", path) from error

    def _open_lock(self, path: str) -> tuple[int, bool]:
        """A descriptor to lock, and whether this process can write the holder into it."""
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
                sync_all(descriptor)
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
    """Hard-link a file to the same path below `target`; returns False if the file system cannot do that.

    Durable after the next sync of the directory. A write under one name is then seen under the
    other; `Segments.adopt` makes sure that a linked segment is not recycled.
    """
    try:
        os.link(f"{source.root}/{path}", f"{target.root}/{path}", follow_symlinks=False)
    except OSError as error:
        if error.errno in _NOT_LINKED:
            return False
        raise translate(error, "link", path) from error
    return True


class OsLock:
    """An advisory lock on an open file; it ends with the process at the latest.

    It holds a file, not a path: if the file or the directory is removed or moved, another process
    may lock the new file at that path. `check` notices that.
    """

    def __init__(self, directory: str, path: str, *, root: int, descriptor: int) -> None:
        """Takes over `descriptor`; `root` is the open directory."""
        self._directory = directory
        self._path = f"{directory}/{path}"
        self._descriptor = descriptor
        # The open file stays the same; its path may lead to another file later.
        self._root_inode = _inode(os.fstat(root))
        self._inode = _inode(os.fstat(descriptor))

    def check(self) -> None:
        try:
            found = os.stat(self._path, follow_symlinks=False)
            # If it has no other name, the path of the directory leads to the one that it is in.
            root = None if found.st_nlink == 1 else os.stat(self._directory)
        except OSError as error:
            raise translate(error, "look", self._path) from error
        is_elsewhere = root is not None and _inode(root) != self._root_inode
        if is_elsewhere or _inode(found) != self._inode:
            raise DiskError(
                operation="look",
                path=self._path,
                reason="replaced while this process worked on the data directory",
            )

    def release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _inode(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _make_root(root: str) -> None:
    """Create a directory and its missing parents, durable before anything is put into it.

    An empty directory may have been made by a process that was killed before it could sync. So its
    parent directories are synced as well, up to the first one that this process may not read or
    that is on another disk.
    """
    os.makedirs(root, mode=_DIRECTORY_MODE, exist_ok=True)
    if os.listdir(root):
        return
    device, above = os.stat(root).st_dev, os.path.dirname(root)
    while os.stat(above).st_dev == device:
        try:
            _sync_names(above)
        except PermissionError:
            return  # a user who may not list the directory has created nothing in it
        if above == os.path.dirname(above):
            return
        above = os.path.dirname(above)


def _sync_names(directory: str) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync_all(descriptor)
    finally:
        os.close(descriptor)
