"""Delayed messages of the broker in memory: they wait for the time of its clock."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from itertools import count

from qmq_client.wire.delayed import Cancellation
from qmq_client.wire.due import record_due_at_ms
from qmq_client.wire.record import record_message_id


class MemoryDelayed:
    """Messages that wait. Its user holds a lock."""

    def __init__(self) -> None:
        #: Due time, order of arrival, subject, record.
        self._waiting: list[tuple[int, int, str, bytes]] = []
        self._numbers = count()
        #: Subject and id of each.
        self._cancelled: set[tuple[str, bytes]] = set()

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
        self,
        message_ids: Sequence[bytes],
        known: Iterable[tuple[str, bytes]],
        subject: str | None,
    ) -> tuple[Cancellation, ...]:
        """Take messages back, of one subject or of any; `known` are all that were ever stored."""
        return tuple(self._cancel(one, known, subject) for one in message_ids)

    def _cancel(
        self, message_id: bytes, known: Iterable[tuple[str, bytes]], subject: str | None
    ) -> Cancellation:
        def is_it(name: str, other: bytes) -> bool:
            return other == message_id and subject in (None, name)

        left = []
        for one in self._waiting:
            if is_it(one[2], record_message_id(one[3])):
                self._cancelled.add((one[2], message_id))
            else:
                left.append(one)
        heapq.heapify(left)
        self._waiting = left
        stored = {one for one in known if is_it(*one)}
        if not stored:
            return Cancellation.UNKNOWN
        is_cancelled = stored <= self._cancelled
        return Cancellation.CANCELLED if is_cancelled else Cancellation.TOO_LATE
