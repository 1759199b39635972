"""A history laid out for questions: events by kind, messages with their fate, deliveries by group.

Built once in one pass per kind; the oracles only read it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from operator import attrgetter
from typing import TypeVar, cast

from tests.kit.events import (
    SEQUENCE_UNKNOWN,
    Accepted,
    Acked,
    AckUnknown,
    AnyEvent,
    Attempt,
    Commit,
    DeadLetter,
    Delivered,
    Effect,
    Event,
    LeaseExpired,
    Nacked,
    OwnerWrite,
    Parked,
    Rollback,
    Stored,
    Truth,
)
from tests.kit.excuses import CRASHES, FaultTimeline, Settlements
from tests.kit.expectations import Group, Promises

E = TypeVar("E", bound=Event)
K = TypeVar("K", bound=Hashable)

Sighting = Stored | Accepted | Delivered
#: Group and message id.
Copy = tuple[str, str]


class Fate(Enum):
    """What became of a message's transaction."""

    COMMITTED = "committed"  # owed to the log and to every group
    UNDONE = "undone"  # must never be seen
    UNSETTLED = "unsettled"  # nobody said; the history lacks the truth
    FREE = "free"  # neither owed nor forbidden: sent outside a transaction and never seen


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """One message as the generator sent it, and its fate."""

    #: All attempts to send it; an application that repeats its transaction may repeat the id.
    attempts: tuple[Attempt, ...]
    fate: Fate
    #: The attempt whose transaction decided the fate.
    attempt: Attempt
    #: When its commit was certainly over; None when nobody saw it.
    committed_ns: int | None
    #: Count of messages attempted before it, in order of time.
    position: int


