"""Answers about a running broker: subjects, groups, dead letters, messages. Read-only.

`CopySearch` finds a message of which only copies for long retries are left, because retention deleted
the original. A copy has an id of its own, so the copies themselves are read: those that wait among
the delayed messages, and released ones that their group has not settled. Reading the disk happens
outside the loop; the groups are read before and after, in the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from qmq_broker.errors import CorruptionError, no_group, no_subject
from qmq_broker.service.delivery.bodies import group_queue, read_messages
from qmq_broker.service.delivery.delivery import Delivery
from qmq_broker.service.delivery.in_group import MessageInGroup, PastAttempt, in_group, past
from qmq_broker.service.intake import Intake
from qmq_broker.service.trace import Trace, trace
from qmq_broker.storage.index.key_search import FoundRecord, KeySearch
from qmq_broker.storage.logs.copies import Copy, unpack_copy
from qmq_broker.storage.schedule.columns import Columns
from qmq_broker.storage.schedule.states import DelayedState
from qmq_broker.storage.store import Store
from qmq_client.group.queue import Entry
from qmq_client.group.state import GroupState
from qmq_client.wire.errors import ProtocolError
from qmq_client.wire.names import COPIES, OWN_PREFIX
from qmq_client.wire.record import decode_record, record_message_id
from qmq_client.wire.record_parts import record_made_at_ms
from qmq_client.wire.requests import Backoff, Tags

#: Rows of one listing; pass the next sequence to get more.
LISTED_MAX: Final = 1_000
#: Bytes of records in one listing of messages.
LISTED_BYTES_MAX: Final = 4 * 1024 * 1024
#: A consumer that holds no messages and did not pull for this long is not counted: more than two of the longest waits.
SEEN_MS: Final = 120_000


class SubjectStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A subject and its durable range of sequences."""

    subject: str
    first_sequence: int
    next_sequence: int
    #: Delayed messages that wait for their due time; they have no sequence yet.
    delayed: int = 0


class GroupStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The position and counts of a group on a subject."""

    subject: str
    group: str
    cursor: int
    #: Messages that were never delivered to the group.
    lag: int
    in_flight: int
    #: Messages that wait for their next delivery …
    redelivery: int
    #: … and those of them that wait for a long retry, kept as copies.
    long_retries: int
    dead: int
    #: Consumers that hold messages or pulled recently.
    consumers: int
    max_attempts: int
    #: Messages acked since the group began.
    acked: int
    #: Messages that were deleted by force before the group settled them.
    lost: int
    #: Messages that expired before they were delivered.
    expired: int
    #: Time since the oldest undelivered message was made or became due. None if there is none, or
    #: if its record was not read because the listing has many groups.
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
    """Messages of a subject that were read without a group."""

    #: Sequence and encoded record. A sequence that is left out is that of a lost message.
    records: list[tuple[int, bytes]]
    #: Where the next call continues.
    next_sequence: int


class Held(NamedTuple):
    """Figures of the store's content."""

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
    """A message that its group gave up."""

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

    def __init__(self, store: Store, delivery: Delivery, intake: Intake) -> None:
        self._store = store
        self._delivery = delivery
        self._intake = intake
        #: Searches for messages of which only copies are left.
        self.copies = CopySearch(store, delivery)

    def subjects(self) -> list[SubjectStatus]:
        """All subjects by name, including those with only delayed messages or with none left. For any thread."""
        delayed = self._store.schedule.pending_by_subject()
        found = [(name, self._store.queue(name)) for name in sorted(self._names(delayed))]
        return [
            SubjectStatus(
                subject=name,
                first_sequence=0 if queue is None else queue.first_sequence,
                next_sequence=0 if queue is None else queue.next_sequence,
                delayed=delayed.get(name, 0),
            )
            for name, queue in found
        ]

    def subjects_count(self) -> int:
        """How many subjects there are, not counting the broker's own."""
        return len(self._names(self._store.schedule.pending_by_subject()))

    def _names(self, delayed: Iterable[str]) -> set[str]:
        names = {*self._store.subjects(), *delayed, *self._intake.subjects()}
        return {name for name in names if not name.startswith(OWN_PREFIX)}

    def groups_count(self) -> int:
        """How many groups there are, not counting the broker's own."""
        groups = self._delivery.registry
        return sum(not group.state.subject.startswith(OWN_PREFIX) for group in groups)

    def held(self) -> Held:
        """Figures of the disk; asks the file system for its free space."""
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
        return list(self._statuses(states[:count], now_ms))

    def all_groups(self, now_ms: int) -> Iterator[GroupStatus]:
        """Like `groups`, one by one; other requests may be served in between."""
        groups = self._delivery.registry
        keys = [one.key for one in groups if not one.state.subject.startswith(OWN_PREFIX)]
        found = (groups.find(*key) for key in sorted(keys))
        return self._statuses((one.state for one in found if one is not None), now_ms)

    def _statuses(self, states: Iterable[GroupState], now_ms: int) -> Iterator[GroupStatus]:
        room_bytes = LISTED_BYTES_MAX
        for number, state in enumerate(states):
            if number >= LISTED_MAX:
                room_bytes = 0
            made_at_ms, read_bytes = self._oldest(state, room_bytes)
            room_bytes -= read_bytes
            yield self._status(state, made_at_ms, now_ms)

    def dead_letters(
        self,
        subject: str,
        group: str,
        *,
        first_sequence: int = 0,
        count: int = LISTED_MAX,
        records_bytes: int = 0,
    ) -> list[DeadLetterStatus]:
        """Dead letters of one group by sequence, optionally with their messages.

        Raises `NotFoundError`. Messages are read up to `records_bytes`, of which the first may be longer.
        """
        state = self._delivery.group(subject, group)
        if state is None:
            raise no_group(group, subject)
        sequences = state.dead_between(first_sequence, 2**63, min(count, LISTED_MAX))
        records = self._some_records(state, sequences, records_bytes) if records_bytes > 0 else {}
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
        if queue is None and self._has_none_yet(subject):
            return Peeked([], first_sequence)
        if queue is None:
            raise no_subject(subject)
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

    def _has_none_yet(self, subject: str) -> bool:
        """Whether the subject exists and all of its messages are delayed."""
        pending = self._store.schedule.pending_by_subject()
        return subject in pending or self._intake.knows(subject)

    @property
    def search(self) -> KeySearch:
        """Find messages by id or key. Reads the disk: call it in another thread than the loop's."""
        return self._store.search

    def trace(self, subject: str, sequence: int, stored_at_ms: int) -> Trace:
        """The history of one message in the groups of its subject.

        Reads the disk, like `search`.
        """
        return trace(self._store.actions, subject, sequence, stored_at_ms)

    def in_groups(
        self, subject: str, sequence: int, record: bytes, now_ms: int
    ) -> Iterator[MessageInGroup]:
        """The state of one message in each group of its subject, by group name, with the reason.

        For each group where it is a dead letter, a page may be read from the disk.
        """
        groups = [one for one in self._delivery.registry if one.state.subject == subject]
        groups.sort(key=lambda one: one.state.group)
        for one in groups[:LISTED_MAX]:
            yield in_group(one, sequence, record, now_ms)

    def _some_records(
        self, state: GroupState, sequences: Sequence[int], room_bytes: int
    ) -> dict[int, bytes]:
        """Records that still exist, by sequence, as many as fit."""
        queue = group_queue(self._store, state)
        entries: dict[int, Entry] = {}
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
        if state.by_key is not None and state.held:
            first = min((one for one, _ in state.by_key.sequences()), default=first)
        if queue is None or first >= queue.next_sequence:
            return None, 0
        entry = next(iter(queue.entries(max(first, queue.first_sequence), 1)), None)
        if entry is None or not 0 < entry.record_bytes <= room_bytes:
            return None, 0
        try:
            (record,) = self._store.read_records([entry], subject=state.subject)
        except CorruptionError:  # a pull that reads it fails; a listing continues
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
            long_retries=state.long_retries.count,
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


#: Bytes of copies that one search reads: about a second.
READ_BYTES_MAX: Final = 256 * 1024 * 1024


