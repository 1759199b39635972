"""Several directories on one disk, so that one power cut takes them all."""

from __future__ import annotations

from qmq_broker.errors import LockedError
from qmq_broker.storage.files.disk_port import Disk, DiskFile, DiskLock
from tests.crash.recording_disk import Operation, RecordingDisk


class Below:
    """The part of a disk below one directory, which is there already, as a disk of its own."""

    def __init__(self, disk: RecordingDisk, root: str) -> None:
        self.disk = disk
        self.root = root
        self._is_locked = False

    @property
    def operations(self) -> list[Operation]:
        """Of the whole disk."""
        return self.disk.operations

    def lock(self, path: str, holder: str) -> DiskLock:
        if self._is_locked:
            raise LockedError(directory=self.root, holder=holder)
        self._is_locked = True
        return BelowLock(self)

    def open(self, path: str, *, is_new: bool = False) -> DiskFile:
        return self.disk.open(self._full(path), is_new=is_new)

    def names(self, directory: str) -> list[str]:
        return self.disk.names(self._full(directory))

    def make_directory(self, path: str) -> None:
        self.disk.make_directory(self._full(path))

    def sync_directory(self, path: str) -> None:
        self.disk.sync_directory(self._full(path))

    def rename(self, old: str, new: str) -> None:
        self.disk.rename(self._full(old), self._full(new))

    def unlink(self, path: str) -> None:
        self.disk.unlink(self._full(path))

    def free_bytes(self) -> int:
        return self.disk.free_bytes()

    def link_to(self, path: str, target: Below) -> bool:
        """Give a file of this directory the same path below another one."""
        number = self.disk.image.names[self._full(path)]
        full = target._full(path)
        self.disk.perform("link", full, lambda image: image.name(full, number))
        return True

    def unlock(self) -> None:
        self._is_locked = False

    def _full(self, path: str) -> str:
        return f"{self.root}/{path}" if path else self.root


class BelowLock:
    """The lock of one of them."""

    def __init__(self, below: Below) -> None:
        self._below = below

    def check(self) -> None:
        """Nobody takes files away from this disk."""

    def release(self) -> None:
        self._below.unlock()


def disks(disk: RecordingDisk, *roots: str) -> list[Disk]:
    """These directories of a disk, durably made."""
    for root in roots:
        disk.make_directory(root)
    disk.sync_directory("")
    return [Below(disk, root) for root in roots]
