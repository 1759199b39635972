"""The pull log of one consumer: the messages delivered to it, with their leases.

A lease maps a run of pull sequences of this consumer to a run of sequences of the consume queue,
with one deadline. It ends by ack, nack or reject, or at its deadline. The numbering is QMQ's (pull
sequence → message sequence). Unlike QMQ's single list per consumer, leases per run of messages
allow acks in any order, and a stuck message blocks only itself. Kept in memory; the action log
makes it durable.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from typing import Final

from qmq_client.group.history import History, error_bytes
from qmq_client.group.ranges import RangeSet, Spans

#: Acked ranges remembered per token and consumer, to distinguish a repeated ack after a lost answer
#: from a late one. Beyond this, a repeat is reported as stale.
ACKED_RANGES_MAX: Final = 1000
#: Tokens (openings of the store) for which they are remembered.
ACKED_TOKENS_MAX: Final = 4
#: Memory of a lease with its deadline, without the errors of its messages.
LEASE_BYTES: Final = 512
#: Memory of one message that is returned or becomes a dead letter separately.
RETURNING_BYTES: Final = 256
#: Memory of a pull log, and of one range that it remembers as acked.
LOG_BYTES: Final = 1_024
RANGE_BYTES: Final = 96


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Messages that one consumer holds under one deadline."""

    #: First pull sequence.
    first: int
    #: One after the last pull sequence.
    next: int
    #: Consume queue sequence of the first message; the others follow without a gap.
    first_sequence: int
    #: The number of the attempt, from 1; untried deliveries do not count.
    attempt: int
    #: The token of the opening of the store that delivered the messages.
    token: int
    #: Wall-clock milliseconds at which the lease ends.
    until_ms: int
    #: Time of the delivery.
    given_at_ms: int = 0
    #: The earlier attempts.
    history: History = ()
    #: The error of the last earlier attempt.
    error: str = ""
    #: How often these messages were returned untried since then.
    untried: int = 0

    @property
    def memory_bytes(self) -> int:
        """The memory of the lease, roughly, including the case that each message is returned separately."""
        held = self.next - self.first
        return LEASE_BYTES + held * RETURNING_BYTES + error_bytes(self.error, self.history)

    @property
    def next_sequence(self) -> int:
        """One after the sequence of the last message."""
        return self.first_sequence + self.next - self.first

    def cut(self, first: int, next_: int) -> Lease:
        """The part of this lease with these pull sequences."""
        return replace(
            self, first=first, next=next_, first_sequence=self.first_sequence + first - self.first
        )


class PullLog:
    """The leases of one consumer of a group; only the thread of the group touches it."""

    __slots__ = ("_acked", "_leases", "counted_bytes", "last_seen_ms", "next_pull_sequence")

    def __init__(self) -> None:
        #: Pull sequence of the consumer's next message; never used twice.
        self.next_pull_sequence = 0
        #: When this consumer last pulled or got messages.
        self.last_seen_ms = 0
        #: Its memory as last counted by the group.
        self.counted_bytes = 0
        self._leases: Spans[Lease] = Spans()
        self._acked: dict[int, RangeSet] = {}

    @property
    def in_flight(self) -> int:
        """Messages delivered and not settled."""
        return self._leases.count

    @property
    def memory_bytes(self) -> int:
        """The memory of the pull log, roughly."""
        acked = sum(map(len, self._acked.values()))
        return LOG_BYTES + self._leases.memory_bytes + RANGE_BYTES * acked

    def is_there(self, since_ms: int) -> bool:
        """Whether this consumer holds messages or was seen since."""
        return bool(self._leases.count) or self.last_seen_ms >= since_ms

    def leases(self) -> Spans[Lease]:
        """All leases by pull sequence, read-only."""
        return self._leases

    def acked(self) -> dict[int, RangeSet]:
        """The pull sequences remembered as acked, by token, oldest opening first."""
        return self._acked

    def restore(
        self,
        leases: Iterable[Lease],
        acked: Mapping[int, Iterable[tuple[int, int]]],
        *,
        next_pull_sequence: int,
    ) -> None:
        """Restore a snapshot. Requires: no message was delivered yet."""
        self.next_pull_sequence = next_pull_sequence
        for lease in leases:
            self._leases.add(lease)
        for token, ranges in acked.items():
            known = self._acked[token] = RangeSet()
            for first, next_ in ranges:
                known.add(first, next_)

    def hand_out(self, lease: Lease) -> None:
        """Record that these messages were delivered."""
        self._leases.add(lease)
        self.next_pull_sequence = max(self.next_pull_sequence, lease.next)

    def drop_all(self) -> None:
        """Drop all leases without an outcome; the acked ranges are kept."""
        self._leases = Spans()

    def at(self, pull_sequence: int) -> Lease | None:
        """The lease that holds this pull sequence."""
        return self._leases.at(pull_sequence)

    def unacked(self, first: int, next_: int, *, token: int) -> list[tuple[int, int]]:
        """The parts of this range that are not recorded as acked under `token`."""
        acked = self._acked.get(token)
        return [(first, next_)] if acked is None else acked.missing(first, next_)

    def end(self, first: int, next_: int) -> list[Lease]:
        """End the leases of this range; returns them, cut to it."""
        return self._leases.take(first, next_)

    def ack(self, first: int, next_: int) -> list[Lease]:
        """End the leases of this range as acked; returns them, cut to it."""
        ended = self._leases.take(first, next_)
        for lease in ended:
            self._remember_acked(lease)
        return ended

    def extend(self, first: int, next_: int, until_ms: int) -> list[Lease]:
        """Set the deadline of the leases of this range to `until_ms`; returns their new form."""
        return self._leases.change(first, next_, lambda lease: replace(lease, until_ms=until_ms))

    def _remember_acked(self, lease: Lease) -> None:
        acked = self._acked.get(lease.token)
        if acked is None:
            acked = self._acked[lease.token] = RangeSet()
            if len(self._acked) > ACKED_TOKENS_MAX:
                del self._acked[next(iter(self._acked))]
        acked.add(lease.first, lease.next)
        acked.forget_lowest(ACKED_RANGES_MAX)


#: The heap is cleared of settled leases only above this many entries.
_ENTRIES_MIN: Final = 1024
#: Memory of one entry.
DEADLINE_BYTES: Final = 120


class Deadlines:
    """The deadlines of the leases of all consumers of one group, as a heap; owned by the group's thread.

    Entries of ended or extended leases stay until they reach the top, or until there are many more
    entries than leases.
    """

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
        """Add the deadline of this lease."""
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
        """Leases past their deadline, with their consumers, at most `leases_max`; they are not removed."""
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