class Kept(NamedTuple):
    """The copies that groups hold at this moment."""

    #: Sequences, in the queue of copies, of those whose long retry has ended.
    released: tuple[int, ...]
    #: Whether any are still in a long retry.
    is_any_waiting: bool


class FoundCopy(NamedTuple):
    """A copy of the message that is searched."""

    copy: Copy
    found: FoundRecord
    #: Sequence in the queue of copies; None during the long retry.
    released: int | None


class CopySearch:
    """Searches over the copies of one broker; each method documents its thread."""

    def __init__(self, store: Store, delivery: Delivery) -> None:
        self._store = store
        self._delivery = delivery

    def kept(self) -> Kept | None:
        """The copies to search; None if there are none. In the loop."""
        known = [state.long_retries for state in self._delivery.groups()]
        ended = tuple(sorted({copy for one in known for copy in one.copies.values()}))
        is_any_waiting = any(one.count for one in known)
        return Kept(ended, is_any_waiting) if ended or is_any_waiting else None

    def by_id(self, message_id: bytes, kept: Kept) -> tuple[list[FoundCopy], bool]:
        """Copies of this message, and whether all copies were searched. In any thread.

        Damaged lists of delayed messages are skipped. Each copy has its place and the time the message was made.
        """
        found: list[FoundCopy] = []
        damage: list[CorruptionError] = []
        room_bytes = READ_BYTES_MAX
        for released, place, record in self._records(kept, damage.append):
            room_bytes -= len(record)
            if room_bytes < 0:
                return found, False
            try:
                copy = unpack_copy(record)
                if record_message_id(copy.record) != message_id:
                    continue
                born_at_ms = decode_record(copy.subject, copy.record).born_at_ms
            except (CorruptionError, ProtocolError):  # its group gets the message without the copy
                continue
            one = FoundRecord(copy.subject, copy.sequence, place, born_at_ms, copy.record)
            found.append(FoundCopy(copy, one, released))
        return found, not damage

    def still_kept(self, found: list[FoundCopy]) -> list[FoundRecord]:
        """Each message once, if its group still has the copy. In the loop."""
        messages: dict[tuple[str, int], FoundRecord] = {}
        for copy, record, released in found:
            state = self._delivery.group(copy.subject, copy.group)
            if state is None:
                continue
            known = state.long_retries
            has_ended = released is not None and known.copies.get(copy.sequence) == released
            if has_ended or known.is_in(copy.sequence, copy.retry_id):
                messages[copy.subject, copy.sequence] = record
        return list(messages.values())

    def _records(
        self, kept: Kept, on_damage: Callable[[CorruptionError], None]
    ) -> Iterator[tuple[int | None, int, bytes]]:
        """Sequence in the queue of copies if it was released, place, and record of each copy."""
        queue = self._store.queue(COPIES)
        for released in kept.released:
            entries = [] if queue is None else queue.entries(released, 1)
            try:
                for record in self._store.read_records(entries, subject=COPIES):
                    yield released, entries[0].physical_offset, record
            except CorruptionError:
                continue
        schedule = self._store.schedule
        for bucket, next_sequence, pending in schedule.states() if kept.is_any_waiting else ():
            if not pending:
                continue
            for columns in schedule.columns(bucket, 0, next_sequence, on_damage=on_damage):
                yield from self._waiting(columns, on_damage)

    def _waiting(
        self, columns: Columns, on_damage: Callable[[CorruptionError], None]
    ) -> Iterator[tuple[None, int, bytes]]:
        schedule = self._store.schedule
        try:
            states, number = schedule.states_of(columns.bucket), schedule.subjects.number(COPIES)
        except CorruptionError as error:
            on_damage(error)
            return
        if states is None:
            return
        indexes = [
            index
            for index, sequence in enumerate(columns.sequences)
            if columns.subjects[index] == number and states.get(sequence) is DelayedState.PENDING
        ]
        for index in indexes:
            record = schedule.records.read_all(columns.bucket, COPIES, columns, [index])[index]
            if isinstance(record, bytes):
                yield None, columns.sources[index], record
