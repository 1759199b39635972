"""Answers about a running broker: subjects, groups, dead letters, messages. Read-only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from qmq_broker.errors import CorruptionError, NotFoundError
from qmq_broker.service.copy_search import CopySearch
from qmq_broker.service.delivery.bodies import group_queue, read_messages
from qmq_broker.service.delivery.delivery import Delivery
from qmq_broker.service.delivery.fates import GroupFate, PastAttempt, fate_of, past
from qmq_broker.service.delivery.groups import GroupState
from qmq_broker.service.trace import Trace, trace
from qmq_broker.storage.index.key_search import KeySearch
from qmq_broker.storage.queues.consume_queue import Entry
from qmq_broker.storage.store import Store
from qmq_client.wire.names import OWN_PREFIX
from qmq_client.wire.record_parts import record_made_at_ms
from qmq_client.wire.requests import Backoff, Tags

#: Rows of one listing; pass the next sequence to get more.
LISTED_MAX: Final = 1_000
#: Bytes of records in one listing of messages.
LISTED_BYTES_MAX: Final = 4 * 1024 * 1024
#: A consumer that holds nothing and asked for nothing for this long is not counted: more than two
#: waits of the longest pull.
SEEN_MS: Final = 120_000


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
    #: Messages that wait for their next delivery …
    redelivery: int
    #: … and those of them that are set aside because it is far off.
    set_aside: int
    dead: int
    #: Consumers that hold messages, or got some and asked for more lately.
    consumers: int
    max_attempts: int
    #: Messages acked since the group began.
    acked: int
    #: Messages that were given up by force before the group was done with them.
    lost: int
    #: Messages that expired before they were delivered.
    expired: int
    #: The time since the oldest undelivered message was made, or was due. None if there is none, or
    #: if its record was not read because many groups were asked for.
    lag_s: float | None
    #: Messages that wait for an earlier one with the same key.
    held: int
    is_paused: bool
    ordered: bool
    tags: Tags
    #: None for the broker's default.
    backoff: Backoff | None
    #: For a broadcast consumer: how long after its last sign of life it ends; 0 for never.
    idle_ms: int


class Peeked(NamedTuple):
    """Messages of a subject, read without a group."""

    #: Sequence and encoded record. A sequence that is left out is that of a lost message.
    records: list[tuple[int, bytes]]
    #: Where the next call goes on.
    next_sequence: int


class Held(NamedTuple):
    """What the store holds, in numbers."""

    first_offset: int
    durable_offset: int
    segments: int
    durable_actions_offset: int
    action_segments: int
    #: Message ids by which repeats are recognized.
    remembered_ids: int
    free_bytes: int
    #: The stamp of the last message; stamps never go back.
    last_stored_at_ms: int


class DeadLetterStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A message that its group does not get again."""

    subject: str
    group: str
    sequence: int
    attempts: int
    reason: str
    error: str
    at_ms: int
    #: The attempts, newest last.
    history: tuple[PastAttempt, ...]
    #: The message itself, if it was asked for and still exists.
    record: bytes | None = None