@dataclass
class Ledger:
    """The indexed history of one run and what it is judged by.

    Requires: `events` in order of time. Everything is computed when first asked for.
    """

    events: Sequence[AnyEvent]
    groups: Mapping[str, Group]
    promises: Promises
    _by_kind: dict[type[Event], list[Event]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        by_kind: dict[type[Event], list[Event]] = defaultdict(list)
        for event in self.events:
            by_kind[type(event)].append(event)
        self._by_kind = dict(by_kind)

    def of(self, kind: type[E]) -> list[E]:
        """All events of one kind in order of time."""
        return cast("list[E]", self._by_kind.get(kind, []))

    @cached_property
    def faults(self) -> FaultTimeline:
        """The faults and limits of the run."""
        return FaultTimeline.of(self.events, grace_ms=self.promises.error_grace_ms)

    @cached_property
    def committed_at(self) -> dict[str, Commit]:
        """Commits the application saw, by transaction."""
        return {event.transaction_id: event for event in self.of(Commit)}

    @cached_property
    def rolled_back_at(self) -> dict[str, Rollback]:
        """Rollbacks the application saw, by transaction."""
        return {event.transaction_id: event for event in self.of(Rollback)}

    @cached_property
    def truth(self) -> dict[str, Truth]:
        """What the business table said at the end, by transaction."""
        return {event.transaction_id: event for event in self.of(Truth)}

    def outcome(self, transaction_id: str) -> Fate:
        """Fate of a transaction; a commit the database forgot frees its messages (a LOST finding)."""
        truth = self.truth.get(transaction_id)
        is_seen_committed = transaction_id in self.committed_at
        if truth is None:
            if is_seen_committed:
                return Fate.COMMITTED
            return Fate.UNDONE if transaction_id in self.rolled_back_at else Fate.UNSETTLED
        if truth.is_committed:
            return Fate.COMMITTED
        return Fate.FREE if is_seen_committed else Fate.UNDONE

    @cached_property
    def sent(self) -> dict[str, Sent]:
        """Every attempted message by id, in order of the first attempt."""
        attempts = grouped(self.of(Attempt), attrgetter("message_id"))
        seen = self.accepted.keys() | self.stored.keys() | {copy[1] for copy in self.deliveries}
        return {
            message_id: self._sent(tuple(tries), position, is_seen=message_id in seen)
            for position, (message_id, tries) in enumerate(attempts.items())
        }

    def _sent(self, tries: tuple[Attempt, ...], position: int, *, is_seen: bool) -> Sent:
        fate, deciding = Fate.UNDONE, tries[0]
        for attempt in tries:
            if attempt.transaction_id:
                one = self.outcome(attempt.transaction_id)
            else:
                one = Fate.COMMITTED if is_seen else Fate.FREE
            if _WEIGHT[one] > _WEIGHT[fate]:
                fate, deciding = one, attempt
        commit = self.committed_at.get(deciding.transaction_id)
        return Sent(
            attempts=tries,
            fate=fate,
            attempt=deciding,
            committed_ns=None if commit is None else commit.at_ns,
            position=position,
        )

    @cached_property
    def owed(self) -> list[Sent]:
        """Committed messages in order of their attempts, without parked ones."""
        parked = {event.message_id for event in self.of(Parked)}
        return [
            sent
            for message_id, sent in self.sent.items()
            if sent.fate is Fate.COMMITTED and message_id not in parked
        ]

    @cached_property
    def accepted(self) -> dict[str, list[Accepted]]:
        """Answers of the broker by message id."""
        return grouped(self.of(Accepted), attrgetter("message_id"))

    @cached_property
    def stored(self) -> dict[str, list[Stored]]:
        """Entries of the consume queues by message id; an entry read twice counts once."""
        entries = {(e.subject, e.sequence, e.message_id): e for e in self.of(Stored)}
        return grouped(entries.values(), attrgetter("message_id"))

    @cached_property
    def deliveries(self) -> dict[Copy, list[Delivered]]:
        """Deliveries by group and message id."""
        return grouped(self.of(Delivered), _copy)

    @cached_property
    def acked(self) -> dict[Copy, list[Acked]]:
        """Confirmed acknowledgements by group and message id."""
        return grouped(self.of(Acked), _copy)

    @cached_property
    def ack_unknown(self) -> dict[Copy, list[AckUnknown]]:
        """Unanswered acknowledgements by group and message id."""
        return grouped(self.of(AckUnknown), _copy)

    @cached_property
    def _nacked(self) -> dict[Copy, list[Nacked]]:
        return grouped(self.of(Nacked), _copy)

    @cached_property
    def _expired(self) -> dict[Copy, list[LeaseExpired]]:
        return grouped(self.of(LeaseExpired), _copy)

    @cached_property
    def dead(self) -> set[Copy]:
        """Dead letters by group and message id."""
        return {_copy(event) for event in self.of(DeadLetter)}

    @cached_property
    def last_given_ns(self) -> dict[Copy, int]:
        """When dead letters were given for the last time, as far as that was seen at the broker."""
        seen = [event for event in self.of(DeadLetter) if event.last_given_ns]
        return {_copy(event): event.last_given_ns for event in seen}

    @cached_property
    def effects(self) -> dict[Copy, list[Effect]]:
        """Rows of the business tables by group and message id."""
        return grouped(self.of(Effect), _copy)

    @cached_property
    def owner_writes(self) -> dict[str, list[OwnerWrite]]:
        """Fenced statements by message id."""
        return grouped(self.of(OwnerWrite), attrgetter("message_id"))

    def settlements(self, copy: Copy) -> Settlements:
        """What may excuse or forbid another delivery of this copy."""
        return Settlements(
            acked=self.acked.get(copy, ()),
            unknown=self.ack_unknown.get(copy, ()),
            nacked=self._nacked.get(copy, ()),
            expired=self._expired.get(copy, ()),
        )

    @cached_property
    def _broker_deaths(self) -> list[int]:
        spans = self.faults.against(self.promises.brokers, CRASHES)
        return sorted(span.begin_ns for span in spans)

    def broker_life(self, at_ns: int) -> int:
        """Number of the broker's life; attempts are comparable only within one."""
        return bisect_right(self._broker_deaths, at_ns)

    @cached_property
    def sightings(self) -> list[Sighting]:
        """Every proof that a message left the application for the broker; the log's word first."""
        return [*self.of(Stored), *self.of(Accepted), *self.of(Delivered)]

    @cached_property
    def first_sequence(self) -> dict[str, int]:
        """The lowest sequence at which a message was seen, by message id."""
        lowest: dict[str, int] = {}
        for event in self.sightings:
            if event.sequence != SEQUENCE_UNKNOWN:
                known = lowest.get(event.message_id, event.sequence)
                lowest[event.message_id] = min(known, event.sequence)
        return lowest


def grouped(events: Iterable[E], key_of: Callable[[E], K]) -> dict[K, list[E]]:
    """The events by key, keys in order of first appearance, events in their order."""
    by_key: defaultdict[K, list[E]] = defaultdict(list)
    for event in events:
        by_key[key_of(event)].append(event)
    return dict(by_key)


_WEIGHT = {Fate.UNDONE: 0, Fate.FREE: 1, Fate.UNSETTLED: 2, Fate.COMMITTED: 3}

_copy: Callable[[Event], Copy] = attrgetter("group", "message_id")
