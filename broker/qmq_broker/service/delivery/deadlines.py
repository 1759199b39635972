"""When leases end: a heap over the leases of all consumers of one group.

Entries of ended or extended leases stay until they reach the top, or until there are many more
entries than leases.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heapify, heappop, heappush
from typing import Final

from qmq_broker.service.delivery.leases import Lease, PullLog

#: The heap is cleared of settled leases only above this many entries.
_ENTRIES_MIN: Final = 1024
#: Memory of one entry.
DEADLINE_BYTES: Final = 120


class Deadlines:
    """Deadlines over the pull logs of one group; belongs to its thread."""

    __slots__ = ("_consumers", "_entries", "_entries_max")

    def __init__(self, consumers: Mapping[str, PullLog]) -> None:
        """`consumers` is only read."""
        self._consumers = consumers
        #: (deadline, consumer, first pull sequence).
        self._entries: list[tuple[int, str, int]] = []
        self._entries_max = _ENTRIES_MIN

    def __len__(self) -> int:
        """Entries of the heap, including those of ended leases."""
        return len(self._entries)

    def watch(self, consumer: str, lease: Lease) -> None:
        """Note when this lease ends."""
        heappush(self._entries, (lease.until_ms, consumer, lease.first))
        if len(self._entries) > self._entries_max:
            self._entries = [
                (lease.until_ms, name, lease.first)
                for name, log in self._consumers.items()
                for lease in log.leases()
            ]
            heapify(self._entries)
            self._entries_max = _ENTRIES_MIN + 2 * len(self._entries)

    def next_ms(self) -> int | None:
        """When the next lease ends; None if there is none."""
        entries = self._entries
        while entries:
            until_ms, consumer, first = entries[0]
            log = self._consumers.get(consumer)
            lease = None if log is None else log.at(first)
            if lease is not None and lease.first == first and lease.until_ms == until_ms:
                return until_ms
            heappop(entries)
        return None

    def ended(self, now_ms: int, leases_max: int) -> list[tuple[str, Lease]]:
        """Leases past their deadline, with their consumers, at most `leases_max`; they stay."""
        if not self._entries or self._entries[0][0] > now_ms:
            return []
        ended: dict[tuple[int, str, int], Lease] = {}
        while len(ended) < leases_max:
            deadline_ms = self.next_ms()
            if deadline_ms is None or deadline_ms > now_ms:
                break
            entry = heappop(self._entries)
            lease = self._consumers[entry[1]].at(entry[2])
            assert lease is not None
            ended[entry] = lease
        for entry in ended:
            heappush(self._entries, entry)
        return [(consumer, lease) for (_, consumer, _), lease in ended.items()]
