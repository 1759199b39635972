"""How far all consume queues are in their files: a table, and the one before it.

::

    state/queues           MessagePack of QueueTable and a checksum line
    state/queues.before    the same, of the flush before the last

Files of many queues are not synced one by one, so a power cut may leave one behind what the table says.
The table before tells of what a disk had the time of a whole flush to take: with the journal since then a
start goes on from it, and makes all queues anew from the log only when that one does not fit either.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from qmq_broker.storage.files import layout
from qmq_broker.storage.files.disk import Disk
from qmq_broker.storage.files.small_file import read_file, replace_file, unseal


class QueueState(msgspec.Struct, frozen=True, array_like=True):
    """How one queue is in its files."""

    subject: str
    next_sequence: int
    #: Checksum of each file's entries, in order.
    crcs: tuple[int, ...]


class QueueTable(msgspec.Struct, frozen=True, array_like=True):
    """How all queues are in their files."""

    store_id: bytes
    #: Commit log offset below which all entries are in the files.
    indexed_offset: int
    queues: tuple[QueueState, ...]


def read_queue_tables(disk: Disk, store_id: bytes) -> Iterator[QueueTable]:
    """The tables of this store that are there and whole, the newest first."""
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
    """Let this be the table and the one that was there the table before; durable on return."""
    newest, before = layout.QUEUE_TABLES
    if newest.rpartition("/")[2] in disk.names(layout.STATE):
        disk.rename(newest, before)
    replace_file(disk, newest, msgspec.msgpack.encode(table))


def remove_queue_tables(disk: Disk) -> None:
    """Let a start make the queues anew; durable on return."""
    there = disk.names(layout.STATE)
    found = [path for path in layout.QUEUE_TABLES if path.rpartition("/")[2] in there]
    for path in reversed(found):  # the newest last: without it the one before would be believed
        disk.unlink(path)
    if found:
        disk.sync_directory(layout.STATE)
