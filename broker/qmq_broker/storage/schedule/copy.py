"""Bringing delayed messages to their files, and making them out of the files at a start.

::

    state/schedule    MessagePack of ScheduleTable and a checksum line

A copy adds to the schedule and dispatch logs of every bucket that has something new, each with one
sync, and then replaces the table: what the table does not say was never copied, and is cut and
derived from the commit log once more. So a message is copied once, by its source. Without a table the
files speak for themselves: a record whose source is not above the last one of its bucket is in it.
A bucket that is done with leaves the table first; then its files go.
"""

from __future__ import annotations

import logging
from array import array
from dataclasses import dataclass
from typing import Final

import msgspec

from qmq_broker.errors import CorruptionError, NoRoomError
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.small_file import read_file, replace_file, unseal
from qmq_broker.storage.schedule.bucket import (
    LOGS,
    Bucket,
    BucketState,
    ScheduleTable,
    is_over,
)
from qmq_broker.storage.schedule.columns import Columns
from qmq_broker.storage.schedule.files import dispatched_frames
from qmq_broker.storage.schedule.schedule import Schedule, marked_frame
from qmq_client.wire.frame import FrameKind
from qmq_client.wire.marks import Marks

_log = logging.getLogger(__name__)
#: Messages of one SCHEDULED frame, and bytes of their records; bounds what a reader holds at once.
FRAME_MESSAGES_MAX: Final = 4096
FRAME_BYTES_MAX: Final = 1024 * 1024
#: Messages and fates that stay in memory before they are copied; a start derives as many.
UNCOPIED_MAX: Final = 100_000
#: Buckets copied between two commits; each costs up to two syncs.
BUCKETS_PER_STEP: Final = 4
BUCKETS_PER_STEP_BEHIND: Final = 32
#: Steps without a try after one that had no room: the log does not fill up with it.
SKIPS_WITHOUT_ROOM: Final = 100


@dataclass(slots=True, kw_only=True)
class _Part:
    """What is copied of one bucket: all that was visible when the copy was begun."""

    bucket: Bucket
    messages: Columns
    fates: array[int]


@dataclass(slots=True, kw_only=True)
class _Copy:
    """A copy under way."""

    next_offset: int
    bucket_ms: int
    pending: dict[str, int]
    stored_at_ms: int
    left: list[_Part]
    #: What the table will say.
    states: dict[int, BucketState]
    over: list[int]


