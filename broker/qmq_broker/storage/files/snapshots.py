"""Snapshots: the state of all groups at one point of the action log, so that it need not grow
forever.

::

    state/groups.0, state/groups.1    MessagePack of Snapshot and a checksum line

Written in turn, so that the previous one is there while the next is made. A start takes the newest
whole one and replays the action log from its offset on; segments of the action log below both may
go. What `content` means is the service's affair.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from qmq_broker.storage.files import layout
from qmq_broker.storage.files.disk_port import Disk
from qmq_broker.storage.files.small_file import decode_whole, read_file, replace_file, unseal

#: Raises an error for content of a snapshot that the service would not accept.
CheckGroups = Callable[[bytes], object]


class Snapshot(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One snapshot."""

    store_id: bytes
    #: One more with each snapshot.
    generation: int
    #: It covers everything in the action log below this offset, and nothing else.
    offset: int
    content: bytes


class SnapshotFiles:
    """The two slots on a disk. Written by one thread."""

    def __init__(self, disk: Disk, store_id: bytes) -> None:
        """Reads both; raises `UnknownFormatError`."""
        self._disk = disk
        self._store_id = store_id
        #: The whole ones, by slot; None for a slot without one.
        self._slots = [self._read(path) for path in layout.SNAPSHOTS]

    @property
    def newest(self) -> Snapshot | None:
        """The newest whole snapshot; None if there is none."""
        whole = [slot for slot in self._slots if slot is not None]
        return max(whole, key=lambda slot: slot.generation, default=None)

    @property
    def first_offset(self) -> int:
        """The action log is needed from here on: the older of the two may have to serve."""
        return min(0 if slot is None else slot.offset for slot in self._slots)

    def write(self, offset: int, content: bytes) -> None:
        """Write a snapshot over the older one; durable on return.

        Requires: the action log is durable up to `offset`.
        """
        newest = self.newest
        generation = 1 if newest is None else newest.generation + 1
        snapshot = Snapshot(self._store_id, generation, offset, content)
        number = generation % len(self._slots)
        replace_file(self._disk, layout.SNAPSHOTS[number], msgspec.msgpack.encode(snapshot))
        # The content is not kept: it may be large, and only a start needs it.
        self._slots[number] = msgspec.structs.replace(snapshot, content=b"")

    def _read(self, path: str) -> Snapshot | None:
        data = read_file(self._disk, path)
        content = None if data is None else unseal(data)
        if content is None:
            return None
        snapshot = decode_whole(path, content, Snapshot)
        return snapshot if snapshot.store_id == self._store_id else None
