"""The part of a verification that checks key index files, each against its checksums.

Entries are not compared with the log: a search does that with every entry it follows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from qmq_broker.errors import CorruptionError
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.disk_port import Disk, DiskFile
from qmq_broker.storage.files.faults import Fault, ignored, rebuilt
from qmq_broker.storage.files.format_file import Format
from qmq_broker.storage.index.key_index import IndexTable
from qmq_broker.storage.index.key_index_file import (
    INDEX_ENTRY_BYTES,
    INDEX_HEADER_BYTES,
    IndexFile,
    IndexFileState,
)
from qmq_broker.storage.upkeep.inspect_files import sealed_array
from qmq_client.wire.checksum import crc32c

_READ_BYTES: Final = 1024 * 1024


def index_faults(
    disk: Disk, format_: Format, first_offset: int, next_offset: int
) -> Iterator[Fault]:
    """What is wrong with table and files; the offsets are where the commit log begins and ends."""
    table, reason = sealed_array(disk, layout.INDEX_TABLE, IndexTable)
    if table is not None and table.store_id != format_.store_id:
        reason = f"of store {table.store_id.hex()}"
        table = None
    if reason:
        yield rebuilt(layout.INDEX_TABLE, reason)
    states = table.files if table is not None else ()
    known = {state.name for state in states}
    there = set(disk.names(layout.INDEX))
    for name in sorted(there - known):
        is_ours = layout.is_index_name(name)
        meaning = "The next start removes it." if is_ours else "Nobody reads it."
        yield ignored(layout.index_path(name), "not in the table", meaning)
    for state in states:
        path = layout.index_path(state.name)
        if state.next_offset > next_offset:
            yield rebuilt(path, f"up to offset {state.next_offset}; the log ends at {next_offset}")
        elif state.name not in there and state.next_offset <= first_offset:
            yield ignored(path, "missing, like its part of the log", "The next start forgets it.")
        elif state.name not in there:
            yield rebuilt(path, "missing")
        elif fault := _fault(disk, format_, state):
            yield rebuilt(path, fault)


def _fault(disk: Disk, format_: Format, state: IndexFileState) -> str:
    """What is wrong with one file; empty for nothing."""
    file = IndexFile.of_state(disk, format_.store_id, state)
    try:
        if file.is_sealed:
            while not file.check_some():
                pass
            return ""
    except CorruptionError as error:
        return error.reason
    return _fault_of_growing(disk, state, file.header())


def _fault_of_growing(disk: Disk, state: IndexFileState, header: bytes) -> str:
    file = disk.open(layout.index_path(state.name))
    try:
        if file.read(0, INDEX_HEADER_BYTES) != header:
            return "another header"
        is_whole = _entries_crc(file, state) == state.entries_crc
        return "" if is_whole else "entries are not as written"
    finally:
        file.close()


def _entries_crc(file: DiskFile, state: IndexFileState) -> int:
    """The checksum of what a growing file holds, as far as the table goes."""
    position = INDEX_HEADER_BYTES + 4 * state.slot_count
    after = position + INDEX_ENTRY_BYTES * state.count
    crc = 0
    while position < after:
        data = file.read(position, min(_READ_BYTES, after - position))
        if not data:
            return -1
        crc = crc32c(data, crc)
        position += len(data)
    return crc
