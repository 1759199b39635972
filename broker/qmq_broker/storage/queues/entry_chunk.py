"""The content of a chunk in the journal of entries: entries that are not in their consume queues
yet.

::

    content of a chunk (files/journal.py)    MessagePack of EntryChunk

One chunk, with one sync, holds the entries added to all queues since the last checkpoint. The files of
the queues, one set per subject, follow in much larger portions. So ten thousand subjects cost one
sync each per gigabyte of log, and a start does not read that gigabyte.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class EntryRun(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive entries of one queue."""

    subject: str
    #: Consume queue sequence of the first.
    first_sequence: int
    #: Entries packed as in the queue's files.
    entries: bytes


class EntryChunk(msgspec.Struct, frozen=True, array_like=True):
    """The entries that one part of the log added to all queues."""

    #: Commit log offset below which all frames about delayed messages were in the schedule's files.
    copied_offset: int
    runs: Sequence[EntryRun]


def encode_entry_chunk(chunk: EntryChunk) -> bytes:
    """The content of a chunk."""
    return msgspec.msgpack.encode(chunk)


def decode_entry_chunk(content: bytes) -> EntryChunk | None:
    """The entries of a chunk; None if the content is not valid."""
    try:
        return msgspec.msgpack.decode(content, type=EntryChunk)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
