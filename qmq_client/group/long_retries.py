"""The long retries of a group: redeliveries beyond the horizon of the redelivery heap.

The broker stores such a message as an internal delayed message (its `long_retries.py`), so that it
takes no room in the group and does not hold back retention. The group records which of its messages
are in a long retry, with the retry's id; and afterwards the place of the copy, which is read
because retention may have deleted the original meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from qmq_client.group.redelivery import Redelivery, RedeliveryHeap

#: Memory of the place of one copy.
_COPY_BYTES: Final = 192


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRetryRun(Redelivery):
    """A run of messages in one long retry.

    `retry_at_ms` is when their copies are due, or a little later.
    """

    retry_id: int

    @property
    def is_suspect(self) -> bool:
        """False: messages are not delivered from here."""
        return False


class LongRetries:
    """Messages of one group in a long retry, and copies of those whose long retry has ended.

    A message with a copy waits for redelivery, is in flight or is dead.
    """

    __slots__ = ("copies", "runs")

    def __init__(self) -> None:
        self.runs: RedeliveryHeap[LongRetryRun] = RedeliveryHeap()
        #: Sequence of the message → sequence in the queue of copies.
        self.copies: dict[int, int] = {}

    @property
    def memory_bytes(self) -> int:
        """The memory of the long retries, roughly."""
        return self.runs.memory_bytes + _COPY_BYTES * len(self.copies)

    @property
    def count(self) -> int:
        """How many messages are in a long retry."""
        return self.runs.count

    def begin(self, waited: Iterable[Redelivery], retry_id: int) -> None:
        """Begin the long retry of waiting messages; existing copies were copied again."""
        for run in waited:
            self.forget_copies(run.first, run.next)
            self.runs.add(
                LongRetryRun(
                    first=run.first,
                    next=run.next,
                    attempts=run.attempts,
                    retry_at_ms=run.retry_at_ms,
                    error=run.error,
                    history=run.history,
                    untried=run.untried,
                    retry_id=retry_id,
                )
            )

    def put_off(self, first: int, next_: int, ms: int) -> None:
        """Record that the copies of these messages are due this much later."""
        for run in self.runs.take(first, next_):
            self.runs.add(replace(run, retry_at_ms=run.retry_at_ms + ms))

    def holds(self, sequence: int) -> bool:
        """Whether this message is in a long retry, or has a copy."""
        return sequence in self.copies or self.runs.at(sequence) is not None

    def is_in(self, sequence: int, retry_id: int) -> bool:
        """Whether this message is in the long retry of this id."""
        run = self.runs.at(sequence)
        return run is not None and run.retry_id == retry_id

    def end(self, sequence: int, copy: int | None, now_ms: int) -> Redelivery | None:
        """End the long retry of a message, whose copy is at this sequence; without one its original is read.

        Returns the run that waits for redelivery now; None if the message was not in a long retry.
        """
        taken = self.runs.take(sequence, sequence + 1)
        if not taken:
            return None
        (run,) = taken
        if copy is not None:
            self.copies[sequence] = copy
        return Redelivery(
            first=run.first,
            next=run.next,
            attempts=run.attempts,
            retry_at_ms=min(run.retry_at_ms, now_ms),
            error=run.error,
            history=run.history,
            untried=run.untried,
        )

    def forget(self, first: int, next_: int) -> None:
        """Forget messages that the group has settled, or will read again."""
        self.runs.take(first, next_)
        self.forget_copies(first, next_)

    def forget_copies(self, first: int, next_: int) -> None:
        """Forget copies that are no longer needed."""
        if not self.copies:
            return
        if next_ - first < len(self.copies):
            for sequence in range(first, next_):
                self.copies.pop(sequence, None)
            return
        for sequence in [one for one in self.copies if first <= one < next_]:
            del self.copies[sequence]

    def without_copies(self, first: int, next_: int) -> Iterator[tuple[int, int]]:
        """The parts of this range that have no copies."""
        for sequence in sorted(one for one in self.copies if first <= one < next_):
            if first < sequence:
                yield first, sequence
            first = sequence + 1
        if first < next_:
            yield first, next_
