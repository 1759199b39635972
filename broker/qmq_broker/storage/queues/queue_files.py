"""The files of all consume queues: reading, appending and checking runs of entries.

A bounded number of files stays open for reading, so that thousands of subjects do not need
thousands of descriptors. Appending opens, writes, closes, and syncs on request: it happens once per
many megabytes of log.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from threading import Lock
from typing import Final

from qmq_broker.errors import CorruptionError, DiskError
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.disk_port import Disk, DiskFile
from qmq_broker.storage.files.retained import Retained
from qmq_broker.storage.queues.queue_table import QueueTable
from qmq_client.wire.checksum import crc32c

ENTRY_BYTES: Final = 20


class QueueFiles:
    """Entries on disk, by subject and sequence. `read` may run in any thread."""

    def __init__(self, disk: Disk, *, entries_per_file: int, open_files: int) -> None:
        self._disk = disk
        self._file_bytes = entries_per_file * ENTRY_BYTES
        self._open_files = open_files
        self._lock = Lock()
        self._open: OrderedDict[str, DiskFile] = OrderedDict()
        self._directories: set[str] = set()
        #: Directories with names of new files that were not synced.
        self._unsynced_directories: set[str] = set()
        self._has_new_directories = False
        #: For each subject, the first file that is left.
        self._removed_below: dict[str, int] = {}

    def read(self, subject: str, first_sequence: int, next_sequence: int) -> bytes:
        """The packed entries of a run; raises `CorruptionError` if they are not all there."""
        parts = []
        offset, next_offset = first_sequence * ENTRY_BYTES, next_sequence * ENTRY_BYTES
        while offset < next_offset:
            base = offset - offset % self._file_bytes
            count = min(next_offset, base + self._file_bytes) - offset
            parts.append(self._read(layout.queue_path(subject, base), base, offset, count))
            offset += count
        return b"".join(parts)

    def add(
        self,
        subject: str,
        first_sequence: int,
        entries: bytes,
        crcs: list[int],
        *,
        is_synced: bool,
    ) -> list[int]:
        """Append entries. With `is_synced` the entries are durable on return, but not the names of
        new files (`sync_names`).

        `crcs` are the checksums of each file's earlier content; returns those of the new content.
        """
        directory = layout.queue_directory(subject)
        self._make_directory(directory)
        crcs = list(crcs)
        offset, position = first_sequence * ENTRY_BYTES, 0
        has_new = False
        while position < len(entries):
            base = offset - offset % self._file_bytes
            part = entries[position : position + base + self._file_bytes - offset]
            number = base // self._file_bytes
            is_begun = number >= len(crcs)
            if is_begun:
                # Deleted entries are zeros before the first entry of a queue.
                crcs += [0] * (number - len(crcs)) + [crc32c(bytes(offset - base))]
                has_new = True
            crcs[number] = crc32c(part, crcs[number])
            file = self._disk.open(layout.queue_path(subject, base), is_new=True)
            try:
                if is_begun:
                    file.truncate(0)  # a leftover: it may begin with entries
                file.write(offset - base, [part])
                if is_synced:
                    file.sync()
            finally:
                file.close()
            offset += len(part)
            position += len(part)
        if has_new:
            self._unsynced_directories.add(directory)
        if is_synced and directory in self._unsynced_directories:
            self._disk.sync_directory(directory)
            self._unsynced_directories.remove(directory)
        return crcs

    def sync_names(self) -> None:
        """Make the names of new folders durable, all in one pass."""
        if self._has_new_directories:
            self._disk.sync_directory(layout.CONSUME_QUEUES)
            self._has_new_directories = False

    def is_as_flushed(
        self, subject: str, first_sequence: int, next_sequence: int, crcs: list[int]
    ) -> bool:
        """Whether the files hold all entries from the first to below the next, unchanged."""
        if first_sequence == next_sequence and not crcs:
            return True  # all earlier entries were deleted, and the queue has no file yet
        next_offset = next_sequence * ENTRY_BYTES
        if len(crcs) != -(-next_offset // self._file_bytes):
            return False
        first_file = first_sequence * ENTRY_BYTES // self._file_bytes
        for number, crc in list(enumerate(crcs))[first_file:]:
            base = number * self._file_bytes
            count = min(self._file_bytes, next_offset - base)
            data = self._beginning(layout.queue_path(subject, base), count)
            if len(data) != count or crc32c(data) != crc:
                return False
        return True

    def unfit(self, table: QueueTable, retained: Retained) -> Iterator[str]:
        """The subjects whose files do not match the table, or that are missing in it."""
        firsts, known = retained.first_sequences, set(retained.removed)
        for state in table.queues:
            if retained.is_removed(state.subject, state.next_sequence):
                continue
            known.add(state.subject)
            first = firsts.get(state.subject, 0)
            if first > state.next_sequence or not self.is_as_flushed(
                state.subject, first, state.next_sequence, list(state.crcs)
            ):
                yield state.subject
        yield from sorted(firsts.keys() - known)

    def remove_below(self, subject: str, first_sequence: int) -> int:
        """Remove the files that end at or below `first_sequence`; returns how many.

        Not durable on return: the next start removes files that reappear.
        """
        first_file = first_sequence * ENTRY_BYTES // self._file_bytes
        if self._removed_below.get(subject) == first_file:
            return (
                0  # the usual case: of thousands of queues, one segment ends a file of only a few
            )
        directory = layout.queue_directory(subject)
        removed = 0
        for name in self._disk.names(directory):
            base = layout.parse_number(name)
            if base is None or base + self._file_bytes > first_sequence * ENTRY_BYTES:
                continue
            self._unlink(subject, base)
            removed += 1
        self._removed_below[subject] = first_file
        return removed

    def remove(self, subject: str) -> None:
        """Remove all files of a subject; its folder stays. Not durable on return."""
        directory = layout.queue_directory(subject)
        for name in self._disk.names(directory):
            base = layout.parse_number(name)
            if base is None:
                continue
            self._unlink(subject, base)
        self._removed_below.pop(subject, None)

    def _unlink(self, subject: str, base: int) -> None:
        path = layout.queue_path(subject, base)
        with self._lock:
            if (file := self._open.pop(path, None)) is not None:
                file.close()
            self._disk.unlink(path)

    def close(self) -> None:
        """Close all files. Safe to call twice."""
        with self._lock:
            for file in self._open.values():
                file.close()
            self._open.clear()

    def _read(self, path: str, base: int, offset: int, count: int) -> bytes:
        try:
            # The lock is held during the read: a file must not be closed under it.
            with self._lock:
                data = self._opened(path).read(offset - base, count)
        except DiskError as error:
            raise CorruptionError(segment=path, offset=offset, reason=str(error)) from error
        if len(data) != count:
            reason = "entries are missing; a restart rebuilds them"
            raise CorruptionError(segment=path, offset=offset + len(data), reason=reason)
        return data

    def _opened(self, path: str) -> DiskFile:
        file = self._open.get(path)
        if file is not None:
            self._open.move_to_end(path)
            return file
        file = self._disk.open(path)
        self._open[path] = file
        if len(self._open) > self._open_files:
            _, oldest = self._open.popitem(last=False)
            oldest.close()
        return file

    def _beginning(self, path: str, count: int) -> bytes:
        """The first bytes of a file; none if there is no file."""
        try:
            file = self._disk.open(path)
        except DiskError:
            # Checked only now: a start opens thousands of files, and all of them exist.
            directory, _, name = path.rpartition("/")
            if name in self._disk.names(directory):
                raise
            return b""
        try:
            return file.read(0, count)
        finally:
            file.close()

    def _make_directory(self, directory: str) -> None:
        if directory in self._directories:
            return
        self._disk.make_directory(directory)
        self._directories.add(directory)
        self._has_new_directories = True
