"""One consumer group of the in-memory broker: cursor, leases, attempts, redeliveries, dead letters.

The same rules as the bundled broker's, in the plainest data structures: no files, no bounds, no
threads (the caller holds a lock), time as an argument. A suspect also comes alone here, but
consumers are not made to finish their other messages first. Tags, order by key, expiry and at most
once are those of `MemoryTerms` and of the request.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final

from msgspec import UNSET

from qmq_client.retry import Backoff
from qmq_client.wire.deliveries import DeliveryRun
from qmq_client.wire.groups import Instances
from qmq_client.wire.record import record_key
from qmq_client.wire.record_parts import record_expires_at_ms, record_tags
from qmq_client.wire.requests import Extend, Nack, PullRequest, Range, Reject, Settlement

_BACKOFF: Final = Backoff(jitter=0.0)
EXPIRED: Final = "expired"
REJECTED: Final = "rejected"
ATTEMPTS_USED_UP: Final = "attempts used up"
#: After so many deliveries a message whose lease ended without a word is a suspect.
_SUSPECT_AFTER: Final = 2
#: What comes back untried again waits at least so long.
_UNTRIED_WAIT_MS: Final = 1_000

StaleRange = tuple[int, int, int]
#: None is an ack.
_Outcome = Nack | Reject | Extend | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryDeadLetter:
    """A message that this group gave up."""

    sequence: int
    #: Number of its deliveries.
    attempts: int
    #: "rejected", "attempts used up" or "expired".
    reason: str
    #: The consumer's last report.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTerms:
    """Settings kept with a group from its first pull on."""

    any_tags: frozenset[bytes] = frozenset()
    all_tags: frozenset[bytes] = frozenset()
    is_ordered: bool = False

    def fits(self, record: bytes) -> bool:
        """Whether this message is for the group."""
        tags = frozenset(record_tags(record).split(b","))
        return self.all_tags <= tags and (not self.any_tags or not tags.isdisjoint(self.any_tags))


def terms_of(request: PullRequest) -> MemoryTerms:
    """What this pull says about its group."""
    tags = ((), ()) if request.tags is UNSET else (request.tags.any, request.tags.all)
    any_tags, all_tags = (frozenset(tag.encode() for tag in part) for part in tags)
    is_ordered = request.ordered is True
    return MemoryTerms(any_tags=any_tags, all_tags=all_tags, is_ordered=is_ordered)


@dataclass(slots=True, kw_only=True)
class _Lease:
    sequence: int
    token: int
    attempt: int
    until_ms: int
    #: Whether it was given as a suspect.
    is_suspect: bool = False
    #: Whether it was, and has not been settled or extended since.
    is_alone: bool = False


@dataclass(slots=True)
class _Consumer:
    next_pull_sequence: int = 0
    leases: dict[int, _Lease] = field(default_factory=dict)
    #: Token and pull sequence of acked messages: an ack repeated after a lost answer is not stale.
    acked: set[tuple[int, int]] = field(default_factory=set)


class MemoryGroup:
    """State of one (subject, group). Not thread safe."""

    def __init__(self, *, cursor: int, max_attempts: int, terms: MemoryTerms | None = None) -> None:
        self.cursor = cursor
        self.max_attempts = max_attempts
        self.terms = terms or MemoryTerms()
        self.backoff = _BACKOFF
        self.is_paused = False
        #: In an ordered group: messages it has reached and held back.
        self.held: list[int] = []
        self.dead: list[MemoryDeadLetter] = []
        self.acked: set[int] = set()
        self._attempts: dict[int, int] = {}
        #: Of messages that were given back: what the last consumer said.
        self._errors: dict[int, str] = {}
        self._waiting: list[tuple[int, int]] = []
        #: Waiting messages that may have crashed their consumer.
        self._suspects: set[int] = set()
        #: Messages that came back untried since their last attempt.
        self._untried: set[int] = set()
        self._consumers: dict[str, _Consumer] = {}
        #: Of a broadcast: which process it is.
        self.instances = Instances()

    def agree(self, request: PullRequest) -> str:
        """Take over what a pull may change; returns what contradicts the group's settings, or nothing."""
        wanted = terms_of(request)
        if request.tags is not UNSET and (wanted.any_tags, wanted.all_tags) != (
            self.terms.any_tags,
            self.terms.all_tags,
        ):
            return "tags"
        if request.ordered is not UNSET and request.ordered is not self.terms.is_ordered:
            return "order"
        self.max_attempts = request.max_attempts
        if request.backoff is not UNSET:
            own = request.backoff
            self.backoff = replace(
                _BACKOFF, first_ms=own.first_ms, factor=own.factor, max_ms=own.max_ms
            )
        return ""

    def lag(self, records: Sequence[bytes]) -> int:
        """Messages for the group that are neither acked nor given up."""
        to_come = sum(self.terms.fits(record) for record in records[self.cursor :])
        return to_come + len(self.held) + len(self._waiting) + self.in_flight()

    def step(self, now_ms: int) -> int:
        """End the leases whose time is over; how many."""
        count = 0
        for consumer in self._consumers.values():
            ended = [p for p, lease in consumer.leases.items() if lease.until_ms <= now_ms]
            for pull_sequence in ended:
                lease = consumer.leases.pop(pull_sequence)
                self._give_back(lease, now_ms + self._backoff_ms(lease.attempt), "lease ended")
                if lease.attempt >= _SUSPECT_AFTER:
                    self._suspects.add(lease.sequence)
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
        is_alone = any(lease.is_alone for lease in consumer.leases.values())
        while len(sequences) < request.max_messages and not (self.is_paused or is_alone):
            sequence = self._next(now_ms, records)
            if sequence is None or (sequences and len(records[sequence]) > bytes_left):
                break
            is_alone = sequence in self._suspects
            if is_alone and sequences:
                break
            expires_at_ms = record_expires_at_ms(records[sequence])
            if expires_at_ms is not None and expires_at_ms <= now_ms:
                is_alone = False
                self._advance(sequence)
                self._bury(sequence, self._attempts.get(sequence, 0), EXPIRED, "")
                continue
            if (used := self._attempts.get(sequence, 0)) >= self.max_attempts:
                is_alone = False  # the number was lowered while it waited
                self._advance(sequence)
                self._bury(sequence, used, ATTEMPTS_USED_UP, self._errors.get(sequence, ""))
                continue
            bytes_left -= len(records[sequence])
            sequences.append(sequence)
            self._advance(sequence)
            self._attempts[sequence] = self._attempts.get(sequence, 0) + 1
            consumer.leases[consumer.next_pull_sequence] = _Lease(
                sequence=sequence,
                token=token,
                attempt=self._attempts[sequence],
                until_ms=now_ms + request.lease_ms,
                is_suspect=is_alone,
                is_alone=is_alone,
            )
            consumer.next_pull_sequence += 1
        if request.at_most_once is True:
            self._ack_all(consumer, first_pull_sequence, token)
        return HandOut(
            first_pull_sequence=first_pull_sequence,
            sequences=tuple(sequences),
            attempts=tuple(self._attempts[sequence] for sequence in sequences),
        )

    def seek(self, sequence: int) -> None:
        """Continue at this sequence; messages held or waiting are given up."""
        self.cursor = sequence
        self.held.clear()
        self._waiting.clear()
        self._suspects.clear()
        self._untried.clear()
        self._attempts.clear()
        for consumer in self._consumers.values():
            consumer.leases.clear()
        self.dead = [letter for letter in self.dead if letter.sequence < sequence]

    def replay(self, now_ms: int) -> int:
        """Deliver the dead letters again; how many."""
        letters, self.dead = self.dead, []
        self._untried.difference_update(letter.sequence for letter in letters)
        for letter in letters:
            self._attempts.pop(letter.sequence, None)
            if self.terms.is_ordered:
                self.held.append(letter.sequence)
            else:
                heapq.heappush(self._waiting, (now_ms, letter.sequence))
        return len(letters)

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
            case Nack():
                self._on_nack(lease, outcome, now_ms)
            case Reject(reason=reason):
                self._bury(lease.sequence, lease.attempt, REJECTED, reason)
            case Extend(lease_ms=lease_ms):
                lease.until_ms, lease.is_alone = now_ms + lease_ms, False
            case _:
                self.acked.add(lease.sequence)
                self._attempts.pop(lease.sequence, None)

    def _on_nack(self, lease: _Lease, nack: Nack, now_ms: int) -> None:
        wait_ms = self._backoff_ms(lease.attempt) if nack.delay_ms is None else nack.delay_ms
        if nack.was_begun is False:
            self._give_back_untried(lease, wait_ms, now_ms)
        else:
            self._give_back(lease, now_ms + wait_ms, nack.error)

    def _give_back_untried(self, lease: _Lease, wait_ms: int, now_ms: int) -> None:
        if lease.sequence in self._untried:
            wait_ms = max(wait_ms, _UNTRIED_WAIT_MS)
        self._untried.add(lease.sequence)
        self._attempts[lease.sequence] -= 1
        if lease.is_suspect:
            self._suspects.add(lease.sequence)
        heapq.heappush(self._waiting, (now_ms + wait_ms, lease.sequence))

    def _give_back(self, lease: _Lease, due_ms: int, error: str) -> None:
        self._untried.discard(lease.sequence)
        if lease.attempt >= self.max_attempts:
            self._bury(lease.sequence, lease.attempt, ATTEMPTS_USED_UP, error)
        else:
            self._errors[lease.sequence] = error
            heapq.heappush(self._waiting, (due_ms, lease.sequence))

    def _bury(self, sequence: int, attempts: int, reason: str, error: str) -> None:
        self.dead.append(
            MemoryDeadLetter(sequence=sequence, attempts=attempts, reason=reason, error=error)
        )

    def _ack_all(self, consumer: _Consumer, first_pull_sequence: int, token: int) -> None:
        for pull_sequence in range(first_pull_sequence, consumer.next_pull_sequence):
            lease = consumer.leases.pop(pull_sequence)
            consumer.acked.add((token, pull_sequence))
            self.acked.add(lease.sequence)

    def _backoff_ms(self, attempt: int) -> int:
        return self.backoff.delay_ms(attempt, 0.0)

    def _next(self, now_ms: int, records: Sequence[bytes]) -> int | None:
        if self._waiting and self._waiting[0][0] <= now_ms:
            return self._waiting[0][1]
        while self.cursor < len(records):
            if not self.terms.fits(records[self.cursor]):
                self.cursor += 1
            elif self.terms.is_ordered:
                self.held.append(self.cursor)
                self.cursor += 1
            else:
                return self.cursor
        return self._first_of_its_key(records)

    def _first_of_its_key(self, records: Sequence[bytes]) -> int | None:
        """The first held message with no earlier one of its key in progress."""
        out = [sequence for _, sequence in self._waiting]
        for consumer in self._consumers.values():
            out += [lease.sequence for lease in consumer.leases.values()]
        busy = {record_key(records[sequence]) for sequence in out} - {b""}
        return next((one for one in self.held if record_key(records[one]) not in busy), None)

    def _advance(self, sequence: int) -> None:
        self._suspects.discard(sequence)
        if self._waiting and self._waiting[0][1] == sequence:
            heapq.heappop(self._waiting)
        elif sequence in self.held:
            self.held.remove(sequence)
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


def _add_stale(stale: list[StaleRange], token: int, pull_sequence: int) -> None:
    if stale and stale[-1][0] == token and stale[-1][2] == pull_sequence:
        stale[-1] = (token, stale[-1][1], pull_sequence + 1)
    else:
        stale.append((token, pull_sequence, pull_sequence + 1))
