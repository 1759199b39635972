"""A disk in memory that remembers every operation and can say what a power cut would leave of it.

The model, as harsh as POSIX allows and no harsher:

- what a process reads is what was written last; what survives is what was synced;
- of the operations on a file since its last sync each 512-byte sector keeps any earlier state: a
  sector is written as a whole, but sectors in any order, or not at all;
- a file's length likewise; where it grew, bytes that never reached the disk read as zeros, or as
  whatever lay there before;
- names made, renamed or removed since the last sync of their directory may be lost one by one.

A killed process is not a power cut: everything it did stays, synced or not, and may still be lost
later. A sync that fails leaves the written bytes in the cache, marked as stored: later syncs say yes
and do not store them, until they are written again. `RecordingDisk` is the double of `OsDisk`; `Image` is the state between operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from qmq_broker.errors import DiskError, DiskFullError, LockedError
from tests.crash.image import CutOutcome, Image, Inode

__all__ = ["CutOutcome", "Image", "Inode", "PassingDisk", "RecordingDisk", "images"]

UNLIMITED = 2**40
#: One operation, replayed onto an image.
Operation = Callable[["Image"], None]


class RecordingDisk:
    """A disk for one life of a process; its operations can be replayed one by one."""

    def __init__(self, image: Image | None = None, *, capacity_bytes: int = UNLIMITED) -> None:
        #: The state before the first operation.
        self.first_image = Image() if image is None else image.copy()
        self.image = self.first_image.copy()
        self.operations: list[Operation] = []
        self.capacity_bytes = capacity_bytes
        #: Calls by name, for cost gates.
        self.calls: dict[str, int] = {}
        #: Asked before each sync of a file: whether it fails, and leaves pages that look stored.
        self.fails_sync: Callable[[str], bool] = lambda path: False
        self._next_number = max(self.image.inodes, default=0) + 1
        self._is_locked = False

    def lock(self, path: str, holder: str) -> RecordingLock:
        if self._is_locked:
            raise LockedError(directory="memory", holder=holder)
        self._is_locked = True
        return RecordingLock(self)

    def open(self, path: str, *, is_new: bool = False) -> RecordingFile:
        number = self.image.names.get(path, -1)
        if number == -1:
            if not is_new:
                raise DiskError(operation="open", path=path, reason="No such file or directory")
            number = self._next_number
            self._next_number += 1

            def make(image: Image) -> None:
                image.inodes[number] = Inode()
                image.name(path, number)

            self.perform("open", path, make)
        if number is None:
            raise DiskError(operation="open", path=path, reason="Is a directory")
        return RecordingFile(self, path, number)

    def names(self, directory: str) -> list[str]:
        return list(self.image.listing(directory))

    def make_directory(self, path: str) -> None:
        if path not in self.image.names:
            self.perform("make_directory", path, lambda image: image.name(path, None))

    def sync_directory(self, path: str) -> None:
        self.perform("sync_directory", path, lambda image: image.sync_directory(path))

    def rename(self, old: str, new: str) -> None:
        self.perform("rename", new, lambda image: image.rename(old, new))

    def unlink(self, path: str) -> None:
        self.perform("unlink", path, lambda image: image.name(path, -1))

    def free_bytes(self) -> int:
        if self.capacity_bytes == UNLIMITED:
            return UNLIMITED
        used = sum(
            len(self.image.inodes[number].seen)
            for number in self.image.names.values()
            if number is not None
        )
        return self.capacity_bytes - used

    def take(self, count: int) -> None:
        """Raise `DiskFullError` unless a file may grow by so much."""
        if self.room_bytes(count) < 0:
            raise DiskFullError("no space left")

    def room_bytes(self, count: int) -> int:
        """What is left when a file has grown by so much; negative when that is too much."""
        return self.free_bytes() - count if count > 0 else 0

    def perform(self, call: str, path: str, operation: Operation) -> None:
        """Do an operation and remember it; tests make it fail or skip it."""
        self.calls[call] = self.calls.get(call, 0) + 1
        operation(self.image)
        self.operations.append(operation)

    def unlock(self) -> None:
        """The process is gone."""
        self._is_locked = False


class PassingDisk(RecordingDisk):
    """A disk for a look at one state: nothing is remembered, and the image becomes its own."""

    def __init__(self, image: Image) -> None:
        super().__init__()
        self.image = image
        self._next_number = max(image.inodes, default=0) + 1

    def perform(self, call: str, path: str, operation: Operation) -> None:
        operation(self.image)


class RecordingFile:
    """An open file of a `RecordingDisk`."""

    def __init__(self, disk: RecordingDisk, path: str, number: int) -> None:
        self.path = path
        self._disk = disk
        self.number = number

    def read(self, position: int, count: int) -> bytes:
        self._disk.calls["read"] = self._disk.calls.get("read", 0) + 1
        return self._seen[position : position + count]

    def data_from(self, position: int) -> int:
        rest = self._seen[position:]
        return position + len(rest) - len(rest.lstrip(b"\0"))

    def write(self, position: int, parts: Sequence[bytes | memoryview]) -> None:
        data = b"".join(parts)
        room_bytes = self._disk.room_bytes(position + len(data) - len(self._seen))
        if room_bytes >= 0:
            self._change("write", position, data)
            return
        # The operating system writes what has room, then says that there is none.
        if data := data[:room_bytes]:
            self._change("write", position, data)
        raise DiskFullError("no space left")

    def sync(self) -> None:
        number = self.number
        if self._disk.fails_sync(self.path):
            self._disk.perform("failed sync", self.path, lambda i: i.inodes[number].fail_sync())
            raise DiskError(operation="sync", path=self.path, reason="Input/output error")
        self._disk.perform("sync", self.path, lambda image: image.sync(number))

    def allocate(self, length: int) -> None:
        self._disk.take(length - len(self._seen))
        if len(self._seen) < length:
            self._change("allocate", len(self._seen), bytes(length - len(self._seen)))

    def truncate(self, length: int) -> None:
        if len(self._seen) != length:
            self._change("truncate", 0, b"", length)

    def length(self) -> int:
        return len(self._seen)

    def links(self) -> int:
        return self._disk.image.links(self.number)

    def close(self) -> None:
        pass

    @property
    def _seen(self) -> bytes:
        return self._disk.image.inodes[self.number].seen

    def _change(self, call: str, position: int, data: bytes, length: int | None = None) -> None:
        number = self.number
        after = max(len(self._seen), position + len(data)) if length is None else length
        self._disk.perform(
            call, self.path, lambda image: image.inodes[number].change(position, data, after)
        )


class RecordingLock:
    """The lock of a `RecordingDisk`."""

    def __init__(self, disk: RecordingDisk) -> None:
        self._disk = disk

    def check(self) -> None:
        """Nobody takes files away from this disk."""

    def release(self) -> None:
        self._disk.unlock()


def images(first: Image, operations: Sequence[Operation]) -> Iterator[tuple[int, Image]]:
    """The state after each prefix of the operations, with the prefix's length."""
    image = first.copy()
    yield 0, image
    for count, operation in enumerate(operations, start=1):
        operation(image)
        yield count, image
