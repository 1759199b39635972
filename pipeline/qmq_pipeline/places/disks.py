"""A read-only `Disk` for a data directory on this machine, used by the broker's reading code.

The broker's disk opens files for writing and creates what is missing. A reader of a backup on a
read-only mount, or next to a running broker, must do neither. `remote.py` reads a directory at a
broker.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import Any, ClassVar

from qmq_broker.storage.files.disk_errors import translate
from qmq_broker.storage.files.disk_port import Disk
from qmq_pipeline.errors import SourceError


def _refuse(*_: Any, **__: Any) -> Any:
    raise SourceError(
        source="data directory",
        reason="the pipeline only reads it",
        remedy="Report this fault of the pipeline",
    )


class ReadFile(ABC):
    """One open file, for any thread; refuses to change anything."""

    @abstractmethod
    def read(self, position: int, count: int) -> bytes:
        """`count` bytes from `position`; fewer only at the end of the file."""

    def data_from(self, position: int) -> int:
        """`position` itself, without asking the file system for holes."""
        return position

    @abstractmethod
    def length(self) -> int:
        """Bytes in the file."""

    @abstractmethod
    def end_at(self, position: int) -> None:
        """No byte from here on will be read, so it need not be read ahead."""

    @abstractmethod
    def close(self) -> None:
        """Close the file. Safe to call twice."""

    write = sync = allocate = truncate = links = _refuse


class ReadDisk(ABC):
    """Files below one directory; refuses to change anything."""

    #: Whether it serves only the durable part of a log; a local file may hold unsynced bytes.
    gives_durable_alone: ClassVar[bool] = False

    @abstractmethod
    def open(self, path: str, *, is_new: bool = False) -> ReadFile:
        """Open for reading; `DiskError` if there is no such file."""

    @abstractmethod
    def names(self, directory: str) -> list[str]:
        """Sorted names in a directory; none if there is no such directory."""

    @abstractmethod
    def close(self) -> None:
        """Close all access to the files. Safe to call twice."""

    lock = make_directory = sync_directory = rename = unlink = free_bytes = _refuse


class LocalDisk(ReadDisk):
    """The files below `root` of this machine, or of a mounted file system."""

    def __init__(self, root: str) -> None:
        """Raises `SourceError` if there is no such directory."""
        self.root = os.path.abspath(root)
        if not os.path.isdir(self.root):
            raise SourceError(
                source=root,
                reason="no such directory",
                remedy="Give the data directory of a broker, a backup or an archive",
            )

    def open(self, path: str, *, is_new: bool = False) -> ReadFile:
        if is_new:
            _refuse()
        try:
            return _LocalFile(os.open(os.path.join(self.root, path), os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            raise translate(error, "open", path) from error

    def names(self, directory: str) -> list[str]:
        try:
            return sorted(os.listdir(os.path.join(self.root, directory)))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise translate(error, "list", directory) from error

    def close(self) -> None:
        """Does nothing: each file is closed by itself."""


class _LocalFile(ReadFile):
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read(self, position: int, count: int) -> bytes:
        try:
            return os.pread(self._descriptor, count, position)
        except OSError as error:
            raise translate(error, "read", "file") from error

    def length(self) -> int:
        return os.fstat(self._descriptor).st_size

    def end_at(self, position: int) -> None:
        """Does nothing: the system decides about read-ahead."""

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


_IS_A_DISK: type[Disk] = LocalDisk
