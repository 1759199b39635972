"""Messages of one group that wait for their next delivery.

A nack or the end of a lease puts a run of sequences here. Bodies are never copied, and other groups
are not affected. Due runs are taken in the order of their times; messages that may have crashed
their consumer are kept separately (`suspects.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from typing import Final, Generic, Self, TypeVar

from qmq_client.group.history import LEASE_ENDED, History, error_bytes
from qmq_client.group.ranges import Spans

#: The heap is rebuilt when it holds this many times more entries than there are runs.
_STALE_ENTRIES_FACTOR: Final = 4
_STALE_ENTRIES_MIN: Final = 64
#: A message is a suspect if the leases of this many deliveries ended without an outcome. A single
#: case may be chance: such a message is delivered together with others.
SUSPECT_AFTER: Final = 2
#: Memory of one run without its errors, and of one entry in a heap by time.
_RUN_BYTES: Final = 288
_ENTRY_BYTES: Final = 104


@dataclass(frozen=True, slots=True, kw_only=True)
class Redelivery:
    """A run of messages that wait for the same moment."""

    #: First consume-queue sequence.
    first: int
    #: One after the last sequence.
    next: int
    #: Deliveries so far, without those that were returned untried.
    attempts: int
    #: Wall-clock milliseconds from which they may be delivered again.
    retry_at_ms: int
    #: The error of the last consumer that tried, or that its lease ended.
    error: str
    #: The attempts so far.
    history: History = ()
    #: How often it was returned untried since the last attempt.
    untried: int = 0

    @property
    def is_suspect(self) -> bool:
        """Whether it may have crashed its consumer, and must be delivered alone."""
        # A consumer that nacks with this exact text gets the message alone, which is harmless.
        return self.error == LEASE_ENDED and self.attempts >= SUSPECT_AFTER

    @property
    def memory_bytes(self) -> int:
        """The memory it takes, roughly."""
        return _RUN_BYTES + error_bytes(self.error, self.history)

    def cut(self, first: int, next_: int) -> Self:
        """The part of this run with these sequences."""
        return replace(self, first=first, next=next_)


R = TypeVar("R", bound=Redelivery)


class RedeliveryHeap(Generic[R]):
    """Runs by sequence (to find them) and by time (to know what is due), suspects apart."""

    __slots__ = ("_by_time", "_runs", "_suspects_by_time", "latest_ms")

    def __init__(self) -> None:
        self._runs: Spans[R] = Spans()
        #: Upper bound of the times of all runs.
        self.latest_ms = 0
        #: (retry_at_ms, first sequence); entries whose run is gone or moved are skipped.
        self._by_time: list[tuple[int, int]] = []
        #: The same for suspects.
        self._suspects_by_time: list[tuple[int, int]] = []

    @property
    def count(self) -> int:
        """How many messages wait."""
        return self._runs.count

    @property
    def memory_bytes(self) -> int:
        """The memory of all waiting runs, roughly."""
        entries = len(self._by_time) + len(self._suspects_by_time)
        return self._runs.memory_bytes + _ENTRY_BYTES * entries

    def runs(self) -> Iterator[R]:
        """All runs by sequence."""
        return iter(self._runs)

    def at(self, sequence: int) -> R | None:
        """The run that holds this message; None if it does not wait."""
        return self._runs.at(sequence)

    def add(self, run: R) -> None:
        """Add a run. Requires: none of its messages waits already."""
        self._runs.add(run)
        self.latest_ms = max(self.latest_ms, run.retry_at_ms)
        self._note_time(run)
        entries = len(self._by_time) + len(self._suspects_by_time)
        if entries > _STALE_ENTRIES_MIN + _STALE_ENTRIES_FACTOR * len(self._runs):
            self._by_time.clear()
            self._suspects_by_time.clear()
            for one in self._runs:
                self._by_time_of(one).append((one.retry_at_ms, one.first))
            heapify(self._by_time)
            heapify(self._suspects_by_time)

    def take(self, first: int, next_: int) -> list[R]:
        """Remove these sequences; returns the runs that waited."""
        taken = self._runs.take(first, next_)
        rest = self._runs.at(next_)
        if taken and rest is not None:  # the rest of a cut run has a new first sequence
            self._note_time(rest)
        return taken

    def next_due_ms(self) -> int | None:
        """When the next run is due; None if nothing waits."""
        due_ms, suspect_ms = self._next_ms(self._by_time), self.next_suspect_ms()
        if due_ms is None or suspect_ms is None:
            return suspect_ms if due_ms is None else due_ms
        return min(due_ms, suspect_ms)

    def next_suspect_ms(self) -> int | None:
        """When the next suspect is due; None if there is none."""
        return self._next_ms(self._suspects_by_time)

    def has_suspect(self, now_ms: int) -> bool:
        """Whether a suspect is due."""
        suspect_ms = self.next_suspect_ms()
        return suspect_ms is not None and suspect_ms <= now_ms

    def suspect(self, now_ms: int) -> R | None:
        """The first due suspect, as one message; it is not removed."""
        if not self.has_suspect(now_ms):
            return None
        first = self._suspects_by_time[0][1]
        run = self._runs.at(first)
        return None if run is None else run.cut(first, first + 1)

    def due(self, now_ms: int, messages_max: int, *, runs_max: int | None = None) -> list[R]:
        """Due runs, oldest first, at most `runs_max` with `messages_max` messages; they are not removed.

        Without suspects.
        """
        runs_max = runs_max or messages_max
        due: list[R] = []
        popped: dict[tuple[int, int], None] = {}
        count = 0
        while count < messages_max and len(due) < runs_max:
            due_ms = self._next_ms(self._by_time)
            if due_ms is None or due_ms > now_ms:
                break
            entry = heappop(self._by_time)
            if entry in popped:
                continue  # the same run is twice in the heap
            popped[entry] = None
            run = self._runs.at(entry[1])
            assert run is not None
            due.append(run.cut(run.first, min(run.next, run.first + messages_max - count)))
            count += due[-1].next - due[-1].first
        for entry in popped:
            heappush(self._by_time, entry)
        return due

    def far(self, after_ms: int, messages_max: int) -> list[R]:
        """Runs due later than `after_ms`, at most `messages_max` messages; they are not removed."""
        if self.latest_ms <= after_ms:
            return []
        found: list[R] = []
        self.latest_ms, room = 0, messages_max
        for run in self._runs:
            self.latest_ms = max(self.latest_ms, run.retry_at_ms)
            if run.retry_at_ms > after_ms and room:
                found.append(run.cut(run.first, min(run.next, run.first + room)))
                room -= found[-1].next - found[-1].first
        return found

    def is_waiting(self, run: Redelivery) -> bool:
        """Whether this run, or the one it was cut from, still waits for its time."""
        now = self._runs.at(run.first)
        if now is None or now.next < run.next:
            return False
        return (now.attempts, now.retry_at_ms) == (run.attempts, run.retry_at_ms)

    def _by_time_of(self, run: R) -> list[tuple[int, int]]:
        return self._suspects_by_time if run.is_suspect else self._by_time

    def _note_time(self, run: R) -> None:
        heappush(self._by_time_of(run), (run.retry_at_ms, run.first))

    def _next_ms(self, by_time: list[tuple[int, int]]) -> int | None:
        while by_time:
            retry_at_ms, first = by_time[0]
            run = self._runs.at(first)
            is_current = run is not None and (run.retry_at_ms, run.first) == by_time[0]
            if run is not None and is_current and self._by_time_of(run) is by_time:
                return retry_at_ms
            heappop(by_time)
        return None
