"""`qmq store dump ids | waiting`: the journals, row by row, as a start would take them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from qmq_broker.storage.files import layout
from qmq_broker.storage.files.disk import Disk
from qmq_broker.storage.files.format_file import Format
from qmq_broker.storage.files.journal import Chunk, JournalFile, journal_bases
from qmq_broker.storage.logs.id_journal import decode_id_chunk
from qmq_broker.storage.queues.entry_chunk import decode_entry_chunk
from qmq_broker.storage.queues.queue_files import ENTRY_BYTES

Row = dict[str, Any]
_NO_SENSE = "a chunk whose content makes no sense"


def id_rows(disk: Disk, format_: Format) -> Iterator[Row]:
    """A row for each run of ids that one frame brought."""
    for path, chunk in _chunks(disk, format_, layout.IDS):
        if isinstance(chunk, str):
            yield {"file": path, "unreadable": chunk}
            continue
        found = decode_id_chunk(chunk.content)
        if found is None:
            yield {"file": path, "first": chunk.first_offset, "unreadable": _NO_SENSE}
            continue
        for instance, first, last, offset in zip(*found.columns, strict=True):
            yield {
                "file": path,
                "generation": found.era.first_offset,
                "first_id": f"{instance:016x}{first:016x}",
                "count": last - first + 1,
                "offset": offset,
            }


def waiting_rows(disk: Disk, format_: Format, subject: str | None) -> Iterator[Row]:
    """A row for each run of entries of one queue in one chunk."""
    for path, chunk in _chunks(disk, format_, layout.ENTRIES):
        if isinstance(chunk, str):
            yield {"file": path, "unreadable": chunk}
            continue
        found = decode_entry_chunk(chunk.content)
        if found is None:
            yield {"file": path, "first": chunk.first_offset, "unreadable": _NO_SENSE}
            continue
        head = {"file": path, "first": chunk.first_offset, "next": chunk.next_offset}
        for run in found.runs:
            if subject in (None, run.subject):
                yield head | {
                    "subject": run.subject,
                    "first_sequence": run.first_sequence,
                    "count": len(run.entries) // ENTRY_BYTES,
                }


def _chunks(disk: Disk, format_: Format, directory: str) -> Iterator[tuple[str, Chunk | str]]:
    """Every chunk of every file; behind the last one of a file what is wrong there, if anything."""
    for base in journal_bases(disk, directory):
        file = JournalFile(disk, directory, base, format_.store_id)
        for chunk in file.chunks():
            yield file.path, chunk
        if not file.is_journal:
            yield file.path, "not the head of a journal of this store"
        elif file.rest_bytes:
            yield (
                file.path,
                f"{file.rest_bytes} bytes from position {file.position}: no whole chunk",
            )
