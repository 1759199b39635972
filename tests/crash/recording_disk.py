"""A disk in memory that remembers every operation and can say what a power cut would leave of it.

The model, as harsh as POSIX allows and no harsher:

- what a process reads is what was written last; what survives is what was synced;
- of the operations on a file since its last sync each 512-byte sector keeps any earlier state: a
  sector is written as a whole, but sectors in any order, or not at all;
- a file's length likewise; where it grew, bytes that never reached the disk read as zeros, or as
  whatever lay there before;
- names made, renamed or removed since the last sync of their directory may be lost one by one.

A killed process is not a power cut: everything it did stays, synced or not, and may still be lost
later. `RecordingDisk` is the double of `OsDisk`; `Image` is the state between operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from qmq_broker.errors import DiskError, DiskFullError, LockedError

UNLIMITED = 2**40
#: One operation, replayed onto an image.
Operation = Callable[["Image"], None]


@dataclass(slots=True)
class Inode:
    """One file: what survives, what was done since, and what processes see."""

    durable: bytes = b""
    #: Content after each operation since the last sync; cumulative, as in a page cache.
    versions: list[bytes] = field(default_factory=list)

    @property
    def seen(self) -> bytes:
        return self.versions[-1] if self.versions else self.durable

    def copy(self) -> Inode:
        return Inode(self.durable, list(self.versions))


class Fate(Protocol):
    """What becomes of everything that was not synced."""

    def keeps_name(self, path: str) -> bool:
        """Whether a change of a name reached the disk; asked for each in order."""
        ...

    def content(self, inode: Inode) -> bytes:
        """What a file holds afterwards."""
        ...


class Image:
    """Files and names, durable and not."""

    def __init__(self) -> None:
        self.inodes: dict[int, Inode] = {}
        #: Path → number of the file, or None for a directory.
        self.names: dict[str, int | None] = {}
        self.durable_names: dict[str, int | None] = {}
        #: Changes since the last sync of their directory: path, what it names or -1 when removed.
        self.pending_names: list[tuple[str, int | None]] = []

    def copy(self) -> Image:
        """The same state; changed independently."""
        image = Image()
        image.inodes = {number: inode.copy() for number, inode in self.inodes.items()}
        image.names = dict(self.names)
        image.durable_names = dict(self.durable_names)
        image.pending_names = list(self.pending_names)
        return image

    def name(self, path: str, target: int | None) -> None:
        """Let a path name a file, a directory (None), or nothing (-1)."""
        _set_name(self.names, path, target)
        self.pending_names.append((path, target))

    def sync_directory(self, directory: str) -> None:
        """Make the names of a directory durable."""
        rest = []
        for path, target in self.pending_names:
            if path.rpartition("/")[0] == directory:
                _set_name(self.durable_names, path, target)
            else:
                rest.append((path, target))
        self.pending_names = rest

    def sync(self, number: int) -> None:
        """Make a file durable."""
        inode = self.inodes[number]
        inode.durable = inode.seen
        inode.versions.clear()

    def change(self, number: int, content: bytes) -> None:
        """Give a file new content, not durable."""
        self.inodes[number].versions.append(content)

    def after_cut(self, fates: Fate) -> Image:
        """What a power cut leaves, by `fates`."""
        image = Image()
        names = dict(self.durable_names)
        for path, target in self.pending_names:
            if fates.keeps_name(path):
                _set_name(names, path, target)
        image.names = {path: target for path, target in names.items() if _has_parents(path, names)}
        image.durable_names = dict(image.names)
        for number in image.names.values():
            if number is not None:
                image.inodes[number] = Inode(fates.content(self.inodes[number]))
        return image

    def signature(self) -> int:
        """Equal for equal states."""
        return hash(
            frozenset(
                (path, None if number is None else self.inodes[number].seen)
                for path, number in self.names.items()
            )
        )


def _set_name(names: dict[str, int | None], path: str, target: int | None) -> None:
    if target == -1:
        names.pop(path, None)
    else:
        names[path] = target


def _has_parents(path: str, names: dict[str, int | None]) -> bool:
    parent = path.rpartition("/")[0]
    return not parent or (names.get(parent, 0) is None and _has_parents(parent, names))


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
        prefix = directory + "/" if directory else ""
        return sorted(
            path[len(prefix) :]
            for path in self.image.names
            if path.startswith(prefix) and "/" not in path[len(prefix) :]
        )

    def make_directory(self, path: str) -> None:
        if path not in self.image.names:
            self.perform("make_directory", path, lambda image: image.name(path, None))

    def sync_directory(self, path: str) -> None:
        self.perform("sync_directory", path, lambda image: image.sync_directory(path))

    def rename(self, old: str, new: str) -> None:
        number = self.image.names[old]

        def rename(image: Image) -> None:
            # One change on the disk: a draft's name that stays behind harms nobody.
            _set_name(image.names, old, -1)
            image.name(new, number)
            image.pending_names.append((old, -1))

        self.perform("rename", new, rename)

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
        if count > 0 and self.free_bytes() < count:
            raise DiskFullError("no space left")

    def perform(self, call: str, path: str, operation: Operation) -> None:
        """Do an operation and remember it; tests make it fail or skip it."""
        self.calls[call] = self.calls.get(call, 0) + 1
        operation(self.image)
        self.operations.append(operation)

    def unlock(self) -> None:
        """The process is gone."""
        self._is_locked = False


class RecordingFile:
    """An open file of a `RecordingDisk`."""

    def __init__(self, disk: RecordingDisk, path: str, number: int) -> None:
        self.path = path
        self._disk = disk
        self._number = number

    def read(self, position: int, count: int) -> bytes:
        self._disk.calls["read"] = self._disk.calls.get("read", 0) + 1
        return self._seen[position : position + count]

    def write(self, position: int, parts: Sequence[bytes | memoryview]) -> None:
        data = b"".join(parts)
        self._disk.take(position + len(data) - len(self._seen))
        before = self._seen
        content = before[:position].ljust(position, b"\0") + data + before[position + len(data) :]
        self._change("write", content)

    def sync(self) -> None:
        number = self._number
        self._disk.perform("sync", self.path, lambda image: image.sync(number))

    def allocate(self, length: int) -> None:
        self._disk.take(length - len(self._seen))
        if len(self._seen) < length:
            self._change("allocate", self._seen.ljust(length, b"\0"))

    def truncate(self, length: int) -> None:
        if len(self._seen) != length:
            self._change("truncate", self._seen[:length].ljust(length, b"\0"))

    def length(self) -> int:
        return len(self._seen)

    def links(self) -> int:
        return 1

    def close(self) -> None:
        pass

    @property
    def _seen(self) -> bytes:
        return self._disk.image.inodes[self._number].seen

    def _change(self, call: str, content: bytes) -> None:
        number = self._number
        self._disk.perform(call, self.path, lambda image: image.change(number, content))


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
