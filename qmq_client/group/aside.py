"""The long retries of a group: messages that come back later than the redelivery heap looks ahead.

The broker keeps such a message as a delayed message of its own (`setting_aside.py`), so that it
takes no room in the group and does not hold back retention. This module is what the group knows:
which of its messages are away and under which ticket; and, for those that came back, where the copy
is, which is read because retention may have taken the original meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from qmq_client.group.redelivery import Redelivery, RedeliveryHeap

#: Memory of one copy's place.
_COPY_BYTES: Final = 192


@dataclass(frozen=True, slots=True, kw_only=True)
class AsideRun(Redelivery):
    """A run of messages that are away; only their ticket brings them back.

    `retry_at_ms` is when their copies are due, or a little later.
    """

    ticket: int

    @property
    def is_suspect(self) -> bool:
        """False: nothing is delivered from here."""
        return False


class Aside:
    """Messages of one group that are away, and copies of those that came back.

    A message is either away and waiting for nothing, or it has a copy and is waiting, in flight or
    dead.
    """

    __slots__ = ("copies", "runs")

    def __init__(self) -> None:
        self.runs: RedeliveryHeap[AsideRun] = RedeliveryHeap()
        #: Sequence of the message → sequence in the queue of copies.
        self.copies: dict[int, int] = {}

    @property
    def memory_bytes(self) -> int:
        """The memory of all that, roughly."""
        return self.runs.memory_bytes + _COPY_BYTES * len(self.copies)

    @property
    def count(self) -> int:
        """How many messages are away."""
        return self.runs.count

    def put(self, waited: Iterable[Redelivery], ticket: int) -> None:
        """Messages that waited are away from now on; existing copies were copied again."""
        for run in waited:
            self.forget_copies(run.first, run.next)
            self.runs.add(
                AsideRun(
                    first=run.first,
                    next=run.next,
                    attempts=run.attempts,
                    retry_at_ms=run.retry_at_ms,
                    error=run.error,
                    history=run.history,
                    untried=run.untried,
                    ticket=ticket,
                )
            )

    def put_off(self, first: int, next_: int, ms: int) -> None:
        """The copies of these are due this much later than the group knows."""
        for run in self.runs.take(first, next_):
            self.runs.add(replace(run, retry_at_ms=run.retry_at_ms + ms))

    def holds(self, sequence: int) -> bool:
        """Whether this message is away, or has a copy."""
        return sequence in self.copies or self.runs.at(sequence) is not None

    def is_away(self, sequence: int, ticket: int) -> bool:
        """Whether this message is away under this ticket."""
        run = self.runs.at(sequence)
        return run is not None and run.ticket == ticket

    def bring_back(self, sequence: int, copy: int | None, now_ms: int) -> Redelivery | None:
        """A message is back, with its copy at this sequence; returns what waits now, None if it was
        not away.

        Without a copy it is read from its original place.
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
        """The group is done with these messages, or will reach them again."""
        self.runs.take(first, next_)
        self.forget_copies(first, next_)

    def forget_copies(self, first: int, next_: int) -> None:
        """The copies of these are no longer needed."""
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
