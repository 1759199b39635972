"""What people ask about a running broker: subjects, groups, dead letters, messages. Changes nothing."""

from __future__ import annotations

from typing import Final

import msgspec

from qmq_broker.errors import NotFoundError
from qmq_broker.service.delivery import Delivery
from qmq_broker.service.fates import GroupFate, fate_of
from qmq_broker.service.groups import GroupState
from qmq_broker.storage.consume_queue import Entry
from qmq_broker.storage.key_search import KeySearch
from qmq_broker.storage.store import Store

#: Rows of one listing; more are asked for by giving the next sequence.
LISTED_MAX: Final = 1_000
#: Bytes of records in one listing of messages.
LISTED_BYTES_MAX: Final = 4 * 1024 * 1024


class SubjectStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A subject and its durable range of sequences."""

    subject: str
    first_sequence: int
    next_sequence: int


class GroupStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How far a group has come on a subject."""

    subject: str
    group: str
    cursor: int
    #: Messages that were never given to the group.
    lag: int
    in_flight: int
    #: Messages that wait for their next delivery.
    redelivery: int
    dead: int
    consumers: int
    max_attempts: int
    #: Messages acked since the group began.
    acked: int
    #: Messages that were given up by force before the group was done with them.
    lost: int


class DeadLetterStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A message that its group does not get again."""

    subject: str
    group: str
    sequence: int
    attempts: int
    reason: str
    error: str
    at_ms: int


class Query:
    """Questions about one store and its groups. Belongs to the loop thread."""

    def __init__(self, store: Store, delivery: Delivery) -> None:
        self._store = store
        self._delivery = delivery

    def subjects(self) -> list[SubjectStatus]:
        """Every subject, by name."""
        found = [(name, self._store.queue(name)) for name in sorted(self._store.subjects())]
        return [
            SubjectStatus(
                subject=name,
                first_sequence=queue.first_sequence,
                next_sequence=queue.next_sequence,
            )
            for name, queue in found
            if queue is not None
        ]

    def groups(self, *, subject: str | None = None, group: str | None = None) -> list[GroupStatus]:
        """Every group, or those of one subject or name."""
        return [
            self._status(state)
            for state in sorted(self._delivery.groups(), key=lambda one: (one.subject, one.group))
            if subject in (None, state.subject) and group in (None, state.group)
        ]

    def dead_letters(
        self, subject: str, group: str, *, first_sequence: int = 0, count: int = LISTED_MAX
    ) -> list[DeadLetterStatus]:
        """Dead letters of one group by sequence; raises `NotFoundError`."""
        state = self._delivery.group(subject, group)
        if state is None:
            raise NotFoundError(f"there is no group {group} on subject {subject}")
        sequences = sorted(sequence for sequence in state.dead if sequence >= first_sequence)
        return [
            DeadLetterStatus(
                subject=subject,
                group=group,
                sequence=letter.sequence,
                attempts=letter.attempts,
                reason=letter.reason,
                error=letter.error,
                at_ms=letter.at_ms,
            )
            for letter in map(state.dead.__getitem__, sequences[: min(count, LISTED_MAX)])
        ]

    def records(self, subject: str, *, first_sequence: int, count: int) -> list[tuple[int, bytes]]:
        """Sequence and encoded record of messages as they are stored; raises `NotFoundError`."""
        queue = self._store.queue(subject)
        if queue is None:
            raise NotFoundError(f"there is no subject {subject}")
        first_sequence = max(first_sequence, queue.first_sequence)
        room_bytes = LISTED_BYTES_MAX
        entries: dict[int, Entry] = {}
        found = queue.entries(first_sequence, min(count, LISTED_MAX))
        for sequence, entry in enumerate(found, start=first_sequence):
            room_bytes -= entry.record_bytes
            if room_bytes < 0 and entries:
                break
            if entry.record_bytes:  # none is lost, see storage/lost.py
                entries[sequence] = entry
        records = self._store.read_records(list(entries.values()), subject=subject)
        return list(zip(entries, records, strict=True))

    @property
    def search(self) -> KeySearch:
        """Messages by id or key; reads the disk, so in another thread than the loop's."""
        return self._store.search

    def fates(self, subject: str, sequence: int) -> list[GroupFate]:
        """What became of one message in each group of its subject, by the group's name."""
        states = [state for state in self._delivery.groups() if state.subject == subject]
        states.sort(key=lambda state: state.group)
        return [fate_of(state, sequence) for state in states[:LISTED_MAX]]

    def _status(self, state: GroupState) -> GroupStatus:
        queue = self._store.queue(state.subject)
        return GroupStatus(
            subject=state.subject,
            group=state.group,
            cursor=state.cursor,
            lag=0 if queue is None else max(0, queue.next_sequence - state.cursor),
            in_flight=state.in_flight,
            redelivery=state.waiting,
            dead=len(state.dead),
            consumers=state.consumer_count,
            max_attempts=state.max_attempts,
            acked=state.acked_count,
            lost=state.lost_count,
        )
