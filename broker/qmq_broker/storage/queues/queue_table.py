"""The table of consume queues: how much of each queue is in its files. The previous table is kept too.

::

    state/queues           MessagePack of QueueTable and a checksum line
    state/queues.before    the same from the flush before the last

With many queues the files are not synced one by one, so after a power cut a file may lag behind the
table. The previous table describes entries that the disk has had the time between two flushes to
store. A start continues from it with the journal since then, and rebuilds all queues from the log
only if that table does not match the files either.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from qmq_broker.storage.files import layout
from qmq_broker.storage.files.disk_port import Disk
from qmq_broker.storage.files.small_file import read_file, replace_file, unseal


class QueueState(msgspec.Struct, frozen=True, array_like=True):
    """How much of one queue is in its files."""

    subject: str
    next_sequence: int
    #: Checksum of each file's entries, in order.
    crcs: tuple[int, ...]


class QueueTable(msgspec.Struct, frozen=True, array_like=True):
    """How much of all queues is in their files."""

    store_id: bytes
    #: Commit log offset below which all entries are in the files.
    indexed_offset: int
    queues: tuple[QueueState, ...]


def read_queue_tables(disk: Disk, store_id: bytes) -> Iterator[QueueTable]:
    """The valid tables of this store, newest first."""
    for path in layout.QUEUE_TABLES:
        data = read_file(disk, path)
        content = None if data is None else unseal(data)
        if content is None:
            continue
        try:
            table = msgspec.msgpack.decode(content, type=QueueTable)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue
        if table.store_id == store_id:
            yield table


def write_queue_table(disk: Disk, table: QueueTable) -> None:
    """Replace the table; the old one becomes the previous table. Durable on return."""
    newest, before = layout.QUEUE_TABLES
    if newest.rpartition("/")[2] in disk.names(layout.STATE):
        disk.rename(newest, before)
    replace_file(disk, newest, msgspec.msgpack.encode(table))


def remove_queue_tables(disk: Disk) -> None:
    """Remove the tables, so that a start rebuilds the queues; durable on return."""
    there = disk.names(layout.STATE)
    found = [path for path in layout.QUEUE_TABLES if path.rpartition("/")[2] in there]
    for path in reversed(found):  # the newest last: without it a start would use the previous one
        disk.unlink(path)
    if found:
        disk.sync_directory(layout.STATE)
