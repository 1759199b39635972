"""One file of the key index: which frames of the commit log may hold a message id or a key.

::

    offset bytes field                        header, 40 bytes, big-endian
    0      4     magic "QMQI"
    4      1     version, 1
    5      3     reserved, 0
    8      4     number of slots, s
    12     8     commit log offset from which on everything is indexed here
    20     8     when the frame of the first entry was stored, ms since 1970 UTC
    28     8     first half of the store id
    36     4     CRC-32C of bytes 0 … 35
    40     4 s   slots: number of the newest entry whose hash leads here, from 1; 0 for none
    …      20 n  entries, each:
                 hash 4, commit log offset of the frame 8, seconds after the first 4, number of the
                 entry before it in its slot 4 (0 for none, always less than its own)

A hash (`index_keys.py`) belongs to the slot of its remainder modulo s. Different keys may have equal
hashes, so a search also reads the frame. One entry stands for all equal keys of a frame.

While a file grows, its slots are only in memory and its entries are written in portions. When it is
full, the slots are written and the file is sealed. The table (`key_index.py`) has the number of valid
entries and their checksum. The layout is RocketMQ's, but an entry holds the offset of the frame, not
of the record: subject, sequence and time are in the frame. Numbers are packed column by column,
because one by one costs ten times as much. `docs/format/key-index.md` describes the format.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence
from threading import Lock
from typing import Final, NamedTuple

import msgspec

from qmq_broker.errors import CorruptionError
from qmq_broker.storage.files.disk_port import Disk, DiskFile
from qmq_broker.storage.files.layout import index_path
from qmq_broker.storage.index.index_keys import HASHES, FrameKeys, id_hash
from qmq_client.wire.checksum import crc32c

_ENTRY_BYTES: Final = 20


def big_endian(numbers: array[int]) -> bytes:
    """Four-byte numbers as big-endian bytes; half a million block other threads only briefly."""
    copy = numbers[:]
    if sys.byteorder == "little":
        copy.byteswap()
    return copy.tobytes()


def entry_hashes(entries: bytes) -> array[int]:
    """The hashes of packed entries, which are their first column."""
    words = array("I", entries)[:: _ENTRY_BYTES // 4]
    if sys.byteorder == "little":
        words.byteswap()
    return words


def pack_entries(
    hashes: Sequence[int], previous: Sequence[int], *, offset: int, seconds: int
) -> bytes:
    """Pack the entries of one frame, column by column from four-byte words."""
    count = len(hashes)
    entries = bytearray(_ENTRY_BYTES * count)
    words = memoryview(entries).cast("I")
    high, low = divmod(offset, 2**32)
    for column, values in ((0, hashes), (4, previous)):
        words[column::5] = memoryview(struct.pack(f">{count}I", *values)).cast("I")
    for column, value in ((1, high), (2, low), (3, seconds)):
        words[column::5] = memoryview(struct.pack(">I", value) * count).cast("I")
    return bytes(entries)


INDEX_MAGIC: Final = b"QMQI"
INDEX_VERSION: Final = 1
_HEADER: Final = struct.Struct(">4sB3xIQQ8sI")
_ENTRY: Final = struct.Struct(">IQII")
_NUMBER: Final = struct.Struct(">I")
INDEX_HEADER_BYTES: Final = _HEADER.size
INDEX_ENTRY_BYTES: Final = _ENTRY.size
#: Bytes of entries that one step reads, when a file is checked or reopened.
_CHECK_BYTES: Final = 1024 * 1024 // INDEX_ENTRY_BYTES * INDEX_ENTRY_BYTES


class IndexFileState(msgspec.Struct, frozen=True, array_like=True):
    """The entry of one file in the table."""

    name: str
    #: The file covers the commit log from here …
    first_offset: int
    #: … to here.
    next_offset: int
    first_stored_at_ms: int
    last_stored_at_ms: int
    slot_count: int
    count: int
    #: Checksum of the entries.
    entries_crc: int
    #: Checksum of the slots; None while the file grows.
    slots_crc: int | None


class Hit(NamedTuple):
    """A frame that may hold the searched key; it was stored within a second after `stored_from_ms`."""

    offset: int
    stored_from_ms: int


class IndexFile:
    """A growing or sealed index file. Changed by one thread, read by any.

    Raises `DiskError` and `NoRoomError` of the disk, and `CorruptionError` if the file is damaged.
    """

    def __init__(self, disk: Disk, store_id: bytes, *, first_offset: int, slot_count: int) -> None:
        """Create an empty file in memory; `begin` gives it a name."""
        self._disk = disk
        self._store_id = store_id
        self._lock = Lock()
        self._file: DiskFile | None = None
        self._slots: array[int] | None = None
        self._tail = bytearray()
        self._written_count = 0
        self._entries_crc = 0
        self._slots_crc: int | None = None
        self._checked_bytes = 0
        self._checking_crcs = (0, 0)
        self.slot_count = slot_count
        self.name = ""
        self.first_offset = first_offset
        self.next_offset = first_offset
        self.first_stored_at_ms = 0
        self.last_stored_at_ms = 0
        self.count = 0
        self.is_sealed = False
        #: Whether the whole file was read and matches its checksums.
        self.is_checked = True

    @classmethod
    def of_state(cls, disk: Disk, store_id: bytes, state: IndexFileState) -> IndexFile:
        """A file from its entry in the table; reads nothing yet."""
        file = cls(disk, store_id, first_offset=state.first_offset, slot_count=state.slot_count)
        file.name = state.name
        file.next_offset = state.next_offset
        file.first_stored_at_ms = state.first_stored_at_ms
        file.last_stored_at_ms = state.last_stored_at_ms
        file.count = file._written_count = state.count
        file._entries_crc = state.entries_crc
        file._slots_crc = state.slots_crc
        file.is_sealed = state.slots_crc is not None
        file.is_checked = False
        return file

    def state(self) -> IndexFileState:
        """The entry for the table. Requires: flushed, and synced before the table is written."""
        assert self._written_count == self.count
        return IndexFileState(
            name=self.name,
            first_offset=self.first_offset,
            next_offset=self.next_offset,
            first_stored_at_ms=self.first_stored_at_ms,
            last_stored_at_ms=self.last_stored_at_ms,
            slot_count=self.slot_count,
            count=self.count,
            entries_crc=self._entries_crc,
            slots_crc=self._slots_crc,
        )

    @property
    def path(self) -> str:
        """Its path in the data directory."""
        return index_path(self.name)

    @property
    def is_usable(self) -> bool:
        """Whether it can be searched. A file that was growing at the last stop cannot be searched before `take_up`."""
        return self.is_sealed or self._slots is not None or not self.count

    @property
    def tail_bytes(self) -> int:
        """Bytes of entries that are not written yet."""
        return len(self._tail)

    def begin(self, name: str, stored_at_ms: int) -> None:
        """Set the name, and the time from which entries count their seconds."""
        with self._lock:
            self.name = name
            self.first_stored_at_ms = self.last_stored_at_ms = stored_at_ms
            self._slots = array("I", bytes(4 * self.slot_count))

    def add(self, keys: FrameKeys, *, offset: int, stored_at_ms: int) -> None:
        """Index the frame at `offset`. Requires: begun, not sealed, frames in order."""
        with self._lock:
            hashes: list[int] = []
            previous: list[int] = []
            for run in keys.ids:
                count = run.next_counter - run.first_counter
                first = id_hash(run.instance, run.first_counter)
                hashes += range(first, min(first + count, HASHES))
                hashes += range(first + count - HASHES)  # those that wrap around to 0, if any
                self._link_run(first, count, previous)
            slots = self._grown_slots()
            number = self.count + len(hashes) + 1
            for hash_ in keys.keys:
                slot = hash_ % self.slot_count
                previous.append(slots[slot])
                slots[slot] = number
                number += 1
            hashes += keys.keys
            seconds = (stored_at_ms - self.first_stored_at_ms) // 1000
            self._tail += pack_entries(hashes, previous, offset=offset, seconds=seconds)
            self.count += len(hashes)
            self.last_stored_at_ms = stored_at_ms

    def flush(self) -> None:
        """Write the entries that are only in memory; not durable on return."""
        if not self._tail:
            return
        if self._file is None:
            file = self._disk.open(self.path, is_new=True)
            file.truncate(0)
            file.write(0, [self.header()])
            self._file = file  # set last: if the disk was full, the next attempt starts over
        position = self._entry_position(self._written_count + 1)
        tail = bytes(self._tail)
        self._file.write(position, [tail])
        with self._lock:
            self._entries_crc = crc32c(tail, self._entries_crc)
            self._written_count = self.count
            self._tail = bytearray()

    def seal(self) -> None:
        """Write the rest of the file and stop growing. Durable on return, except for the name."""
        if self.count:
            self.flush()
            packed = big_endian(self._grown_slots())
            assert self._file is not None
            self._file.write(INDEX_HEADER_BYTES, [packed])
            self._file.sync()
            self._slots_crc = crc32c(packed)
        with self._lock:
            self.is_sealed = True
            self._slots = None
        self.close()

    def sync(self) -> None:
        """Make the flushed entries durable, except for the name."""
        if self._file is not None:
            self._file.sync()

    def header(self) -> bytes:
        """The packed header."""
        packed = _HEADER.pack(
            INDEX_MAGIC,
            INDEX_VERSION,
            self.slot_count,
            self.first_offset,
            self.first_stored_at_ms,
            self._store_id[:8],
            0,
        )
        head = packed[: -_NUMBER.size]
        return head + _NUMBER.pack(crc32c(head))

    def take_up(self) -> None:
        """Reopen a growing file: check its entries, rebuild its slots. Raises `CorruptionError`."""
        self._file = self._disk.open(self.path)
        if self._file.read(0, INDEX_HEADER_BYTES) != self.header():
            raise self._corruption(0, "another header")
        slots = array("I", bytes(4 * self.slot_count))
        crc, number = 0, 1
        first, after = self._entry_position(1), self._entry_position(self.count + 1)
        for position in range(first, after, _CHECK_BYTES):
            count = min(_CHECK_BYTES, after - position)
            data = self._file.read(position, count)
            if len(data) != count:
                raise self._corruption(position + len(data), "entries are missing")
            crc = crc32c(data, crc)
            hashes = entry_hashes(data)
            for hash_number, hash_ in enumerate(hashes, start=number):
                slots[hash_ % self.slot_count] = hash_number
            number += len(hashes)
        if crc != self._entries_crc:
            raise self._corruption(first, "entries were altered")
        self._file.truncate(after)
        with self._lock:
            self._slots = slots
            self.is_checked = True

    def check_some(self) -> bool:
        """Read the next megabyte of a sealed file; returns whether it is checked to its end.

        Raises `CorruptionError` if the file is damaged.
        """
        if self.is_checked:
            return True
        first, after = self._entry_position(1), self._entry_position(self.count + 1)
        file = self._disk.open(self.path)
        try:
            position = self._checked_bytes
            if not position:
                if file.read(0, INDEX_HEADER_BYTES) != self.header():
                    raise self._corruption(0, "another header")
                position = INDEX_HEADER_BYTES
            limit = first if position < first else after
            count = min(_CHECK_BYTES, limit - position)
            data = file.read(position, count)
        finally:
            file.close()
        if len(data) != count:
            raise self._corruption(position + len(data), "the file is too short")
        slots_crc, entries_crc = self._checking_crcs
        if position < first:
            slots_crc = crc32c(data, slots_crc)
        else:
            entries_crc = crc32c(data, entries_crc)
        self._checking_crcs = slots_crc, entries_crc
        self._checked_bytes = position + count
        if self._checked_bytes < after:
            return False
        if self._checking_crcs != (self._slots_crc, self._entries_crc):
            raise self._corruption(INDEX_HEADER_BYTES, "altered since it was written")
        self.is_checked = True
        return True

    def find(self, hash_: int, *, first_ms: int, entries_max: int) -> tuple[list[Hit], int]:
        """Frames with this hash stored at `first_ms` or later, newest first.

        Also returns how many entries were read, at most `entries_max`.
        """
        if not self.count:
            return [], 0
        with self._lock:
            if self._slots is not None:
                number = self._slots[hash_ % self.slot_count]
                return self._walk(self._file, number, hash_, first_ms, entries_max)
        if not self.is_sealed:  # not usable yet
            return [], 0
        file = self._disk.open(self.path)
        try:
            number = self._slot(file, INDEX_HEADER_BYTES + 4 * (hash_ % self.slot_count))
            return self._walk(file, number, hash_, first_ms, entries_max)
        finally:
            file.close()

    def remove(self) -> None:
        """Remove the file; its name is gone after the next sync of the directory."""
        self.close()
        if self.name and self.name in self._disk.names(self.path.rpartition("/")[0]):
            self._disk.unlink(self.path)

    def close(self) -> None:
        """Close the file. Safe to call twice."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _walk(
        self, file: DiskFile | None, number: int, hash_: int, first_ms: int, entries_max: int
    ) -> tuple[list[Hit], int]:
        hits: list[Hit] = []
        looked, next_number = 0, self.count + 1
        while number and looked < entries_max:
            if number >= next_number:  # a damaged chain must not loop
                raise self._corruption(self._entry_position(1), f"entry {number} in a chain")
            looked += 1
            found, offset, seconds, previous = self._entry(file, number)
            stored_from_ms = self.first_stored_at_ms + 1000 * seconds
            if stored_from_ms + 1000 <= first_ms:
                break
            if found == hash_:
                hits.append(Hit(offset, stored_from_ms))
            next_number, number = number, previous
        return hits, looked

    def _entry(self, file: DiskFile | None, number: int) -> tuple[int, int, int, int]:
        if number > self._written_count:
            first = (number - self._written_count - 1) * INDEX_ENTRY_BYTES
            return _ENTRY.unpack_from(self._tail, first)
        if file is None:
            raise self._corruption(self._entry_position(number), "the file was removed")
        data = file.read(self._entry_position(number), INDEX_ENTRY_BYTES)
        if len(data) != INDEX_ENTRY_BYTES:
            raise self._corruption(self._entry_position(number), "the file is too short")
        return _ENTRY.unpack(data)

    def _slot(self, file: DiskFile, position: int) -> int:
        data = file.read(position, _NUMBER.size)
        if len(data) != _NUMBER.size:
            raise self._corruption(position, "the file is too short")
        return int.from_bytes(data)

    def _link_run(self, first: int, count: int, previous: list[int]) -> None:
        """Link `count` neighbouring hashes; their numbers follow those in `previous`."""
        slots, slot_count = self._grown_slots(), self.slot_count
        while count:
            slot = first % slot_count
            part = min(count, slot_count - slot, HASHES - first)
            number = self.count + len(previous) + 1
            previous += slots[slot : slot + part]
            slots[slot : slot + part] = array("I", range(number, number + part))
            first = (first + part) % HASHES
            count -= part

    def _grown_slots(self) -> array[int]:
        assert self._slots is not None, "the file does not grow"
        return self._slots

    def _entry_position(self, number: int) -> int:
        return INDEX_HEADER_BYTES + 4 * self.slot_count + (number - 1) * INDEX_ENTRY_BYTES

    def _corruption(self, position: int, reason: str) -> CorruptionError:
        return CorruptionError(segment=self.path, offset=position, reason=reason)
