"""The interface of a subject's queue for groups; the broker stores it in files, `MemoryBroker` in a list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from qmq_client.wire.deliveries import Records


class Entry(NamedTuple):
    """The place of one message in the commit log."""

    physical_offset: int
    #: 0 if the message is lost.
    record_bytes: int
    tag_hash: int


#: The fields of an `Entry` as a plain tuple, for loops over hundreds; an `Entry` is one too.
Place = tuple[int, int, int]


class GroupQueue(Protocol):
    """The messages of a subject for one group, by sequence. Read-only."""

    #: The first existing message.
    first_sequence: int
    #: One after the last message.
    next_sequence: int

    def entries(self, first_sequence: int, count: int) -> Sequence[Entry]:
        """Up to `count` entries from `first_sequence` on; at least one, unless there is none."""
        ...

    def places(self, first_sequence: int, count: int) -> Sequence[Place]:
        """The same entries; they may be plain tuples."""
        ...

    def read(self, entries: Sequence[Place]) -> Records:
        """The records of these entries."""
        ...
