"""The state of a disk between two operations: files and names, durable and not.

The model is told in `recording_disk.py`, what a power cut leaves of an image in `power_cut.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol


@dataclass(slots=True)
class Inode:
    """One file: what survives, what was done since, and what processes see."""

    durable: bytes = b""
    #: Content after each operation since the last sync; cumulative, as in a page cache.
    versions: list[bytes] = field(default_factory=list)
    #: What processes see where that differs: after a failed sync pages look stored and are not.
    cache: bytes | None = None

    @property
    def newest(self) -> bytes:
        """What reaches the disk at best."""
        return self.versions[-1] if self.versions else self.durable

    @property
    def seen(self) -> bytes:
        """What processes see."""
        return self.newest if self.cache is None else self.cache

    def change(self, position: int, data: bytes, length: int) -> None:
        """Put `data` at `position` of a file of `length` afterwards."""
        self.versions.append(_changed(self.newest, position, data, length))
        if self.cache is not None:
            self.cache = _changed(self.cache, position, data, length)

    def fail_sync(self) -> None:
        """Let what was not synced stay in the cache only, marked as stored there."""
        self.cache = self.seen
        self.versions.clear()

    def copy(self) -> Inode:
        return Inode(self.durable, list(self.versions), self.cache)


class CutOutcome(Protocol):
    """What becomes of everything that was not synced."""

    #: Whether its states are few, and some bugs show in no others: a sample leaves none of them out.
    is_rare: bool

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
        self._listings: dict[str, list[str]] = {}

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
        self._listings.clear()

    def rename(self, old: str, new: str) -> None:
        """Let a file change its name; on the disk the old one may stay beside the new one."""
        number = self.names[old]
        _set_name(self.names, old, -1)
        self.name(new, number)
        self.pending_names.append((old, -1))

    def listing(self, directory: str) -> list[str]:
        """Sorted names in a directory."""
        found = self._listings.get(directory)
        if found is None:
            prefix = directory + "/" if directory else ""
            start = len(prefix)
            found = self._listings[directory] = sorted(
                path[start:]
                for path in self.names
                if path.startswith(prefix) and "/" not in path[start:]
            )
        return found

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
        inode.durable = inode.newest
        inode.versions.clear()

    def change(self, number: int, content: bytes) -> None:
        """Give a file other content, not durable."""
        self.inodes[number].change(0, content, len(content))

    def links(self, number: int) -> int:
        """How many names a file has."""
        return list(self.names.values()).count(number)

    def signature(self) -> int:
        """Equal for equal states."""
        return hash(frozenset((path, self.content(n)) for path, n in self.names.items()))

    def content(self, number: int | None) -> bytes | None:
        """What processes see of a file; None for a directory."""
        return None if number is None else self.inodes[number].seen


class Moment:
    """An image at which the power may be cut: what all its outcomes have in common is found once."""

    def __init__(self, image: Image) -> None:
        self._image = image
        self._unsynced = {number for number, inode in image.inodes.items() if inode.versions}
        self._left: dict[tuple[bool, ...], _Left] = {}

    def has_unsynced_content(self) -> bool:
        """Whether a file that has a name was changed since its last sync."""
        return not self._unsynced.isdisjoint(self._image.names.values())

    def after_cut(self, outcome: CutOutcome) -> Cut:
        """What a power cut leaves, by `outcome`."""
        image = self._image
        kept = tuple(outcome.keeps_name(path) for path, _ in image.pending_names)
        left = self._left.get(kept)
        if left is None:
            left = self._left[kept] = self._names_left(kept)
        changed = {number: outcome.content(image.inodes[number]) for number in left.unsynced}
        return Cut(image, left, changed)

    def _names_left(self, kept: tuple[bool, ...]) -> _Left:
        image = self._image
        names = dict(image.durable_names)
        for (path, target), is_kept in zip(image.pending_names, kept, strict=True):
            if is_kept:
                _set_name(names, path, target)
        names = {path: target for path, target in names.items() if _has_parents(path, names)}
        unsynced = sorted(self._unsynced.intersection(names.values()))
        same = (
            (path, number if number in unsynced else image.content(number))
            for path, number in names.items()
        )
        return _Left(names, unsynced, hash(frozenset(same)))


class _Left(NamedTuple):
    """Names that a power cut leaves."""

    names: dict[str, int | None]
    #: Files among them whose content has an outcome.
    unsynced: list[int]
    #: Of the names and of all content that has none.
    signature: int


class Cut:
    """A state that a power cut leaves; made into an image only when somebody wants it."""

    def __init__(self, before: Image, left: _Left, changed: dict[int, bytes]) -> None:
        self._before = before
        self._left = left
        self._changed = changed
        #: Equal for equal states of one life.
        self.signature = hash((left.signature, *changed.items()))

    def image(self) -> Image:
        """The state itself."""
        image = Image()
        image.names = dict(self._left.names)
        image.durable_names = dict(image.names)
        for number in image.names.values():
            if number is not None:
                content = self._changed.get(number)
                if content is None:
                    content = self._before.inodes[number].durable
                image.inodes[number] = Inode(content)
        return image


def _changed(content: bytes, position: int, data: bytes, length: int) -> bytes:
    if not data:
        return content[:length].ljust(length, b"\0")
    behind = position + len(data)
    return b"".join((content[:position].ljust(position, b"\0"), data, content[behind:length]))


def _set_name(names: dict[str, int | None], path: str, target: int | None) -> None:
    if target == -1:
        names.pop(path, None)
    else:
        names[path] = target


def _has_parents(path: str, names: dict[str, int | None]) -> bool:
    parent = path.rpartition("/")[0]
    return not parent or (names.get(parent, 0) is None and _has_parents(parent, names))
