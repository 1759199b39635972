"""The queue of a subject as a group reads it; the broker has it in files, `MemoryBroker` as a list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from qmq_client.wire.deliveries import Records


class Entry(NamedTuple):
    """Where one message is in the commit log."""

    physical_offset: int
    #: 0 for a message that is lost.
    record_bytes: int
    tag_hash: int


#: The same without names, for code that looks at hundreds; an `Entry` is one too.
Place = tuple[int, int, int]


class GroupQueue(Protocol):
    """The messages of a subject for one group, by sequence. Only reads."""

    #: The first message that is still there.
    first_sequence: int
    #: One after the last message.
    next_sequence: int

    def entries(self, first_sequence: int, count: int) -> Sequence[Entry]:
        """Up to `count` entries from `first_sequence` on, at least one if there is one."""
        ...

    def places(self, first_sequence: int, count: int) -> Sequence[Place]:
        """The same entries, perhaps without names."""
        ...

    def read(self, entries: Sequence[Place]) -> Records:
        """The records of these entries."""
        ...
