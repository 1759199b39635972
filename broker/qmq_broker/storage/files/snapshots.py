"""Snapshots: the state of all groups at one offset of the action log, so that older segments of the log can be deleted.

::

    state/groups.0, state/groups.1    MessagePack of Snapshot, pages, and a checksum line
    pages                             each length 4 (big-endian) and bytes; then a line: "pages", their length in
                                      20 digits; left out without pages

Written in turn, so that the previous one exists while the next is written. A start loads the newest
valid one and replays the action log from its offset on; segments of the action log below both may
be deleted. The service defines `content` and the pages. Only `content` has to fit in memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec

from qmq_broker.errors import CorruptionError, DiskError, NoRoomError
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.disk_port import Disk, DiskFile
from qmq_broker.storage.files.letters import NOT_AS_WRITTEN
from qmq_broker.storage.files.small_file import decode_whole, replace_by_parts, sealed_bytes
from qmq_client.group.dead_letters import Page
from qmq_client.wire.checksum import crc32c

_LENGTH_BYTES: Final = 4
_PAGES_LINE: Final = re.compile(rb"\npages ([0-9]{20})\n\Z")
_PAGES_LINE_BYTES: Final = 28


class GroupsContent(NamedTuple):
    """The groups of a snapshot."""

    #: Empty if all groups were discarded.
    groups: bytes
    #: The part that may be too large for the memory.
    pages: Iterable[Page] = ()


#: Raises an error for content that the service would not accept.
CheckGroups = Callable[[GroupsContent], object]


class Snapshot(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One snapshot."""

    store_id: bytes
    #: Increased by one with each snapshot.
    generation: int
    #: It covers exactly the actions below this offset of the action log.
    offset: int
    content: bytes


class SnapshotPage:
    """One page of a snapshot in an open file."""

    __slots__ = ("_checksum", "_file", "_length", "_path", "_position")

    def __init__(self, path: str, file: DiskFile, position: int, length: int) -> None:
        self._path, self._file, self._position, self._length = path, file, position, length
        #: The checksum of the first read.
        self._checksum: int | None = None

    def read(self) -> bytes:
        """Its content, in any thread; raises `DiskError` if it has changed since the first read."""
        content = self._file.read(self._position, self._length)
        checksum = crc32c(content)
        if len(content) < self._length or self._checksum not in (None, checksum):
            raise DiskError(operation="read", path=self._path, reason=NOT_AS_WRITTEN)
        self._checksum = checksum
        return content


class SnapshotPages:
    """The pages of a snapshot in an open file, read one by one, even after the file was replaced.

    The file is closed when this object and its pages are no longer referenced.
    """

    def __init__(self, path: str, file: DiskFile, first: int, next_: int) -> None:
        """The pages begin at position `first`."""
        self._path, self._file, self._first, self._next = path, file, first, next_

    def __iter__(self) -> Iterator[SnapshotPage]:
        position = self._first
        while position < self._next:
            length = int.from_bytes(self._file.read(position, _LENGTH_BYTES))
            if position + _LENGTH_BYTES + length > self._next:
                reason = "not a complete page"
                raise CorruptionError(segment=self._path, offset=position, reason=reason)
            yield SnapshotPage(self._path, self._file, position + _LENGTH_BYTES, length)
            position += _LENGTH_BYTES + length


@dataclass(frozen=True, slots=True)
class Slot:
    """A valid snapshot, and its pages."""

    snapshot: Snapshot
    pages: Iterable[Page] = ()
    #: Length of the file.
    file_bytes: int = 0

    @property
    def content(self) -> GroupsContent | None:
        """The groups of the snapshot; None if all were discarded."""
        content = self.snapshot.content
        return GroupsContent(content, self.pages) if content else None


def read_snapshot(disk: Disk, path: str) -> tuple[Slot | None, str]:
    """The snapshot in a slot, or the reason why it is damaged or unreadable; (None, "") if there is none.

    Raises `UnknownFormatError` if it is intact and of another version.
    """
    try:
        return _read_snapshot(disk, path)
    except DiskError as error:
        return None, str(error)


