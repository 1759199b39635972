"""Queries on delayed messages, for people and for commands that change them.

Finding a message reads the disk: call it outside the loop thread. There is no map by message id,
because millions may wait. Instead the columns of ids are scanned, at a few hundred megabytes a
second; if the due time is known, only those of one bucket.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import msgspec

from qmq_broker.errors import CorruptionError, StoreError, UnavailableError
from qmq_broker.service.delay.near import BUCKET_MS_MAX, latest_bucket_ms
from qmq_broker.service.delay.releasing import Releaser
from qmq_broker.storage.recovery import AHEAD_MS_MAX
from qmq_broker.storage.schedule.columns import Columns, DelayedMessage
from qmq_broker.storage.schedule.lists import OnDamage
from qmq_broker.storage.schedule.schedule import Schedule, marked_frame
from qmq_broker.storage.schedule.states import DelayedState
from qmq_client.clock import Clock
from qmq_client.wire.frame import FrameKind, MessageFrame
from qmq_client.wire.marks import Marks
from qmq_client.wire.message_id import format_message_id

#: Most rows of one listing.
LISTED_MAX: Final = 1_000
#: Most rows of one histogram; the last row then counts all the rest.
SPANS_MAX: Final = 10_000
SPANS_MS: Final = {"second": 1_000, "minute": 60_000, "hour": 3_600_000, "day": 86_400_000}


class DelayedStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One delayed message."""

    message_id: str
    subject: str
    due_at_ms: int
    #: `pending`, `released`, `cancelled` or `rescheduled`.
    state: str
    #: First millisecond of its bucket, and its sequence there.
    bucket: int
    sequence: int


class HistogramRow(msgspec.Struct, frozen=True, kw_only=True):
    """How many messages are due in a span of time."""

    first_ms: int
    count: int


@dataclass(kw_only=True, eq=False, repr=False)
class HeldError(StoreError):
    """The state of a message is unknown, because a damaged file may hide it. Nothing was changed."""

    #: The damage that may hide it.
    damage: CorruptionError
    remedy: str = (
        "Restore the file from a backup of the same store, run `qmq delayed retry`, and ask again. "
        "`qmq delayed status` shows what is held."
    )

    code = "held"
    text = "message {message_id} may be among the held messages: {damage}"


class DelayStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of all delayed messages."""

    #: Messages that wait for their time, in total and by subject.
    pending: int
    subjects: dict[str, int]
    #: Buckets with such messages.
    buckets: int
    #: Messages in memory: everything due before `loaded_until_ms`.
    loaded: int
    loaded_until_ms: int
    #: Messages in memory that were overdue at the start.
    overdue: int
    released: int
    passed_over: int
    #: Lateness at the commit in milliseconds, of messages that were not overdue at the start.
    late_p50_ms: int
    late_p99_ms: int
    late_max_ms: int
    #: The fault of the clock; empty without one.
    clock: str
    #: Upper bound of the messages that would have been released by now if the clock had not been
    #: changed; whole buckets are counted.
    clock_held: int
    #: How far the stored time of the last message is ahead of the clock; 0 if a minute or less.
    log_ahead_ms: int
    #: Messages that cannot be read now.
    damaged: int
    #: First milliseconds of buckets with damage.
    damaged_buckets: list[int]
    #: Messages that were found unreadable since the start, including those read later.
    damaged_total: int
    #: Reasons why buckets, parts of buckets or messages are held: file, position and damage. Only the
    #: first few.
    held: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A message and its state."""

    message: DelayedMessage
    state: DelayedState