class Query:
    """Queries on one store and its groups. Belongs to the loop thread."""

    def __init__(self, store: Store, delivery: Delivery) -> None:
        self._store = store
        self._delivery = delivery
        #: Messages of which only copies are left.
        self.copies = CopySearch(store, delivery)

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
            if queue is not None and not name.startswith(OWN_PREFIX)
        ]

    def subjects_count(self) -> int:
        """How many subjects there are, not counting the broker's own."""
        return sum(not name.startswith(OWN_PREFIX) for name in self._store.subjects())

    def groups_count(self) -> int:
        """How many groups there are, not counting the broker's own."""
        groups = self._delivery.registry
        return sum(not group.state.subject.startswith(OWN_PREFIX) for group in groups)

    def held(self) -> Held:
        """What is on the disk; asks the file system for its free space."""
        store, actions = self._store, self._store.actions.log
        return Held(
            first_offset=store.first_offset,
            durable_offset=store.durable_offset,
            segments=store.segments,
            durable_actions_offset=actions.durable_offset,
            action_segments=len(actions.bases()),
            remembered_ids=store.remembered_ids,
            free_bytes=store.free_bytes(),
            last_stored_at_ms=store.last_stored_at_ms,
        )

    def groups(
        self,
        *,
        subject: str | None = None,
        group: str | None = None,
        now_ms: int = 0,
        count: int | None = None,
    ) -> list[GroupStatus]:
        """Every group, or those of one subject or name, or the first `count` of them.

        Ages are measured at `now_ms`.
        """
        states = [
            state
            for state in sorted(self._delivery.groups(), key=lambda one: (one.subject, one.group))
            if subject in (None, state.subject)
            and group in (None, state.group)
            and not state.subject.startswith(OWN_PREFIX)
        ]
        room_bytes = LISTED_BYTES_MAX
        listed: list[GroupStatus] = []
        for number, state in enumerate(states[:count]):
            if number >= LISTED_MAX:
                room_bytes = 0
            made_at_ms, read_bytes = self._oldest(state, room_bytes)
            room_bytes -= read_bytes
            listed.append(self._status(state, made_at_ms, now_ms))
        return listed

    def dead_letters(
        self,
        subject: str,
        group: str,
        *,
        first_sequence: int = 0,
        count: int = LISTED_MAX,
        with_records: bool = False,
    ) -> list[DeadLetterStatus]:
        """Dead letters of one group by sequence, optionally with their messages.

        Raises `NotFoundError`. Messages are read up to `LISTED_BYTES_MAX`.
        """
        state = self._delivery.group(subject, group)
        if state is None:
            raise NotFoundError(f"there is no group {group} on subject {subject}")
        sequences = state.dead_between(first_sequence, 2**63, min(count, LISTED_MAX))
        records = self._some_records(state, sequences) if with_records else {}
        return [
            DeadLetterStatus(
                subject=subject,
                group=group,
                sequence=letter.sequence,
                attempts=letter.attempts,
                reason=letter.reason,
                error=letter.error,
                at_ms=letter.at_ms,
                history=past(letter.history),
                record=records.get(letter.sequence),
            )
            for letter in map(state.dead.__getitem__, sequences)
        ]

    def records(self, subject: str, *, first_sequence: int, count: int) -> Peeked:
        """Up to `count` stored messages, skipping lost ones; raises `NotFoundError`."""
        queue = self._store.queue(subject)
        if queue is None:
            raise NotFoundError(f"there is no subject {subject}")
        first_sequence = max(first_sequence, queue.first_sequence)
        room_bytes = LISTED_BYTES_MAX
        entries: dict[int, Entry] = {}
        next_sequence = first_sequence
        found = queue.entries(first_sequence, LISTED_MAX)
        for sequence, entry in enumerate(found, start=first_sequence):
            room_bytes -= entry.record_bytes
            if len(entries) == count or (room_bytes < 0 and entries):
                break
            if entry.record_bytes:  # not a lost one, see storage/logs/lost.py
                entries[sequence] = entry
            next_sequence = sequence + 1
        records = self._store.read_records(list(entries.values()), subject=subject)
        return Peeked(list(zip(entries, records, strict=True)), next_sequence)

    @property
    def search(self) -> KeySearch:
        """Find messages by id or key. Reads the disk: call it in another thread than the loop's."""
        return self._store.search

    def trace(self, subject: str, sequence: int, stored_at_ms: int) -> Trace:
        """What happened to one message in the groups of its subject.

        Reads the disk, like `search`.
        """
        return trace(self._store.actions, subject, sequence, stored_at_ms)

    def fates(self, subject: str, sequence: int, record: bytes, now_ms: int) -> list[GroupFate]:
        """What became of one message in each group of its subject, by group name, and why."""
        groups = [one for one in self._delivery.registry if one.state.subject == subject]
        groups.sort(key=lambda one: one.state.group)
        return [fate_of(one, sequence, record, now_ms) for one in groups[:LISTED_MAX]]

    def _some_records(self, state: GroupState, sequences: Sequence[int]) -> dict[int, bytes]:
        """Records that still exist, by sequence, as many as fit."""
        queue = group_queue(self._store, state)
        entries: dict[int, Entry] = {}
        room_bytes = LISTED_BYTES_MAX
        for sequence in sequences if queue is not None else ():
            entry = None if queue is None else next(iter(queue.entries(sequence, 1)), None)
            if entry is None or not entry.record_bytes:
                continue
            room_bytes -= entry.record_bytes
            if room_bytes < 0 and entries:
                break
            entries[sequence] = entry
        records = read_messages(self._store, state, list(entries.values()))
        return dict(zip(entries, records, strict=True))

    def _oldest(self, state: GroupState, room_bytes: int) -> tuple[int | None, int]:
        """When the oldest undelivered message was made, and how many bytes that took to read."""
        queue = self._store.queue(state.subject)
        first = state.cursor
        if state.lanes is not None and state.held:
            first = min((one for one, _ in state.lanes.sequences()), default=first)
        if queue is None or first >= queue.next_sequence:
            return None, 0
        entry = next(iter(queue.entries(max(first, queue.first_sequence), 1)), None)
        if entry is None or not 0 < entry.record_bytes <= room_bytes:
            return None, 0
        try:
            (record,) = self._store.read_records([entry], subject=state.subject)
        except CorruptionError:  # whoever pulls it is told; a listing goes on
            return None, entry.record_bytes
        return record_made_at_ms(record), entry.record_bytes

    def _status(self, state: GroupState, oldest_made_at_ms: int | None, now_ms: int) -> GroupStatus:
        queue = self._store.queue(state.subject)
        behind = 0 if queue is None else max(0, queue.next_sequence - state.cursor)
        settings, own = state.settings, state.settings.backoff
        lag_s = None if oldest_made_at_ms is None else max(0, now_ms - oldest_made_at_ms) / 1000
        return GroupStatus(
            subject=state.subject,
            group=state.group,
            cursor=state.cursor,
            lag=behind + state.held,
            in_flight=state.in_flight,
            redelivery=state.waiting,
            set_aside=state.aside.count,
            dead=len(state.dead),
            consumers=sum(log.is_there(now_ms - SEEN_MS) for _, log in state.consumers()),
            max_attempts=state.max_attempts,
            acked=state.acked_count,
            lost=state.lost_count,
            expired=state.expired_count,
            lag_s=lag_s if behind + state.held else None,
            held=state.held,
            is_paused=state.is_paused,
            ordered=settings.is_ordered,
            tags=Tags(any=settings.any_tags, all=settings.all_tags),
            backoff=None
            if own is None
            else Backoff(first_ms=own.first_ms, factor=own.factor, max_ms=own.max_ms),
            idle_ms=settings.idle_ms,
        )
