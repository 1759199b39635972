"""The part of the commit log that the groups still need.

There may be ten thousand groups, and retention asks every second while it waits for one of them. So
it checks only that group, and checks all of them once that group no longer needs the segment to be
deleted.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from qmq_broker.service.delivery.registry import Groups
from qmq_broker.service.delivery.waiting import GroupKey
from qmq_broker.storage.store import Store
from qmq_client.group.state import GroupState
from qmq_client.wire.names import COPIES


class NeededLog:
    """The part of the commit log that groups still need; owned by the loop thread."""

    def __init__(self, store: Store, groups: Groups) -> None:
        self._store = store
        self._groups = groups
        #: The group that needed the earliest offset when all were checked.
        self._holder: GroupKey | None = None

    def first_offset(self, dead_since_ms: int) -> int:
        """The offset of the first message that a group may still get.

        Dead letters count if they died at or after `dead_since_ms`.
        """
        firsts: dict[str, tuple[int, GroupState]] = {}  # one entry to look up for each subject
        for group in self._groups:
            for subject, first in self._firsts(group.state, dead_since_ms):
                if subject not in firsts or first < firsts[subject][0]:
                    firsts[subject] = first, group.state
        offset, self._holder = self._store.durable_offset, None
        for subject, (first, state) in firsts.items():
            found = self._offset(subject, first)
            if found < offset:
                offset, self._holder = found, (state.subject, state.group)
        return offset

    def holder_offset(self, dead_since_ms: int) -> int:
        """The same for one group: the one that needed the earliest offset when all were last checked."""
        holder = None if self._holder is None else self._groups.find(*self._holder)
        needed = () if holder is None else self._firsts(holder.state, dead_since_ms)
        return min(
            (self._offset(subject, first) for subject, first in needed),
            default=self._store.durable_offset,
        )

    def _firsts(self, state: GroupState, dead_since_ms: int) -> Iterator[tuple[str, int]]:
        """The first sequence that the group needs of its subject, and of its copies."""
        there = self._first_sequence(state.subject)
        yield state.subject, first_needed(state, dead_since_ms, there)
        if state.long_retries.copies:
            copy = first_copy(state, dead_since_ms, self._first_sequence(COPIES))
            if copy is not None:
                yield COPIES, copy

    def _first_sequence(self, subject: str) -> int:
        """The first sequence that still exists: a group that lost messages by force needs those after them."""
        queue = self._store.queue(subject)
        return 0 if queue is None else queue.first_sequence

    def _offset(self, subject: str, sequence: int) -> int:
        queue = self._store.queue(subject)
        entries = [] if queue is None else queue.entries(sequence, 1)
        return entries[0].physical_offset if entries else self._store.durable_offset


def first_needed(state: GroupState, dead_since_ms: int, first_sequence: int = 0) -> int:
    """The lowest sequence of its subject that this group may still get.

    Dead letters count if they died at or after `dead_since_ms`, because they can be replayed.
    Messages in a long retry, or read from copies after one, do not count, nor do those below
    `first_sequence`, which were deleted by force.
    """
    copies = state.long_retries.copies
    waiting = (run for run in state.redeliveries.runs() if run.next > first_sequence)
    ranges = [(run.first, run.next) for run in (waiting if copies else islice(waiting, 1))]
    ranges += [
        (lease.first_sequence, lease.next_sequence)
        for _, log in state.consumers()
        for lease in log.leases()
    ]
    left = [
        (max(first, first_sequence), next_) for first, next_ in ranges if next_ > first_sequence
    ]
    needed = [max(state.cursor, first_sequence)]
    if copies:
        needed += [one for run in left for one, _ in state.long_retries.without_copies(*run)]
    else:
        needed += [first for first, _ in left]
    if state.by_key is not None:
        keyed = (one for one, _ in state.by_key.sequences() if one >= first_sequence)
        needed += [one for one in keyed if not state.long_retries.holds(one)]
    dead = state.dead.first_since(dead_since_ms, without=copies, first_sequence=first_sequence)
    if dead is not None:
        needed.append(dead)
    return min(needed)


def first_copy(state: GroupState, dead_since_ms: int, first_sequence: int = 0) -> int | None:
    """The lowest sequence in the queue of copies that this group may still get.

    Copies below `first_sequence` were deleted by force.
    """
    dead, copies = state.dead, state.long_retries.copies
    if not copies:
        return None
    needed = [
        copy
        for sequence, copy in copies.items()
        if copy >= first_sequence
        and ((died_ms := dead.died_ms(sequence)) is None or died_ms >= dead_since_ms)
    ]
    return min(needed, default=None)