def _read_snapshot(disk: Disk, path: str) -> tuple[Slot | None, str]:
    directory, _, name = path.rpartition("/")
    if name not in disk.names(directory):
        return None, ""
    file = disk.open(path)
    is_kept = False
    try:
        next_position = sealed_bytes(file)
        if next_position is None:
            return None, "its checksum does not match"
        line_bytes = min(_PAGES_LINE_BYTES, next_position)
        line = _PAGES_LINE.match(file.read(next_position - line_bytes, line_bytes))
        next_position -= 0 if line is None else line_bytes
        first = next_position - (0 if line is None else int(line[1]))
        snapshot = decode_whole(path, file.read(0, max(0, first)), Snapshot)
        is_kept = first < next_position
        pages = SnapshotPages(path, file, first, next_position) if is_kept else ()
        return Slot(snapshot, pages, file.length()), ""
    finally:
        if not is_kept:
            file.close()


def write_snapshot(disk: Disk, snapshot: Snapshot, pages: Iterable[Page]) -> int:
    """Write a snapshot to its slot, durable on return; returns the length of the file.

    If that fails, the file is removed.
    """
    path = layout.SNAPSHOTS[snapshot.generation % len(layout.SNAPSHOTS)]
    try:
        return replace_by_parts(disk, path, _parts(snapshot, pages))
    except Exception:
        _remove_draft(disk, path)
        raise


def _remove_draft(disk: Disk, path: str) -> None:
    draft = layout.draft_path(path)
    directory, _, name = draft.rpartition("/")
    with suppress(DiskError, NoRoomError):  # the next snapshot writes over it
        if name in disk.names(directory):
            disk.unlink(draft)


def _parts(snapshot: Snapshot, pages: Iterable[Page]) -> Iterator[bytes]:
    yield msgspec.msgpack.encode(snapshot)
    pages_bytes = 0
    for content in (page.read() for page in pages):
        yield len(content).to_bytes(_LENGTH_BYTES)
        yield content
        pages_bytes += _LENGTH_BYTES + len(content)
    if pages_bytes:
        yield b"\npages %020d\n" % pages_bytes


class SnapshotFiles:
    """The two slots on a disk. Written by one thread."""

    def __init__(self, disk: Disk, store_id: bytes) -> None:
        """Reads both; raises `UnknownFormatError`."""
        self._disk = disk
        self._store_id = store_id
        #: The valid snapshots, by slot; None for a slot without one.
        self._slots = [self._read(path) for path in layout.SNAPSHOTS]

    @property
    def newest(self) -> Slot | None:
        """The newest valid snapshot; None if there is none."""
        whole = [slot for slot in self._slots if slot is not None]
        return max(whole, key=lambda slot: slot.snapshot.generation, default=None)

    @property
    def first_offset(self) -> int:
        """The offset from which the action log is needed, because a start may have to use the older snapshot."""
        return min(0 if slot is None else slot.snapshot.offset for slot in self._slots)

    def write(self, offset: int, content: GroupsContent) -> None:
        """Write a snapshot over the older one; durable on return.

        Requires: the action log is durable up to `offset`.
        """
        newest = self.newest
        generation = 1 if newest is None else newest.snapshot.generation + 1
        snapshot = Snapshot(self._store_id, generation, offset, content.groups)
        file_bytes = write_snapshot(self._disk, snapshot, content.pages)
        # The content is dropped: it may be large, and only a start needs it.
        slot = _without_content(Slot(snapshot, file_bytes=file_bytes))
        self._slots[generation % len(self._slots)] = slot

    def forget_content(self) -> None:
        """Keep only the end offsets of the snapshots; also remove drafts that a crash left."""
        for path in layout.SNAPSHOTS:
            _remove_draft(self._disk, path)
        self._slots = [slot and _without_content(slot) for slot in self._slots]

    def _read(self, path: str) -> Slot | None:
        slot, _ = read_snapshot(self._disk, path)
        return slot if slot is not None and slot.snapshot.store_id == self._store_id else None


def _without_content(slot: Slot) -> Slot:
    snapshot = msgspec.structs.replace(slot.snapshot, content=b"")
    return Slot(snapshot, file_bytes=slot.file_bytes)
