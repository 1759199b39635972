"""Reads the messages of a group: from the consume queue of their subject, or their copies from the queue of copies.

A long retry delivers a copy of the message, because retention may have deleted the original by then
(`storage/logs/copies.py`). Code above this module does not see the copy.
"""

from __future__ import annotations

from collections.abc import Sequence

from qmq_broker.storage.logs.copies import original_record
from qmq_broker.storage.queues.consume_queue import ConsumeQueue
from qmq_broker.storage.store import Store
from qmq_client.group.queue import Entry, Place
from qmq_client.group.state import GroupState
from qmq_client.wire.deliveries import Records
from qmq_client.wire.names import COPIES


class _CopyEntry(Entry):
    """An entry of the queue of copies."""


class StoredQueue:
    """The queue of a subject as one group reads it. Only reads."""

    def __init__(self, store: Store, state: GroupState, queue: ConsumeQueue) -> None:
        self._store, self._state = store, state
        self._own = queue
        self._copies = state.long_retries.copies
        self._copy_queue = store.queue(COPIES) if self._copies else None
        self.first_sequence = queue.first_sequence
        self.next_sequence = queue.next_sequence

    def entries(self, first_sequence: int, count: int) -> list[Entry]:
        """Up to `count` visible entries from `first_sequence` on, at least one if there is one."""
        copies = self._copies
        if not copies:
            return self._own.entries(first_sequence, count)
        if first_sequence in copies:
            return self._copied(first_sequence)
        wanted = range(first_sequence, first_sequence + count)
        before = next((index for index, one in enumerate(wanted) if one in copies), count)
        return self._own.entries(first_sequence, before)

    def places(self, first_sequence: int, count: int) -> Sequence[Place]:
        """The same entries; plain places while the group has no long retry."""
        if self._copies:
            return self.entries(first_sequence, count)
        return self._own.places(first_sequence, count)

    def read(self, entries: Sequence[Place]) -> Records:
        """The records of these entries; raises `CorruptionError`."""
        return read_messages(self._store, self._state, entries)

    def _copied(self, sequence: int) -> list[Entry]:
        queue = self._copy_queue
        found = [] if queue is None else queue.entries(self._copies[sequence], 1)
        if found and found[0].record_bytes:
            return [_CopyEntry(*found[0])]
        # The copy was deleted by force, but the original may still be there.
        if sequence >= self.first_sequence:
            return self._own.entries(sequence, 1)
        return [_CopyEntry(0, 0, 0)]


def group_queue(store: Store, state: GroupState) -> StoredQueue | None:
    """The queue of a group's subject; None until it has a visible message."""
    queue = store.queue(state.subject)
    return None if queue is None else StoredQueue(store, state, queue)


def read_messages(store: Store, state: GroupState, entries: Sequence[Place]) -> Records:
    """The records of these entries of a `StoredQueue`, copies unpacked; raises `CorruptionError`."""
    subject = state.subject
    if not state.long_retries.copies:
        return store.read_together(entries, subject=subject)
    own = [entry for entry in entries if not isinstance(entry, _CopyEntry)]
    copied = [entry for entry in entries if isinstance(entry, _CopyEntry)]
    records = iter(store.read_records(own, subject=subject))
    copies = iter(store.read_records(copied, subject=COPIES))
    return Records.of(
        [
            original_record(next(copies), subject)
            if isinstance(entry, _CopyEntry)
            else next(records)
            for entry in entries
        ]
    )