class ScheduleCopier:
    """Copies of one schedule; belongs to the writer thread."""

    def __init__(self, schedule: Schedule, *, epoch: int) -> None:
        """`epoch` is stamped on what is copied."""
        schedule.files.epoch = epoch
        self._schedule = schedule
        self._copy: _Copy | None = None
        self._last_over_ms = 0
        self._skips = 0

    @property
    def quiet_offset(self) -> int:
        """Below it, of the commit log, all that concerns delayed messages is in the files.

        That is further than the table says as long as nothing has come behind it.
        """
        schedule, is_busy = self._schedule, self._copy is not None or self._schedule.uncopied
        return schedule.copied_offset if is_busy else schedule.visible_offset

    def adopt_options(self) -> None:
        """Let new messages go to buckets as long as the options say.

        Those that are known already must be in the files: a replay gives them the same buckets.
        """
        schedule = self._schedule
        if schedule.bucket_ms != schedule.options.bucket_ms:
            self.copy_all()
            schedule.bucket_ms = schedule.options.bucket_ms
            self.copy_all()

    def step(self) -> bool:
        """Go on with a copy, or begin one when it is time for it; whether anything was done."""
        schedule = self._schedule
        if self._skips:
            self._skips -= 1
            return False
        if self._copy is None and not self._is_due():
            return False
        is_behind = schedule.uncopied > 2 * UNCOPIED_MAX
        try:
            self.copy_some(BUCKETS_PER_STEP_BEHIND if is_behind else BUCKETS_PER_STEP)
        except NoRoomError:
            self._skips = SKIPS_WITHOUT_ROOM
            raise
        return True

    def copy_all(self) -> None:
        """Bring everything visible to its files; durable on return."""
        while not self.copy_some(len(self._schedule.buckets) + 1):
            pass
        if self._schedule.uncopied or self._is_over():
            while not self.copy_some(len(self._schedule.buckets) + 1):
                pass

    def copy_some(self, buckets_max: int) -> bool:
        """Go on with the copy, or begin one, for at most so many buckets; whether it is finished."""
        if self._copy is None:
            self._copy = self._begin()
        copy = self._copy
        for _ in range(min(buckets_max, len(copy.left))):
            part = copy.left[-1]
            state = self._copy_bucket(part, copy.stored_at_ms)
            with self._schedule.lock:
                part.bucket.forget_waiting(state, len(part.fates))
                self._schedule.uncopied -= len(part.messages) + len(part.fates)
            copy.states[state.bucket] = state
            copy.left.pop()
        if copy.left:
            return False
        self._finish(copy)
        self._copy = None
        return True

    def _is_due(self) -> bool:
        schedule = self._schedule
        behind_bytes = schedule.visible_offset - schedule.copied_offset
        far_bytes = schedule.options.queue_flush_bytes
        if schedule.uncopied:  # a start reads all frames from there on
            far_bytes = min(far_bytes, schedule.options.checkpoint_bytes)
        is_far = behind_bytes >= far_bytes
        return is_far or schedule.uncopied >= UNCOPIED_MAX or self._is_over()

    def _is_over(self) -> bool:
        """Whether a bucket is done with; looked at once for each bucket length of the log's time."""
        schedule = self._schedule
        if schedule.stored_at_ms < self._last_over_ms + schedule.bucket_ms:
            return False
        self._last_over_ms = schedule.stored_at_ms
        with schedule.lock:
            return any(map(self._is_removable, schedule.buckets.values()))

    def _is_removable(self, bucket: Bucket) -> bool:
        schedule = self._schedule
        # A bucket may be of another length than those of today.
        longest_ms = max(schedule.bucket_ms, schedule.options.bucket_ms)
        grace_ms = schedule.options.bucket_grace_ms
        return is_over(bucket, longest_ms, schedule.stored_at_ms, grace_ms)

    def _begin(self) -> _Copy:
        schedule = self._schedule
        with schedule.lock:
            buckets = list(schedule.buckets.values())
            over = [one.bucket for one in buckets if self._is_removable(one)]
            return _Copy(
                next_offset=schedule.visible_offset,
                bucket_ms=schedule.bucket_ms,
                pending=dict(schedule.pending),
                stored_at_ms=schedule.stored_at_ms,
                left=[
                    _Part(
                        bucket=one,
                        messages=one.waiting.part(0, len(one.waiting)),
                        fates=one.undispatched[:],
                    )
                    for one in buckets
                    if not one.is_copied
                ],
                states={
                    one.bucket: one.copied
                    for one in buckets
                    if one.copied.schedule_bytes and one.bucket not in set(over)
                },
                over=over,
            )

    def _copy_bucket(self, part: _Part, stored_at_ms: int) -> BucketState:
        files, last = self._schedule.files, part.bucket.copied
        schedule_bytes, dispatch_bytes = last.schedule_bytes, last.dispatch_bytes
        last_source = last.last_source
        if part.messages:
            frames = [
                self._frame(part.messages, first, after)
                for first, after in _portions(part.messages)
            ]
            schedule_bytes = files.append(
                layout.SCHEDULE, last.bucket, schedule_bytes, frames, stored_at_ms=stored_at_ms
            )
            last_source = part.messages.sources[-1]
        if part.fates:
            dispatch_bytes = files.append(
                layout.DISPATCH,
                last.bucket,
                dispatch_bytes,
                dispatched_frames(part.fates),
                stored_at_ms=stored_at_ms,
            )
        return BucketState(
            last.bucket,
            last.next_sequence + len(part.messages),
            schedule_bytes,
            last_source,
            last.dispatched + len(part.fates),
            dispatch_bytes,
        )

    def _frame(self, messages: Columns, first: int, after: int) -> bytes:
        """Some messages as a SCHEDULED frame, their records read and verified."""
        schedule = self._schedule
        by_subject: dict[str, list[int]] = {}
        for index in range(first, after):
            subject = schedule.subjects.names[messages.subjects[index]]
            by_subject.setdefault(subject, []).append(index)
        order = [index for indexes in by_subject.values() for index in indexes]
        records = {
            subject: [schedule.read(messages.message(i, schedule.subjects)) for i in indexes]
            for subject, indexes in by_subject.items()
        }
        marks = Marks(
            sequences=[messages.sequences[index] for index in order],
            sources=[messages.sources[index] for index in order],
            due_at_ms=[messages.due_at_ms[index] for index in order],
            message_ids=b"".join([messages.message_id(index) for index in order]),
        )
        return marked_frame(FrameKind.SCHEDULED, records, marks).data

    def _finish(self, copy: _Copy) -> None:
        schedule = self._schedule
        write_table(schedule, copy.next_offset, copy.bucket_ms, copy.states, copy.pending)
        schedule.copied_offset = copy.next_offset
        with schedule.lock:
            for bucket in copy.over:
                del schedule.buckets[bucket]
        # A dispatch log goes durably after its schedule log: alone, that would be pending again.
        for log in LOGS:
            for bucket in copy.over:
                schedule.files.remove(log, bucket)
            for month in sorted({layout.bucket_directory(log, bucket) for bucket in copy.over}):
                if month.rpartition("/")[2] in schedule.disk.names(log):
                    schedule.disk.sync_directory(month)


