"""`qmq store dump ids | waiting`: the journals, row by row, as a start would take them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

from qmq_broker.storage.files import layout
from qmq_broker.storage.files.disk_port import Disk
from qmq_broker.storage.files.format_file import Format
from qmq_broker.storage.files.journal import Chunk, JournalFile, journal_bases
from qmq_broker.storage.ids.journal import IdChunk, decode_id_chunk
from qmq_broker.storage.queues.entry_chunk import EntryChunk, decode_entry_chunk
from qmq_broker.storage.queues.queue_files import ENTRY_BYTES

Row = dict[str, Any]
T = TypeVar("T")
_NO_SENSE: Final = "a chunk whose content makes no sense"


def id_rows(disk: Disk, format_: Format) -> Iterator[Row]:
    """A row for each run of ids that one frame brought."""

    def rows(file: str, _: Chunk, found: IdChunk) -> Iterator[Row]:
        for subject, columns in found.columns.items():
            for instance, first, last, offset in zip(*columns, strict=True):
                yield {
                    "file": file,
                    "generation": found.era.first_offset,
                    "subject": subject,
                    "first_id": f"{instance:016x}{first:016x}",
                    "count": last - first + 1,
                    "offset": offset,
                }

    return _rows(disk, format_, layout.IDS, decode_id_chunk, rows)


def waiting_rows(disk: Disk, format_: Format, subject: str | None) -> Iterator[Row]:
    """A row for each run of entries of one queue in one chunk."""

    def rows(file: str, chunk: Chunk, found: EntryChunk) -> Iterator[Row]:
        for run in found.runs:
            if subject in (None, run.subject):
                yield {
                    "file": file,
                    "first": chunk.first_offset,
                    "next": chunk.next_offset,
                    "subject": run.subject,
                    "first_sequence": run.first_sequence,
                    "count": len(run.entries) // ENTRY_BYTES,
                }

    return _rows(disk, format_, layout.ENTRIES, decode_entry_chunk, rows)


def _rows(
    disk: Disk,
    format_: Format,
    directory: str,
    decode: Callable[[bytes], T | None],
    rows: Callable[[str, Chunk, T], Iterator[Row]],
) -> Iterator[Row]:
    """Rows of every chunk of every file, and one for each place that cannot be read."""
    for base in journal_bases(disk, directory):
        file = JournalFile(disk, directory, base, format_.store_id)
        for chunk in file.chunks():
            found = decode(chunk.content)
            if found is None:
                yield {"file": file.path, "first": chunk.first_offset, "unreadable": _NO_SENSE}
            else:
                yield from rows(file.path, chunk, found)
        if reason := _unread(file):
            yield {"file": file.path, "unreadable": reason}


def _unread(file: JournalFile) -> str:
    """What is wrong after the last chunk of a file; empty if nothing is."""
    if not file.is_journal:
        return "not the head of a journal of this store"
    if file.rest_bytes:
        return f"{file.rest_bytes} bytes from position {file.position}: no whole chunk"
    return ""
