"""One consumer group of the in-memory broker: cursor, leases, attempts, redeliveries, dead letters.

The same rules as the bundled broker's, in the plainest data structures: no files, no bounds, no
threads (the caller holds a lock), time as an argument.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from qmq_client.retry import Backoff
from qmq_client.wire.deliveries import DeliveryRun
from qmq_client.wire.requests import Extend, Nack, PullRequest, Range, Reject, Settlement

_BACKOFF: Final = Backoff(jitter=0.0)
REJECTED: Final = "rejected"
ATTEMPTS_USED_UP: Final = "attempts used up"

StaleRange = tuple[int, int, int]
#: None is an ack.
_Outcome = Nack | Reject | Extend | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryDeadLetter:
    """A message that this group gave up."""

    sequence: int
    #: Deliveries it had.
    attempts: int
    #: "rejected" or "attempts used up".
    reason: str
    #: What the consumer reported last.
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOut:
    """Messages given to one consumer: consecutive pull sequences from the first."""

    first_pull_sequence: int
    sequences: tuple[int, ...]
    attempts: tuple[int, ...]

    def runs(self) -> tuple[DeliveryRun, ...]:
        """The same as runs of consecutive sequences with equal attempts."""
        pairs = list(zip(self.sequences, self.attempts, strict=True))
        if not pairs:
            return ()
        firsts = [0]
        for index, (one, other) in enumerate(pairwise(pairs), start=1):
            if other != (one[0] + 1, one[1]):
                firsts.append(index)
        return tuple(
            DeliveryRun(
                first_sequence=pairs[first][0], count=after - first, attempt=pairs[first][1]
            )
            for first, after in pairwise([*firsts, len(pairs)])
        )


@dataclass(slots=True, kw_only=True)
class _Lease:
    sequence: int
    token: int
    attempt: int
    until_ms: int


@dataclass(slots=True)
class _Consumer:
    next_pull_sequence: int = 0
    leases: dict[int, _Lease] = field(default_factory=dict)
    #: Token and pull sequence of what was acked: an ack repeated after a lost answer is not stale.
    acked: set[tuple[int, int]] = field(default_factory=set)


class MemoryGroup:
    """State of one (subject, group). Not thread safe."""

    def __init__(self, *, cursor: int, max_attempts: int) -> None:
        self.cursor = cursor
        self.max_attempts = max_attempts
        self.dead: list[MemoryDeadLetter] = []
        self.acked: set[int] = set()
        self._attempts: dict[int, int] = {}
        self._waiting: list[tuple[int, int]] = []
        self._consumers: dict[str, _Consumer] = {}

    def step(self, now_ms: int) -> int:
        """End the leases whose time is over; how many."""
        count = 0
        for consumer in self._consumers.values():
            ended = [p for p, lease in consumer.leases.items() if lease.until_ms <= now_ms]
            for pull_sequence in ended:
                lease = consumer.leases.pop(pull_sequence)
                self._give_back(lease, now_ms + _backoff_ms(lease.attempt), "lease ended")
            count += len(ended)
        return count

    def take(
        self, request: PullRequest, *, token: int, now_ms: int, records: Sequence[bytes]
    ) -> HandOut:
        """Hand out what is due, redeliveries first; `records` are those of the subject."""
        self.step(now_ms)
        consumer = self._consumers.setdefault(request.consumer, _Consumer())
        first_pull_sequence = consumer.next_pull_sequence
        sequences: list[int] = []
        bytes_left = request.max_bytes
        while len(sequences) < request.max_messages:
            sequence = self._next(now_ms, len(records))
            if sequence is None or (sequences and len(records[sequence]) > bytes_left):
                break
            bytes_left -= len(records[sequence])
            sequences.append(sequence)
            self._advance(sequence)
            self._attempts[sequence] = self._attempts.get(sequence, 0) + 1
            consumer.leases[consumer.next_pull_sequence] = _Lease(
                sequence=sequence,
                token=token,
                attempt=self._attempts[sequence],
                until_ms=now_ms + request.lease_ms,
            )
            consumer.next_pull_sequence += 1
        return HandOut(
            first_pull_sequence=first_pull_sequence,
            sequences=tuple(sequences),
            attempts=tuple(self._attempts[sequence] for sequence in sequences),
        )

    def settle(
        self, consumer_id: str, settlements: Iterable[Settlement], *, now_ms: int
    ) -> tuple[int, list[StaleRange]]:
        """Apply outcomes; how many messages were settled, and the ranges refused as stale."""
        self.step(now_ms)
        consumer = self._consumers.setdefault(consumer_id, _Consumer())
        stale: list[StaleRange] = []
        settled = 0
        for settlement in settlements:
            for pulls, outcome in _outcomes(settlement):
                for pull_sequence in range(*pulls):
                    lease = consumer.leases.get(pull_sequence)
                    name = (settlement.token, pull_sequence)
                    if outcome is None and name in consumer.acked:
                        settled += 1
                        continue
                    if lease is None or lease.token != settlement.token:
                        _add_stale(stale, settlement.token, pull_sequence)
                        continue
                    settled += 1
                    if not isinstance(outcome, Extend):
                        del consumer.leases[pull_sequence]
                    if outcome is None:
                        consumer.acked.add(name)
                    self._apply(lease, outcome, now_ms)
        return settled, stale

    def in_flight(self) -> int:
        """Messages handed out and neither settled nor given back."""
        return sum(len(consumer.leases) for consumer in self._consumers.values())

    def next_due_ms(self) -> int | None:
        """When a redelivery or a lease end is next due; None when nothing waits."""
        times = [due_ms for due_ms, _ in self._waiting[:1]]
        for consumer in self._consumers.values():
            times += [lease.until_ms for lease in consumer.leases.values()]
        return min(times, default=None)

    def _apply(self, lease: _Lease, outcome: _Outcome, now_ms: int) -> None:
        match outcome:
            case Nack(delay_ms=None, error=error):
                self._give_back(lease, now_ms + _backoff_ms(lease.attempt), error)
            case Nack(delay_ms=int(delay_ms), error=error):
                self._give_back(lease, now_ms + delay_ms, error)
            case Reject(reason=reason):
                self._bury(lease, REJECTED, reason)
            case Extend(lease_ms=lease_ms):
                lease.until_ms = now_ms + lease_ms
            case _:
                self.acked.add(lease.sequence)
                self._attempts.pop(lease.sequence, None)

    def _give_back(self, lease: _Lease, due_ms: int, error: str) -> None:
        if lease.attempt >= self.max_attempts:
            self._bury(lease, ATTEMPTS_USED_UP, error)
        else:
            heapq.heappush(self._waiting, (due_ms, lease.sequence))

    def _bury(self, lease: _Lease, reason: str, error: str) -> None:
        self.dead.append(
            MemoryDeadLetter(
                sequence=lease.sequence, attempts=lease.attempt, reason=reason, error=error
            )
        )

    def _next(self, now_ms: int, next_sequence: int) -> int | None:
        if self._waiting and self._waiting[0][0] <= now_ms:
            return self._waiting[0][1]
        return self.cursor if self.cursor < next_sequence else None

    def _advance(self, sequence: int) -> None:
        if self._waiting and self._waiting[0][1] == sequence:
            heapq.heappop(self._waiting)
        else:
            self.cursor += 1


def _outcomes(settlement: Settlement) -> Iterator[tuple[Range, _Outcome]]:
    for pulls in settlement.acks:
        yield pulls, None
    for nack in settlement.nacks:
        yield nack.range, nack
    for reject in settlement.rejects:
        yield reject.range, reject
    for extend in settlement.extends:
        yield extend.range, extend


def _backoff_ms(attempt: int) -> int:
    return _BACKOFF.delay_ms(attempt, 0.0)


def _add_stale(stale: list[StaleRange], token: int, pull_sequence: int) -> None:
    if stale and stale[-1][0] == token and stale[-1][2] == pull_sequence:
        stale[-1] = (token, stale[-1][1], pull_sequence + 1)
    else:
        stale.append((token, pull_sequence, pull_sequence + 1))