def _portions(messages: Columns) -> list[tuple[int, int]]:
    """Messages in portions of one frame each: half open indexes."""
    portions, first, room_bytes = [], 0, FRAME_BYTES_MAX
    subjects: set[int] = set()
    for index, record_bytes in enumerate(messages.record_bytes):
        subjects.add(messages.subjects[index])
        is_full = index - first == FRAME_MESSAGES_MAX or len(subjects) > 1024
        if index > first and (is_full or record_bytes > room_bytes):
            portions.append((first, index))
            first, room_bytes = index, FRAME_BYTES_MAX
            subjects = {messages.subjects[index]}
        room_bytes -= record_bytes
    portions.append((first, len(messages)))
    return portions


def write_table(
    schedule: Schedule,
    copied_offset: int,
    bucket_ms: int,
    states: dict[int, BucketState],
    pending: dict[str, int],
) -> None:
    """Say what is in the files; durable on return."""
    table = ScheduleTable(
        store_id=schedule.store_id,
        copied_offset=copied_offset,
        bucket_ms=bucket_ms,
        buckets=tuple(states[bucket] for bucket in sorted(states)),
        pending=pending,
    )
    replace_file(schedule.disk, layout.SCHEDULE_TABLE, msgspec.msgpack.encode(table))


def read_table(schedule: Schedule) -> ScheduleTable | None:
    """What the table says; None for one that is missing, damaged, or of another store."""
    data = read_file(schedule.disk, layout.SCHEDULE_TABLE)
    content = None if data is None else unseal(data)
    if content is None:
        return None
    try:
        table = msgspec.msgpack.decode(content, type=ScheduleTable)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return table if table.store_id == schedule.store_id else None


def load(schedule: Schedule, *, first_offset: int, next_offset: int) -> bool:
    """Take over what the files hold; whether there was a table. Changes nothing.

    `first_offset` and `next_offset` are those of the commit log. Raises `CorruptionError`.
    """
    table = read_table(schedule)
    if table is None:
        _load_files(schedule)
        schedule.copied_offset = first_offset
        return False
    if table.copied_offset > next_offset:
        raise CorruptionError(
            segment=layout.COMMIT_LOG,
            offset=next_offset,
            reason=f"the log ends here; {layout.SCHEDULE_TABLE} says synced up to offset "
            f"{table.copied_offset}",
        )
    for state in table.buckets:
        for log, length in zip(LOGS, (state.schedule_bytes, state.dispatch_bytes), strict=True):
            there = schedule.files.length(log, state.bucket)
            if there < length:
                reason = f"{length} bytes were synced, {there} are there"
                path = layout.bucket_path(log, state.bucket)
                raise CorruptionError(segment=path, offset=there, reason=reason)
        schedule.buckets[state.bucket] = Bucket(state)
    schedule.pending = dict(table.pending)
    schedule.bucket_ms = table.bucket_ms
    schedule.copied_offset = max(table.copied_offset, first_offset)
    return True


def _load_files(schedule: Schedule) -> None:
    """All buckets by what their files say of themselves."""
    for bucket in schedule.files.buckets(layout.SCHEDULE):
        state, subjects = _read_bucket(schedule, bucket)
        if not state.schedule_bytes:
            continue
        loaded = schedule.buckets[bucket] = Bucket(state)
        fates = loaded.fates(schedule.files)
        for sequence, subject in subjects.items():
            if not fates.get(sequence):
                schedule.pending[subject] = schedule.pending.get(subject, 0) + 1


def _read_bucket(schedule: Schedule, bucket: int) -> tuple[BucketState, dict[int, str]]:
    files = schedule.files
    schedule_bytes = files.good_bytes(layout.SCHEDULE, bucket)
    subjects: dict[int, str] = {}
    last_source = 0
    for columns in files.columns(bucket, schedule.subjects, next_position=schedule_bytes):
        for sequence, number in zip(columns.sequences, columns.subjects, strict=True):
            subjects[sequence] = schedule.subjects.names[number]
        last_source = max(last_source, *columns.sources)
    dispatch_bytes = 0
    if files.has(layout.DISPATCH, bucket):
        dispatch_bytes = files.good_bytes(layout.DISPATCH, bucket)
    settled = {sequence for _, sequence in files.fates(bucket, next_position=dispatch_bytes)}
    return (
        BucketState(
            bucket, len(subjects), schedule_bytes, last_source, len(settled), dispatch_bytes
        ),
        subjects,
    )


def clear_strays(schedule: Schedule) -> int:
    """Remove files of buckets that are not there; returns how many.

    Requires: a table was read. They are of a copy that was interrupted, or were done with.
    """
    removed = 0
    for log in LOGS:
        months = set()
        for bucket in schedule.files.buckets(log):
            state = schedule.buckets.get(bucket)
            is_needed = state is not None and (
                state.copied.schedule_bytes
                if log == layout.SCHEDULE
                else state.copied.dispatch_bytes
            )
            if not is_needed:
                schedule.files.remove(log, bucket)
                months.add(layout.bucket_directory(log, bucket))
                removed += 1
        for month in sorted(months):
            schedule.disk.sync_directory(month)
    return removed
