"""The queues of an ordered group, one for each key: a message is ready when the previous one is settled.

A queue is identified by a hash of its key. Two keys with the same hash only wait for each other
needlessly. The head of a queue is ready, delivered, or waiting for redelivery; the others are held.
Messages without a key are in no queue: they are ready at once and forgotten when delivered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Final

from qmq_client.wire.checksum import crc32c

NO_KEY: Final = 0
#: The heap is cleared of delivered messages only above this many entries.
_READY_MIN: Final = 1024
#: Memory of one queue, and of one message.
_QUEUE_BYTES: Final = 896
_HELD_BYTES: Final = 256


def key_number(key: bytes) -> int:
    """The hash of a key, 63 bits and never 0; 0 for no key.

    Two checksums, the second seeded by the first: keys that collide in one need not collide in the
    other.
    """
    if not key:
        return NO_KEY
    low = crc32c(key)
    return (crc32c(key[::-1], low) << 32 | low) & (2**63 - 1) or 1


class KeyQueues:
    """The queues of one group; belongs to its thread.

    Invariant: only the head of a queue may be ready.
    """

    __slots__ = ("_heap", "_key_of", "_loose", "_queues", "_ready")

    def __init__(self) -> None:
        self._queues: dict[int, deque[int]] = {}
        self._key_of: dict[int, int] = {}
        self._ready: set[int] = set()
        #: The ready messages without a key.
        self._loose: set[int] = set()
        #: The ready messages, and some that were delivered meanwhile.
        self._heap: list[int] = []

    @property
    def ready_count(self) -> int:
        """Messages that may be delivered now, for the first time."""
        return len(self._ready)

    @property
    def undelivered_count(self) -> int:
        """Messages that were never delivered: the ready ones and those after them."""
        # Only a head can have been delivered, and it has been unless it is ready.
        given = len(self._queues) - (len(self._ready) - len(self._loose))
        return len(self._key_of) - given + len(self._loose)

    @property
    def memory_bytes(self) -> int:
        """The memory of all queues, roughly."""
        messages = len(self._key_of) + len(self._loose)
        return _QUEUE_BYTES * len(self._queues) + _HELD_BYTES * messages + 8 * len(self._heap)

    def sequences(self) -> Iterator[tuple[int, int]]:
        """Sequence and key of every message; those of one key in order."""
        for key, waiting in self._queues.items():
            for sequence in waiting:
                yield sequence, key
        for sequence in sorted(self._loose):
            yield sequence, NO_KEY

    def add(self, sequence: int, key: int, *, is_given: bool = False) -> None:
        """Add a message to the end of its queue. Requires: it is in no queue yet."""
        if key == NO_KEY:
            self._loose.add(sequence)
            self._make_ready(sequence)
            return
        waiting = self._queues.get(key)
        if waiting is None:
            waiting = self._queues[key] = deque()
        self._key_of[sequence] = key
        waiting.append(sequence)
        if len(waiting) == 1 and not is_given:
            self._make_ready(sequence)

    def ready(self, count: int) -> list[int]:
        """The lowest messages that may be delivered now; they are not removed."""
        found: list[int] = []
        heap = self._heap
        while heap and len(found) < count:
            sequence = heappop(heap)
            if sequence in self._ready and (not found or found[-1] != sequence):
                found.append(sequence)
        for sequence in found:
            heappush(heap, sequence)
        return found

    def give(self, first: int, next_: int) -> None:
        """Record that these messages were delivered or redelivered."""
        for sequence in range(first, next_):
            self._ready.discard(sequence)
            self._loose.discard(sequence)

    def done(self, first: int, next_: int) -> None:
        """Record that these messages are settled: the next messages of their keys become ready."""
        for sequence in range(first, next_):
            self._ready.discard(sequence)
            self._loose.discard(sequence)
            key = self._key_of.pop(sequence, None)
            if key is not None:
                self._leave(key, sequence)

    def drop_all(self) -> None:
        """Forget all messages."""
        self._queues.clear()
        self._key_of.clear()
        self._ready.clear()
        self._loose.clear()
        self._heap.clear()

    def _leave(self, key: int, sequence: int) -> None:
        waiting = self._queues[key]
        if waiting[0] != sequence:
            waiting.remove(sequence)
            return
        waiting.popleft()
        if waiting:
            self._make_ready(waiting[0])
        else:
            del self._queues[key]

    def _make_ready(self, sequence: int) -> None:
        self._ready.add(sequence)
        heappush(self._heap, sequence)
        if len(self._heap) > _READY_MIN + 4 * len(self._ready):
            self._heap = list(self._ready)
            heapify(self._heap)
