"""Delayed messages of the broker in memory: they wait for the time of its clock."""

from __future__ import annotations

import heapq
from collections.abc import Container, Mapping, Sequence
from itertools import count

from qmq_client.wire.delayed import Cancellation
from qmq_client.wire.due import record_due_at_ms
from qmq_client.wire.message_id import parse_message_id
from qmq_client.wire.record import record_message_id


class MemoryDelayed:
    """Messages that wait. Its user holds a lock."""

    def __init__(self) -> None:
        #: Due time, order of arrival, subject, record.
        self._waiting: list[tuple[int, int, str, bytes]] = []
        self._numbers = count()
        self._cancelled: set[bytes] = set()

    def add(self, records: Mapping[str, Sequence[bytes]]) -> None:
        """Keep these until they are due."""
        for subject, some in records.items():
            for record in some:
                due_at_ms = record_due_at_ms(record) or 0
                heapq.heappush(self._waiting, (due_at_ms, next(self._numbers), subject, record))

    def due(self, now_ms: int) -> dict[str, list[bytes]]:
        """Let go of what is due, by subject and in order."""
        found: dict[str, list[bytes]] = {}
        while self._waiting and self._waiting[0][0] <= now_ms:
            _, _, subject, record = heapq.heappop(self._waiting)
            found.setdefault(subject, []).append(record)
        return found

    def cancel(
        self, message_ids: Sequence[str], known: Container[bytes]
    ) -> tuple[Cancellation, ...]:
        """Take messages back; `known` are the ids of all that were ever stored."""
        return tuple(self._cancel(parse_message_id(one), known) for one in message_ids)

    def _cancel(self, message_id: bytes, known: Container[bytes]) -> Cancellation:
        left = [one for one in self._waiting if record_message_id(one[3]) != message_id]
        if len(left) < len(self._waiting):
            heapq.heapify(left)
            self._waiting = left
            self._cancelled.add(message_id)
        if message_id in self._cancelled:
            return Cancellation.CANCELLED
        return Cancellation.TOO_LATE if message_id in known else Cancellation.UNKNOWN
