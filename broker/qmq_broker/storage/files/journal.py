"""A journal: stores derived data in chunks, so that a start need not read frames of the commit log.

::

    <journal>/<20 digits>    head, then chunks; named by the offset of the log that it begins at

    head, 40 bytes           magic 8 ("QMQIDSJ2" or "QMQENTJ1"), store id 16, first offset 8, zeros 4,
                             CRC-32C of these 36 bytes 4
    chunk                    next offset 8, content bytes 4, CRC-32C 4, content

Derived and append-only. A chunk covers the frames from where the chunk before it ends (the first
one: from the first offset of the file) to its `next_offset`, all of them durable when it was
written. Its checksum covers next offset, length and content and continues that of the chunk before,
so no chunk after a missing one is valid, nor are leftovers in the file. Each file begins where the
one before it ends. The first chunk that does not match ends the journal: frames are read from there
on, and the journal continues where it ended. Big-endian.

Not for: the content of chunks (`ids/journal.py`, `queues/entry_chunk.py`).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from qmq_broker.errors import CorruptionError
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.disk_port import Disk, DiskFile
from qmq_client.wire.checksum import crc32c

JOURNAL_HEAD_BYTES: Final = 40
CHUNK_HEAD_BYTES: Final = 16
#: A file of this length gets no more chunks: a start reads whole files, one at a time.
FILE_BYTES: Final = 4 * 1024 * 1024
#: The magic of each directory; the last letter is the version.
MAGICS: Final = {layout.IDS: b"QMQIDSJ2", layout.ENTRIES: b"QMQENTJ1"}
_HEAD: Final = struct.Struct(">8s16sQ4x")
_CHUNK: Final = struct.Struct(">QI")
_CRC: Final = struct.Struct(">I")


class Chunk(NamedTuple):
    """One chunk of a journal."""

    first_offset: int
    next_offset: int
    content: bytes


class Journal:
    """The files of one journal.

    Call `read`, then `start`, then anything else, all in one thread.
    """

    def __init__(self, disk: Disk, directory: str, store_id: bytes) -> None:
        self._disk = disk
        self.directory = directory
        self._store_id = store_id
        #: The journal covers all frames below this, from the offset at which reading began.
        self.next_offset = 0
        #: First offsets of the valid files, in order.
        self._bases: list[int] = []
        self._file: DiskFile | None = None
        #: In the last file: the position of its next chunk, and the checksum that chunk continues.
        self._position = 0
        self._crc = 0

    def read(self, first_offset: int, log_next_offset: int) -> Iterator[Chunk]:
        """The unbroken chunks that cover frames from `first_offset` on.

        The first one may begin before it. Changes no file. A chunk that covers frames after the
        end of the log means that accepted messages are missing: `CorruptionError`.
        """
        self.next_offset = first_offset
        bases = journal_bases(self._disk, self.directory)
        base = max((base for base in bases if base <= first_offset), default=None)
        while base is not None:
            file = JournalFile(self._disk, self.directory, base, self._store_id)
            for chunk in file.chunks():
                self._check_end(chunk, log_next_offset)
                if chunk.next_offset > first_offset:
                    yield chunk
            if file.next_offset < self.next_offset or file.next_offset == base:
                return
            self._bases.append(base)
            self._position, self._crc = file.position, file.crc
            self.next_offset = file.next_offset
            base = self.next_offset if base < self.next_offset in bases else None

    def start(self) -> None:
        """Remove invalid parts and get ready to append. Not durable on return."""
        for base in journal_bases(self._disk, self.directory):
            if base not in self._bases:
                self._disk.unlink(layout.segment_path(self.directory, base))
        if self._bases:
            self._file = self._disk.open(layout.segment_path(self.directory, self._bases[-1]))
            self._file.truncate(self._position)

    def append(self, next_offset: int, content: bytes) -> None:
        """Add a chunk that covers the frames from `self.next_offset` to `next_offset`; durable on
        return.

        Requires: those frames are durable, and there is at least one. Raises `NoRoomError` with
        nothing changed, or `DiskError`.
        """
        assert next_offset > self.next_offset
        if self._position >= FILE_BYTES:
            self.roll()
        fields = _CHUNK.pack(next_offset, len(content))
        if self._file is None:
            head = _head(self.directory, self._store_id, self.next_offset)
            crc = crc32c(content, crc32c(fields, crc32c(head[:-4])))
            self._file = self._begin([head, fields, _CRC.pack(crc), content])
            self._bases.append(self.next_offset)
            self._position = JOURNAL_HEAD_BYTES
        else:
            crc = crc32c(content, crc32c(fields, self._crc))
            self._file.write(self._position, [fields, _CRC.pack(crc), content])
            self._file.sync()
        self._position += CHUNK_HEAD_BYTES + len(content)
        self._crc = crc
        self.next_offset = next_offset

    def roll(self) -> None:
        """Let the next chunk begin a new file."""
        if self._file is not None:
            self._file.close()
        self._file, self._position = None, 0

    def disbelieve(self, offset: int) -> None:
        """Drop the chunks that were read because they are wrong: the journal begins again at `offset`.

        Call before `start`.
        """
        self._bases, self._position, self.next_offset = [], 0, offset

    def restart(self, offset: int) -> None:
        """Remove all files and begin again at `offset`. Not durable on return."""
        self.roll()
        for base in self._bases:
            self._disk.unlink(layout.segment_path(self.directory, base))
        self._bases, self.next_offset = [], offset

    def remove_below(self, offset: int) -> None:
        """Remove the files that cover nothing at or above `offset`.

        Not durable on return: a start ignores files that reappear.
        """
        ends = [*self._bases[1:], self.next_offset if self._file is None else None]
        for base, end in list(zip(self._bases, ends, strict=False)):
            if end is not None and end <= offset:
                self._disk.unlink(layout.segment_path(self.directory, base))
                self._bases.remove(base)

    def close(self) -> None:
        """Close the file. Safe to call twice."""
        self.roll()

    def _begin(self, parts: list[bytes]) -> DiskFile:
        """Begin a new file with its first chunk; durable on return."""
        file = self._disk.open(layout.segment_path(self.directory, self.next_offset), is_new=True)
        try:
            file.truncate(0)
            file.write(0, parts)
            file.sync()
            self._disk.sync_directory(self.directory)
        except BaseException:
            file.close()
            raise
        return file

    def _check_end(self, chunk: Chunk, log_next_offset: int) -> None:
        if chunk.next_offset > log_next_offset:
            raise CorruptionError(
                segment=layout.COMMIT_LOG,
                offset=log_next_offset,
                reason=f"the log ends here, but a chunk in {self.directory} says synced up to offset "
                f"{chunk.next_offset}",
            )


class JournalFile:
    """One file of a journal, read from its beginning to the first invalid chunk."""

    def __init__(self, disk: Disk, directory: str, base: int, store_id: bytes) -> None:
        self.path = layout.segment_path(directory, base)
        self._disk = disk
        self._head = _head(directory, store_id, base)
        #: Whether its head belongs to a file of this store with this name.
        self.is_journal = False
        #: The end of the last chunk that was read, in the log and in the file.
        self.next_offset = base
        self.position = JOURNAL_HEAD_BYTES
        #: The checksum that the next chunk continues.
        self.crc = crc32c(self._head[:-4])
        #: Bytes after the last whole chunk.
        self.rest_bytes = 0

    def chunks(self) -> Iterator[Chunk]:
        """The whole chunks, in order. Iterate once, to the end."""
        file = self._disk.open(self.path)
        try:
            length = file.length()
            self.is_journal = file.read(0, JOURNAL_HEAD_BYTES) == self._head
            while self.is_journal and (chunk := self._chunk(file, length)) is not None:
                yield chunk
                self.next_offset = chunk.next_offset
            self.rest_bytes = max(0, length - self.position)
        finally:
            file.close()

    def _chunk(self, file: DiskFile, length: int) -> Chunk | None:
        head = file.read(self.position, CHUNK_HEAD_BYTES)
        if len(head) < CHUNK_HEAD_BYTES:
            return None
        next_offset, content_bytes = _CHUNK.unpack_from(head)
        after = self.position + CHUNK_HEAD_BYTES + content_bytes
        if after > length or next_offset <= self.next_offset:
            return None
        content = file.read(self.position + CHUNK_HEAD_BYTES, content_bytes)
        crc = crc32c(content, crc32c(head[: _CHUNK.size], self.crc))
        if _CRC.unpack_from(head, _CHUNK.size)[0] != crc:
            return None
        self.position, self.crc = after, crc
        return Chunk(self.next_offset, next_offset, content)


def journal_bases(disk: Disk, directory: str) -> list[int]:
    """The first offsets of a journal's files, from their names, in order."""
    numbers = (layout.parse_number(name) for name in disk.names(directory))
    return sorted(number for number in numbers if number is not None)


def remove_journal(disk: Disk, directory: str) -> int:
    """Remove all files of a journal, durable on return; returns how many.

    The next start reads frames instead.
    """
    bases = journal_bases(disk, directory)
    for base in bases:
        disk.unlink(layout.segment_path(directory, base))
    if bases:
        disk.sync_directory(directory)
    return len(bases)


def _head(directory: str, store_id: bytes, base: int) -> bytes:
    fields = _HEAD.pack(MAGICS[directory], store_id, base)
    return fields + _CRC.pack(crc32c(fields))
