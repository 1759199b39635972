"""What a chunk of the journal of entries holds: entries that are not in their consume queues yet.

::

    content of a chunk (files/journal.py)    MessagePack of EntryChunk

One chunk, with one sync, takes what was added to all queues since the last checkpoint; the queues' own
files, one for each subject, follow in much larger portions. So ten thousand subjects cost one sync each
in a gigabyte of log, and a start does not read that gigabyte.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class EntryRun(msgspec.Struct, frozen=True, array_like=True):
    """Entries that follow each other in one queue."""

    subject: str
    #: Consume queue sequence of the first.
    first_sequence: int
    #: Packed as in the queue's files.
    entries: bytes


class EntryChunk(msgspec.Struct, frozen=True, array_like=True):
    """What came to all queues out of one part of the log."""

    #: Below it, of the commit log, all that concerns delayed messages was in the schedule's files.
    copied_offset: int
    runs: Sequence[EntryRun]


def encode_entry_chunk(chunk: EntryChunk) -> bytes:
    """The content of a chunk."""
    return msgspec.msgpack.encode(chunk)


def decode_entry_chunk(content: bytes) -> EntryChunk | None:
    """What a chunk says; None when that is nothing."""
    try:
        return msgspec.msgpack.decode(content, type=EntryChunk)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
