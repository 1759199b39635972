"""The consume queue of one subject: the places of its messages in the commit log, in order.

::

    offset bytes field                        entry, 20 bytes, big-endian
    0      8     physical offset of the record in the commit log
    8      4     length of the record
    12     8     tag hash, 0 for no tags

The entry with sequence n is at byte 20 n of the queue. A file holds 300,000 entries by default and
is named by the queue offset of its first entry (RocketMQ's layout). Derived: missing or wrong files
are rebuilt from the commit log, see `consume_queues.py`.

Only entries of durable records are visible. New entries stay in memory until they are flushed.
"""

from __future__ import annotations

import struct
from itertools import repeat
from typing import Final

from qmq_broker.storage.queues.queue_files import ENTRY_BYTES, QueueFiles
from qmq_client.group.queue import Entry, Place

_ENTRY: Final = struct.Struct(">QIQ")
assert _ENTRY.size == ENTRY_BYTES


class ConsumeQueue:
    """The queue of one subject. Written by the writer thread, read by any.

    Invariant: `first_sequence` ≤ `next_sequence` ≤ `staged_sequence`, none ever goes back.
    """

    __slots__ = (
        "_files",
        "_tail",
        "crcs",
        "first_sequence",
        "flushed_sequence",
        "journaled_sequence",
        "next_sequence",
        "staged_sequence",
        "subject",
    )

    def __init__(
        self,
        subject: str,
        files: QueueFiles,
        *,
        first_sequence: int = 0,
        flushed_sequence: int = 0,
        crcs: tuple[int, ...] = (),
    ) -> None:
        """Requires: `first_sequence` is not beyond `flushed_sequence`."""
        self.subject = subject
        #: The first existing sequence.
        self.first_sequence = first_sequence
        #: The sequence after the last visible entry.
        self.next_sequence = flushed_sequence
        #: The sequence after the last added entry, which the next message of the subject gets.
        self.staged_sequence = flushed_sequence
        #: The sequence after the last entry in the files.
        self.flushed_sequence = flushed_sequence
        #: The sequence after the last entry that a start knows without reading frames.
        self.journaled_sequence = flushed_sequence
        #: Checksum of each file's flushed entries.
        self.crcs = list(crcs)
        self._files = files
        #: Sequence of the first entry in memory, and the entries; always replaced together.
        self._tail = (flushed_sequence, bytearray())

    def stage(self, entries: bytes | bytearray) -> None:
        """Add packed entries, not yet visible."""
        self._tail[1].extend(entries)
        self.staged_sequence += len(entries) // ENTRY_BYTES

    def make_visible(self) -> None:
        """Make all added entries visible. Requires: their records are durable."""
        self.next_sequence = self.staged_sequence

    def entries(self, first_sequence: int, count: int) -> list[Entry]:
        """Up to `count` visible entries from `first_sequence` on; fewer at the end.

        Raises `CorruptionError` if a file of the queue was damaged while the broker runs; the next
        start rebuilds it.
        """
        # Like `Entry._make`, without a Python call for each entry.
        return list(map(tuple.__new__, repeat(Entry), self.places(first_sequence, count)))

    def places(self, first_sequence: int, count: int) -> list[Place]:
        """The same entries as plain tuples, at a third of the cost."""
        first = max(first_sequence, self.first_sequence)
        next_sequence = min(first_sequence + count, self.next_sequence)
        if first >= next_sequence:
            return []
        return list(_ENTRY.iter_unpack(self._packed(first, next_sequence)))

    def sequence_at(self, offset: int) -> int:
        """The first sequence whose record is at or after `offset` of the commit log."""
        first, after = self.first_sequence, self.next_sequence
        while first < after:
            middle = (first + after) // 2
            found = self.entries(middle, 1)
            if not found or found[0].physical_offset < offset:  # none: deleted meanwhile
                first = middle + 1
            else:
                after = middle
        return first

    def unflushed(self, next_sequence: int) -> tuple[int, bytes]:
        """The first sequence that is not in the files, and the packed entries up to
        `next_sequence`.

        Requires: `next_sequence` is not beyond the last visible entry.
        """
        return self.flushed_sequence, self._packed(self.flushed_sequence, next_sequence)

    def unjournaled(self) -> tuple[int, bytes]:
        """The first visible sequence a start does not know, and the packed entries from it on."""
        first = max(self.journaled_sequence, self.first_sequence)
        return first, self._packed(first, self.next_sequence)

    def set_flushed(self, next_sequence: int, *, hot_entries: int) -> None:
        """Record that entries below `next_sequence` are in the files; few of them stay in memory."""
        self.flushed_sequence = next_sequence
        first, tail = self._tail
        surplus = next_sequence - hot_entries - first
        if surplus > 0:
            self._tail = (first + surplus, tail[surplus * ENTRY_BYTES :])

    def _packed(self, first: int, next_sequence: int) -> bytes:
        tail_first, tail = self._tail
        if first < tail_first:
            next_in_files = min(next_sequence, tail_first)
            in_files = self._files.read(self.subject, first, next_in_files)
            if next_sequence <= tail_first:
                return in_files
            return in_files + tail[: (next_sequence - tail_first) * ENTRY_BYTES]
        first_byte = (first - tail_first) * ENTRY_BYTES
        return bytes(tail[first_byte : (next_sequence - tail_first) * ENTRY_BYTES])