class DelayQuery:
    """Queries on the delayed messages of one broker. Changes nothing."""

    def __init__(self, schedule: Schedule, releaser: Releaser, clock: Clock) -> None:
        self._schedule = schedule
        self._clock = clock
        self._releaser = releaser

    def status(self) -> DelayStatus:
        """All counts. Reads no file."""
        releaser = self._releaser
        counts, near, held = releaser.counts, releaser.near, releaser.damage.reasons()
        subjects = self._schedule.pending_by_subject()
        ahead_ms = self._schedule.stored_at_ms - self._clock.now_ms()
        log_ahead_ms = ahead_ms if ahead_ms > AHEAD_MS_MAX else 0
        return DelayStatus(
            pending=sum(subjects.values()),
            subjects=dict(sorted(subjects.items())),
            buckets=sum(1 for _, _, pending in self._schedule.states() if pending),
            loaded=near.loaded,
            loaded_until_ms=near.loaded_until_ms,
            overdue=near.overdue,
            released=counts.released,
            passed_over=counts.passed_over,
            late_p50_ms=counts.late_quantile_ms(0.5),
            late_p99_ms=counts.late_quantile_ms(0.99),
            late_max_ms=counts.late_max_ms,
            clock=releaser.time.alarm or _ahead_text(log_ahead_ms),
            clock_held=self.clock_held(),
            log_ahead_ms=log_ahead_ms,
            damaged=counts.damaged,
            damaged_buckets=sorted(held),
            damaged_total=counts.damaged_total,
            held=releaser.damage.texts(),
        )

    def clock_held(self) -> int:
        """How many messages are held because the clock was changed; see `DelayStatus`."""
        time = self._releaser.time
        if not time.alarm:
            return 0
        states = self._schedule.states()
        return sum(pending for bucket, _, pending in states if bucket <= time.latest_ms)

    def find(self, message_id: bytes, *, due_at_ms: int | None = None) -> list[Found]:
        """All places of a message in the schedule, newest last.

        Raises `HeldError` if damage may hide one.
        """
        found = self.find_all([message_id], due_at_ms=due_at_ms)[message_id]
        if isinstance(found, HeldError):
            raise found
        return found

    def find_all(
        self, message_ids: Iterable[bytes], *, due_at_ms: int | None = None
    ) -> dict[bytes, list[Found] | HeldError]:
        """`find` for many messages, in one pass over the schedule; errors are returned by id."""
        places: dict[bytes, list[Found]] = {message_id: [] for message_id in message_ids}
        #: Damage that may hide any message, and damage that hides a known one.
        damage: list[CorruptionError] = []
        hidden: dict[bytes, CorruptionError] = {}
        for columns in self._columns(due_at_ms, due_at_ms, damage.append):
            for message_id, index in columns.find_ids(places):
                try:
                    places[message_id].append(self._found(columns, index))
                except CorruptionError as error:
                    hidden[message_id] = error
        found: dict[bytes, list[Found] | HeldError] = {}
        for message_id, some in places.items():
            why = hidden.get(message_id, damage[0] if damage else None)
            if why is not None and all(one.state is DelayedState.RESCHEDULED for one in some):
                found[message_id] = HeldError(message_id=format_message_id(message_id), damage=why)
            else:
                found[message_id] = sorted(some, key=lambda one: one.message.source)
        return found

    def listed(
        self, subject: str | None, first_ms: int, next_ms: int, count: int
    ) -> list[DelayedStatus]:
        """Pending messages ordered by due time, from `first_ms` to before `next_ms`."""
        count = min(count, LISTED_MAX)
        rows = heapq.nsmallest(
            count,
            self._pending(subject, first_ms, next_ms),
            key=lambda row: (row[0], row[1].bucket, row[1].sequences[row[2]]),
        )
        return [self.shown(self._found(columns, index)) for _, columns, index in rows]

    def histogram(
        self, subject: str | None, first_ms: int, next_ms: int, span: str
    ) -> list[HistogramRow]:
        """Pending messages by span of their due times; empty spans are left out."""
        span_ms = SPANS_MS[span]
        counts: dict[int, int] = {}
        for due_ms, _, _ in self._pending(subject, first_ms, next_ms):
            first = due_ms - due_ms % span_ms
            counts[first] = counts.get(first, 0) + 1
        rows = sorted(counts.items())
        if len(rows) > SPANS_MAX:
            rows[SPANS_MAX - 1 :] = [
                (rows[SPANS_MAX - 1][0], sum(n for _, n in rows[SPANS_MAX - 1 :]))
            ]
        return [HistogramRow(first_ms=first, count=count) for first, count in rows]

    def record(self, message: DelayedMessage) -> bytes:
        """The record of a message; raises `CorruptionError`."""
        return self._schedule.read(message)

    def rescheduled_frame(self, message: DelayedMessage, due_at_ms: int) -> MessageFrame:
        """The frame that gives a message another due time; raises `CorruptionError`."""
        marks = Marks(
            buckets=[message.bucket],
            sequences=[message.sequence],
            sources=[message.source],
            due_at_ms=[due_at_ms],
        )
        records = {message.subject: [self.record(message)]}
        return marked_frame(FrameKind.RESCHEDULED, records, marks)

    def state(self, message: DelayedMessage) -> DelayedState:
        """The present state of a message."""
        states = self._schedule.states_of(message.bucket)
        return DelayedState.RELEASED if states is None else states.get(message.sequence)

    def shown(self, found: Found) -> DelayedStatus:
        """The status of a message, as routes and commands show it."""
        message = found.message
        return DelayedStatus(
            message_id=format_message_id(message.message_id),
            subject=message.subject,
            due_at_ms=message.due_at_ms,
            state=found.state.name.lower(),
            bucket=message.bucket,
            sequence=message.sequence,
        )

    def _found(self, columns: Columns, index: int) -> Found:
        message = columns.message(index, self._schedule.subjects)
        return Found(message=message, state=self.state(message))

    def _columns(
        self, first_ms: int | None, last_ms: int | None, on_damage: OnDamage
    ) -> Iterator[Columns]:
        """The columns of all buckets that may hold due times from `first_ms` to `last_ms`."""
        for bucket, next_sequence, _ in self._schedule.states():
            if self._releaser.is_stopped:  # the result is not needed, and the scan delays the stop
                raise UnavailableError(
                    "delayed messages are not searched: the broker is draining",
                    state="draining",
                    retry_after_s=2.0,
                )
            is_before = first_ms is not None and bucket + BUCKET_MS_MAX <= first_ms
            is_behind = last_ms is not None and bucket > latest_bucket_ms(self._schedule, last_ms)
            if not (is_before or is_behind):
                yield from self._schedule.columns(bucket, 0, next_sequence, on_damage=on_damage)

    def _pending(
        self, subject: str | None, first_ms: int, next_ms: int
    ) -> Iterator[tuple[int, Columns, int]]:
        """Due time and place of each pending message; skips damage, which the status reports."""
        names = self._schedule.subjects.names
        for columns in self._columns(first_ms, None, lambda _: None):
            states = None
            with suppress(CorruptionError):
                states = self._schedule.states_of(columns.bucket)
            if states is None:
                continue
            for index, due_ms in enumerate(columns.due_at_ms):
                if not first_ms <= due_ms < next_ms:
                    continue
                if subject is not None and names[columns.subjects[index]] != subject:
                    continue
                if states.get(columns.sequences[index]) is DelayedState.PENDING:
                    yield due_ms, columns, index


def _ahead_text(log_ahead_ms: int) -> str:
    if not log_ahead_ms:
        return ""
    return (
        f"the log is ahead of the clock by {log_ahead_ms} ms: the clock was wrong when a message was stored, or is "
        "wrong now. Delayed messages are released on time. Until the clock reaches the log's time, "
        "new messages are stored with that time, and retention deletes none by age"
    )
