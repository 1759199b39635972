"""The copy of delayed messages from the commit log to their own files, and of those files to a backup.

::

    state/schedule    MessagePack of ScheduleTable and a checksum line

A copy appends to the schedule and dispatch logs of every bucket with new messages or states, one part at
a time, syncs them, and then replaces the table. Bytes that the table does not cover do not count: they
are cut and derived from the commit log again, so a message is copied once, by its source. Parts are
small, and few are copied between two commits, because sends and releases wait meanwhile. No request waits
for the syncs: they run parallel to the writer. A finished bucket first leaves the table, then its files
are removed, also parallel to the writer, because removing a large file takes long.

A backup copies the table, and every file up to the length in the table. These bytes are never
overwritten, so they can be copied while a broker runs. The commit log is copied afterwards, and
must begin at or before the table's offset.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from qmq_broker.errors import CorruptionError, DiskError, NoRoomError, StoreError
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.copying import copy_file
from qmq_broker.storage.files.disk_port import Disk
from qmq_broker.storage.files.small_file import replace_file
from qmq_broker.storage.schedule.bucket import (
    LOGS,
    Bucket,
    BucketState,
    ScheduleTable,
    read_table,
)
from qmq_broker.storage.schedule.columns import Columns, picker
from qmq_broker.storage.schedule.files import ScheduleFiles, dispatched_frames
from qmq_broker.storage.schedule.schedule import Schedule, marked_frame
from qmq_client.wire.frame import FrameKind
from qmq_client.wire.marks import Marks

_log = logging.getLogger(__name__)
#: Messages of one SCHEDULED frame, and bytes of their records; bounds what a reader holds at once.
FRAME_MESSAGES_MAX: Final = 4096
FRAME_BYTES_MAX: Final = 1024 * 1024
#: Messages and states kept in memory before they are copied; a start derives this many.
UNCOPIED_MAX: Final = 100_000
#: Messages of one part: a few milliseconds.
PART_MESSAGES_MAX: Final = 500
#: Parts copied between two commits, if there is time for more than one …
PARTS_PER_STEP: Final = 4
#: … and when memory is short: one more than arrived since, up to this.
PARTS_PER_STEP_BEHIND: Final = 32
#: Steps skipped after one without room, so that the log is not flooded.
SKIPS_WITHOUT_ROOM: Final = 100


@dataclass(slots=True, kw_only=True)
class _Part:
    """Part of what is copied of one bucket."""

    bucket: Bucket
    messages: Columns
    states: array[int]


@dataclass(slots=True, kw_only=True)
class _Copy:
    """A copy under way."""

    next_offset: int
    bucket_ms: int
    pending: dict[str, int]
    stored_at_ms: int
    #: The parts that were visible when it began. The last part is next; the parts of a bucket are in order.
    left: list[_Part]
    #: The content of the new table.
    states: dict[int, BucketState]
    over: list[int]
    #: Whether the new table is written.
    is_saved: bool = False


class ScheduleCopier:
    """Copies for one schedule; belongs to the writer thread."""

    def __init__(self, schedule: Schedule, *, epoch: int) -> None:
        """`epoch` is stamped on the copied frames."""
        schedule.files.epoch = epoch
        self._schedule = schedule
        self._copy: _Copy | None = None
        self._last_over_ms = 0
        self._skips = 0
        #: The planned beginning of the commit log; all delayed messages below it must be copied first.
        self.wanted_offset = 0
        #: Number of messages and states that were not in the files at the last copy.
        self._left = 0

    @property
    def quiet_offset(self) -> int:
        """Commit log offset below which all frames about delayed messages are in the files.

        Higher than the table's offset while no such frame has followed it.
        """
        schedule, is_busy = self._schedule, self._copy is not None or self._schedule.uncopied
        return schedule.copied_offset if is_busy else schedule.visible_offset

    def adopt_options(self) -> None:
        """Put new messages into buckets of the length in the options.

        Known messages must be in the files before: a replay gives them the same buckets.
        """
        schedule = self._schedule
        if schedule.bucket_ms != schedule.options.bucket_ms:
            self.copy_all()
            schedule.bucket_ms = schedule.options.bucket_ms
            self.copy_all()

    def step(self, has_time: Callable[[], bool] = lambda: True) -> bool:
        """Continue a copy, or begin one when it is due; returns whether it did any work.

        Copies at least one part; more while there is time.
        """
        schedule = self._schedule
        if self._skips:
            self._skips -= 1
            return False
        if schedule.background.is_busy or (self._copy is None and not self._is_due()):
            return False
        came = max(0, schedule.uncopied - self._left)
        is_behind = schedule.uncopied > 2 * UNCOPIED_MAX
        try:
            if is_behind:
                self.copy_some(min(PARTS_PER_STEP_BEHIND, 2 + came // PART_MESSAGES_MAX))
            else:
                self.copy_some(PARTS_PER_STEP, has_time)
        except NoRoomError:
            self._skips = SKIPS_WITHOUT_ROOM
            raise
        return True

    def copy_all(self) -> None:
        """Write all visible messages and states to the files; durable on return."""
        self._copy_to_its_end()
        if self._schedule.uncopied or self._is_over():
            self._copy_to_its_end()

    @property
    def buckets_left(self) -> int:
        """How many buckets have messages or states that are not in their files."""
        with self._schedule.lock:
            return sum(not one.is_copied for one in self._schedule.buckets.values())

    def leave(self) -> None:
        """Begin no more copies, and wait for the one under way: a start finds the rest in the commit log."""
        self._schedule.background.wait()
        self._schedule.background.check()

    def copy_some(self, parts_max: int, has_time: Callable[[], bool] = lambda: True) -> bool:
        """Continue a copy, or begin one, with up to `parts_max` parts; returns whether it is complete."""
        background = self._schedule.background
        if background.is_busy:
            return False
        background.check()
        if self._copy is None:
            self._copy = self._begin()
        copy = self._copy
        if copy.left:
            self._copy_parts(copy, parts_max, has_time)
        if not copy.is_saved:
            background.begin(self._schedule.files.sync if copy.left else lambda: self._save(copy))
            if background.is_busy:
                return False
            background.check()
        if copy.left:
            return False
        self._copy = None
        self._finish(copy)
        return True

    def _copy_to_its_end(self) -> None:
        background = self._schedule.background
        while not self.copy_some(PARTS_PER_STEP_BEHIND):
            background.wait()
        background.wait()
        background.check()

    def _copy_parts(self, copy: _Copy, parts_max: int, has_time: Callable[[], bool]) -> None:
        for _ in range(min(parts_max, len(copy.left))):
            part = copy.left[-1]
            state = self._copy_bucket(part, copy.stored_at_ms)
            with self._schedule.lock:
                part.bucket.forget_waiting(state, len(part.states))
                self._schedule.uncopied -= len(part.messages) + len(part.states)
            copy.states[state.bucket] = state
            copy.left.pop()
            if not has_time():
                break
        self._left = self._schedule.uncopied

    def _is_due(self) -> bool:
        schedule = self._schedule
        behind_bytes = schedule.visible_offset - schedule.copied_offset
        far_bytes = schedule.options.queue_flush_bytes
        if schedule.uncopied:  # a start reads all frames from there on
            far_bytes = min(far_bytes, schedule.options.checkpoint_bytes)
        is_far = behind_bytes >= far_bytes or self.wanted_offset > schedule.copied_offset
        return is_far or schedule.uncopied >= UNCOPIED_MAX or self._is_over()

    def _is_over(self) -> bool:
        """Whether a bucket is finished; checked once per bucket length of the log's time."""
        schedule = self._schedule
        if schedule.stored_at_ms < self._last_over_ms + schedule.bucket_ms:
            return False
        self._last_over_ms = schedule.stored_at_ms
        with schedule.lock:
            return any(
                schedule.is_done(one, schedule.stored_at_ms) for one in schedule.buckets.values()
            )

    def _is_removable(self, bucket: Bucket) -> bool:
        return bucket.is_copied and self._schedule.is_done(bucket, self._schedule.stored_at_ms)

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
                left=[part for one in buckets for part in reversed(_parts(one))],
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
        if part.states:
            dispatch_bytes = files.append(
                layout.DISPATCH,
                last.bucket,
                dispatch_bytes,
                dispatched_frames(part.states),
                stored_at_ms=stored_at_ms,
            )
        return BucketState(
            last.bucket,
            last.next_sequence + len(part.messages),
            schedule_bytes,
            last_source,
            last.dispatched + len(part.states),
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
        records: dict[str, list[bytes]] = {}
        for subject, indexes in by_subject.items():
            found = schedule.records.read_all(messages.bucket, subject, messages, indexes)
            records[subject] = [_whole(found[index]) for index in indexes]
        pick = picker(order)
        marks = Marks(
            sequences=pick(messages.sequences),
            sources=pick(messages.sources),
            due_at_ms=pick(messages.due_at_ms),
            message_ids=b"".join([messages.message_id(index) for index in order]),
        )
        return marked_frame(FrameKind.SCHEDULED, records, marks).data

    def _save(self, copy: _Copy) -> None:
        """Parallel to the writer: make the files durable, then the table that covers them."""
        schedule = self._schedule
        schedule.files.sync()
        write_table(schedule, copy.next_offset, copy.bucket_ms, copy.states, copy.pending)
        copy.is_saved = True

    def _finish(self, copy: _Copy) -> None:
        schedule = self._schedule
        schedule.copied_offset = copy.next_offset
        if copy.over:
            with schedule.lock:
                for bucket in copy.over:
                    del schedule.buckets[bucket]
            schedule.background.begin(lambda: self._remove(copy.over))

    def _remove(self, buckets: list[int]) -> None:
        """Parallel to the writer: remove the files of these buckets, which are no longer in the table."""
        files, disk = self._schedule.files, self._schedule.disk
        # A dispatch log is durably removed after its schedule log: without it the messages of the
        # schedule log would be pending again.
        for log in LOGS:
            for bucket in buckets:
                files.remove(log, bucket)
            for month in sorted({layout.bucket_directory(log, bucket) for bucket in buckets}):
                if month.rpartition("/")[2] in disk.names(log):
                    disk.sync_directory(month)


def _parts(bucket: Bucket) -> list[_Part]:
    """The parts of a bucket that are not in its files: messages, then states."""
    waiting, nothing = bucket.waiting, array("Q")
    parts = [
        _Part(
            bucket=bucket,
            messages=waiting.part(first, min(first + PART_MESSAGES_MAX, len(waiting))),
            states=nothing,
        )
        for first in range(0, len(waiting), PART_MESSAGES_MAX)
    ]
    if bucket.undispatched:
        states = bucket.undispatched[:]
        parts.append(_Part(bucket=bucket, messages=waiting.part(0, 0), states=states))
    return parts


def _whole(record: bytes | CorruptionError) -> bytes:
    if isinstance(record, CorruptionError):
        raise record
    return record


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
    """Replace the table; durable on return."""
    table = ScheduleTable(
        store_id=schedule.store_id,
        copied_offset=copied_offset,
        bucket_ms=bucket_ms,
        buckets=tuple(states[bucket] for bucket in sorted(states)),
        pending=pending,
    )
    replace_file(schedule.disk, layout.SCHEDULE_TABLE, msgspec.msgpack.encode(table))


#: A bucket may be finished and removed while its files are copied; that happens once per bucket
#: length.
_TRIES_MAX = 3


class ScheduleCopy(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a copy for a backup."""

    copied_bytes: int
    #: The commit log of the copy must begin at or before this; None if it must be complete.
    copied_offset: int | None


def take_schedule(source: Disk, target: Disk, store_id: bytes) -> ScheduleCopy:
    """Copy the files that the schedule's table covers; durable on return, except for the root's names.

    Raises `CorruptionError` if the files do not match the table, `StoreError` if there are files of
    delayed messages and no table.
    """
    for directory in LOGS:
        target.make_directory(directory)
    for number in range(_TRIES_MAX):
        table = read_table(source, store_id)
        if table is None:
            if any(map(ScheduleFiles(source, store_id).buckets, LOGS)):
                raise StoreError(
                    f"{layout.SCHEDULE_TABLE}, the table of delayed messages, is missing or damaged. Start the "
                    "broker on this directory, which makes it again, and try again."
                )
            return ScheduleCopy(copied_bytes=0, copied_offset=None)
        try:
            copied_bytes = sum(
                _copy(source, target, layout.bucket_path(log, state.bucket), length)
                for state in table.buckets
                for log, length in zip(
                    LOGS, (state.schedule_bytes, state.dispatch_bytes), strict=True
                )
                if length
            )
        except DiskError:
            if number + 1 == _TRIES_MAX or read_table(source, store_id) == table:
                raise
            continue
        _sync(target)
        replace_file(target, layout.SCHEDULE_TABLE, msgspec.msgpack.encode(table))
        return ScheduleCopy(copied_bytes=copied_bytes, copied_offset=table.copied_offset)
    raise AssertionError("the loop ends with its last attempt")


def _copy(source: Disk, target: Disk, path: str, length: int) -> int:
    log, month, _ = path.split("/")
    target.make_directory(f"{log}/{month}")
    return copy_file(source, path, target, length=length)


def _sync(target: Disk) -> None:
    for log in LOGS:
        for month in target.names(log):
            target.sync_directory(f"{log}/{month}")
        target.sync_directory(log)
