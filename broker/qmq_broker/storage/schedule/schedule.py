"""The schedule of delayed messages: due time, place and state of each.

A delayed message is appended to the commit log like any other but gets no place in its consume
queue. From then on the schedule has it, under the bucket of its due time and a sequence in that bucket. Both
follow from its place in the log alone, so a replay gives the same. Its *state* is settled by a frame
of the commit log: RELEASED puts the same record into its queue, CANCELLED ends it, RESCHEDULED
moves it to another due time. The writer checks a state in the same append that changes it, so a
release happens once, even if several threads request it.

Records go to schedule logs and states to dispatch logs in portions (`copy.py`). Until then both are
derived from the commit log at each start; afterwards its segments may be deleted. Not for: when a
message is due (`service/delay/releasing.py`).

`ScheduleRecords` reads their records, from the commit log or from the schedule log of their bucket;
many together when they are released: neighbours with one read, in the order of the file.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from threading import Lock
from typing import Final, NamedTuple, Protocol

from qmq_broker.errors import CorruptionError, DiskError
from qmq_broker.options import StoreOptions
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.background import Background
from qmq_broker.storage.files.disk_port import Disk, DiskFile
from qmq_broker.storage.logs.kinds import LOG_LIMITS
from qmq_broker.storage.logs.segments import Segments
from qmq_broker.storage.schedule.bucket import Bucket, empty_bucket, is_over
from qmq_broker.storage.schedule.cancelled import Cancelled
from qmq_broker.storage.schedule.columns import IN_SCHEDULE, Columns, DelayedMessage, Subjects
from qmq_broker.storage.schedule.files import ScheduleFiles
from qmq_broker.storage.schedule.lists import OnDamage
from qmq_broker.storage.schedule.states import DelayedState, DelayedStates
from qmq_client.wire.checksum import crc32c
from qmq_client.wire.errors import ProtocolError
from qmq_client.wire.frame import FrameKind, MessageFrame, build_message_frame, parse_message_frame
from qmq_client.wire.marks import Marks, frame_marks, pack_marks
from qmq_client.wire.message_id import MESSAGE_ID_BYTES
from qmq_client.wire.record import (
    MESSAGE_ID_POSITION,
    RECORD_FIXED_BYTES,
    record_crc,
    verify_record,
)

#: A gap smaller than this between two records is read with them, which is cheaper than a second read.
_GAP_BYTES: Final = 2_048
#: Bytes of one read.
_READ_BYTES_MAX: Final = 1024 * 1024
_CRC_BYTES: Final = 4


class Wanted(Protocol):
    """Columns of messages of one bucket: those of the schedule, or of the wheel."""

    @property
    def sequences(self) -> Sequence[int]:
        """The sequence of each within its bucket."""
        ...

    @property
    def places(self) -> Sequence[int]:
        """As in `DelayedMessage`."""
        ...

    @property
    def record_bytes(self) -> Sequence[int]:
        """The length of each."""
        ...


class ScheduleRecords:
    """The records of one schedule; for any thread."""

    def __init__(
        self, files: ScheduleFiles, commit: Segments, find_copy: Callable[[int, int], int]
    ) -> None:
        """`find_copy` returns the place of a sequence in the schedule log of a bucket."""
        self._files = files
        self._commit = commit
        self._find_copy = find_copy

    def read(self, bucket: int, subject: str, sequence: int, place: int, count: int) -> bytes:
        """One record of `count` bytes, verified; raises `CorruptionError` if it cannot be read."""
        try:
            data = self._read(bucket, place, count)
            if not data and not place & IN_SCHEDULE:
                # Its commit log segment was deleted after this place was looked up.
                place = self._find_copy(bucket, sequence)
                data = self._read(bucket, place, count)
            verify_record(subject, data)
        except (ProtocolError, DiskError) as error:
            is_copied = bool(place & IN_SCHEDULE)
            path = layout.bucket_path(layout.SCHEDULE, bucket)
            raise CorruptionError(
                segment=path if is_copied else self._commit.path(place),
                offset=place & ~IN_SCHEDULE,
                reason=f"not a complete record of subject {subject}: {error}",
            ) from error
        return data

    def read_all(
        self, bucket: int, subject: str, wanted: Wanted, indexes: Sequence[int]
    ) -> dict[int, bytes | CorruptionError]:
        """Read these messages, all of one bucket and subject, and verify them; an unreadable one is
        replaced by its error.

        Requires: at least one message, and together they fit into memory.
        """
        places, sizes = wanted.places, wanted.record_bytes
        order = sorted(indexes, key=places.__getitem__)
        records: list[bytes] = []
        with self._files.opened(layout.SCHEDULE, bucket) as file:
            for begin, after, count in _neighbours(order, places, sizes):
                first = places[order[begin]]
                data = self._read_run(file, first, count)
                if after - begin == 1:
                    records.append(data)
                else:
                    run = [(places[index] - first, sizes[index]) for index in order[begin:after]]
                    records += [data[position : position + size] for position, size in run]
        seed = crc32c(subject.encode())
        found: dict[int, bytes | CorruptionError] = dict(zip(order, records, strict=True))
        broken = [
            index
            for index, record in zip(order, records, strict=True)
            if not len(record) == sizes[index] > _CRC_BYTES
            or crc32c(record[_CRC_BYTES:], seed) != record_crc(record)
        ]
        for index in broken:
            found[index] = self._alone(bucket, subject, wanted, index)
        return found

    def _read_run(self, file: DiskFile | None, first: int, count: int) -> bytes:
        """The records of a run of neighbours; fewer or none where each must be read by itself."""
        try:
            if not first & IN_SCHEDULE:
                return self._commit.read(first, count)
            return b"" if file is None else file.read(first & ~IN_SCHEDULE, count)
        except DiskError:  # records next to a bad sector may still be readable
            return b""

    def _alone(
        self, bucket: int, subject: str, wanted: Wanted, index: int
    ) -> bytes | CorruptionError:
        sequence, place = wanted.sequences[index], wanted.places[index]
        try:
            return self.read(bucket, subject, sequence, place, wanted.record_bytes[index])
        except CorruptionError as error:
            return error

    def _read(self, bucket: int, place: int, count: int) -> bytes:
        if place & IN_SCHEDULE:
            return self._files.read(layout.SCHEDULE, bucket, place & ~IN_SCHEDULE, count)
        return self._commit.read(place, count)


def _neighbours(
    order: Sequence[int], places: Sequence[int], sizes: Sequence[int]
) -> list[tuple[int, int, int]]:
    """The half open range of indexes that one read covers, in order of place, and its length."""
    runs: list[tuple[int, int, int]] = []
    begin = first = near = end = 0
    for at, index in enumerate(order):
        place = places[index]
        after = place + sizes[index]
        if place > near or after - first > _READ_BYTES_MAX:
            if at:
                runs.append((begin, at, end - first))
            begin, first = at, place
        end = after
        near = end + _GAP_BYTES
    runs.append((begin, len(order), end - first))
    return runs


_DUE: Final = struct.Struct(">Q")


class Arrival(NamedTuple):
    """Messages of one bucket that became durable: half open sequences."""

    bucket: int
    first_sequence: int
    next_sequence: int


class Mark(NamedTuple):
    """One message that gets its state."""

    bucket: int
    sequence: int
    source: int


class _Settled(NamedTuple):
    bucket: Bucket
    sequences: list[int]
    state: DelayedState
    subject: str


class Schedule:
    """All delayed messages of a store.

    `stage_…`, `make_visible` and `state` belong to the writer; the rest may be called in any thread.
    """

    def __init__(
        self, disk: Disk, options: StoreOptions, store_id: bytes, commit_segments: Segments
    ) -> None:
        self.disk = disk
        self.options = options
        self.store_id = store_id
        self.files = ScheduleFiles(disk, store_id)
        self.subjects = Subjects()
        self.lock = Lock()
        #: States that wait to be copied to the files.
        self.background = Background()
        self.records = ScheduleRecords(self.files, commit_segments, self._copied_place)
        #: By their first millisecond; guarded by the lock.
        self.buckets: dict[int, Bucket] = {}
        #: Length of the buckets for new messages.
        self.bucket_ms = options.bucket_ms
        #: In the commit log below this, everything about delayed messages is in the files.
        self.copied_offset = 0
        #: All frames of the commit log below this offset are applied.
        self.visible_offset = 0
        #: Time of the last applied append.
        self.stored_at_ms = 0
        #: Pending messages by subject; guarded by the lock.
        self.pending: dict[str, int] = {}
        #: Messages and states that are not in the files.
        self.uncopied = 0
        #: Called in the writer's thread with the messages that became durable.
        self.on_arrivals: Callable[[list[Arrival]], object] = lambda _: None
        self._arrived: dict[int, Columns] = {}
        self._settled: list[_Settled] = []

    # ---- the writer --------------------------------------------------------------------------

    def stage(self, frame: MessageFrame, offset: int, stored_at_ms: int) -> None:
        """Stage a frame of the commit log that concerns delayed messages; not yet visible."""
        if frame.header.kind is FrameKind.DELAYED:
            data = frame.data
            due = [_DUE.unpack_from(data, at + RECORD_FIXED_BYTES)[0] for at in frame.positions]
            self._stage_messages(frame, offset, stored_at_ms, due)
            return
        marks = frame_marks(frame)
        if frame.header.kind is FrameKind.RELEASED:
            self._release(frame, marks)
        elif frame.header.kind is FrameKind.RESCHEDULED:
            self._settle(_of_frame(frame, marks), frame, DelayedState.RESCHEDULED)
            self._stage_messages(frame, offset, stored_at_ms, marks.due_at_ms)

    def stage_cancelled(self, cancelled: Iterable[Cancelled]) -> None:
        """Stage a CANCELLED frame of the commit log; not yet visible."""
        for one in cancelled:
            self._settle_one(
                Mark(one.bucket, one.sequence, one.source), one.subject, DelayedState.CANCELLED
            )

    def state(self, mark: Mark) -> DelayedState | None:
        """The state of a message, including one staged just now; None if it is unknown."""
        sequence = self._sequence_of(mark)
        if sequence is None:
            return None
        return self.buckets[mark.bucket].states(self.files).get(sequence)

    def unsettled(self, frame: MessageFrame, taken: dict[int, set[int]]) -> MessageFrame | None:
        """The part of a RELEASED or RESCHEDULED frame whose messages have no state yet; None if there is none.

        `taken` holds the sequences, by bucket, of earlier frames of the same append; those of this
        one are added.
        """
        marks = frame_marks(frame)
        if frame.header.kind is FrameKind.RELEASED:
            found = self._releasable(marks, taken.setdefault(marks.buckets[0], set()))
        else:
            found = [
                index
                for index, mark in enumerate(_of_frame(frame, marks))
                if self._is_free(mark, taken.setdefault(mark.bucket, set()))
            ]
        if len(found) == len(marks.sequences):
            return frame
        return _part(frame, marks, found) if found else None

    def _is_free(self, mark: Mark, taken: set[int]) -> bool:
        is_free = mark.sequence not in taken and self.state(mark) is DelayedState.PENDING
        if is_free:
            taken.add(mark.sequence)
        return is_free

    def _releasable(self, marks: Marks, taken: set[int]) -> list[int]:
        """Like `_is_free`, for many: the indexes of the marks of one bucket without a state."""
        bucket = self.buckets.get(marks.buckets[0])
        if bucket is None:
            return []
        sequences = marks.sequences
        found = bucket.states(self.files).pending(bucket.find_all(sequences, marks.sources))
        if taken:
            found = [index for index in found if sequences[index] not in taken]
        by_sequence = {sequences[index]: index for index in found}
        taken.update(by_sequence)
        # A message may be in a frame twice if it was loaded while it arrived
        return found if len(by_sequence) == len(found) else sorted(by_sequence.values())

    def make_visible(self, durable_offset: int, stored_at_ms: int) -> None:
        """Make everything staged visible. Requires: the commit log was synced up to there."""
        arrivals = []
        with self.lock:
            for bucket, columns in self._arrived.items():
                state = self.buckets[bucket]
                first = state.next_sequence
                state.next_sequence += len(columns)
                state.waiting.add(columns)
                self.uncopied += len(columns)
                arrivals.append(Arrival(bucket, first, state.next_sequence))
                for number in columns.subjects:
                    subject = self.subjects.names[number]
                    self.pending[subject] = self.pending.get(subject, 0) + 1
            for settled in self._settled:
                settled.bucket.settle(settled.state, settled.sequences)
                self.uncopied += len(settled.sequences)
                count = self.pending.get(settled.subject, 0) - len(settled.sequences)
                self.pending[settled.subject] = count
                if count <= 0:
                    del self.pending[settled.subject]
            self.visible_offset = durable_offset
            self.stored_at_ms = max(self.stored_at_ms, stored_at_ms)
        self._arrived.clear()
        self._settled.clear()
        if arrivals:
            self.on_arrivals(arrivals)

    def _stage_messages(
        self, frame: MessageFrame, offset: int, stored_at_ms: int, due_at_ms: Sequence[int]
    ) -> None:
        data, index = frame.data, 0
        for run in frame.runs:
            subject = self.subjects.number(run.subject)
            for place in range(index, index + run.count):
                due_ms = due_at_ms[place]
                position = frame.positions[place]
                columns = self._columns_of(max(due_ms, stored_at_ms), offset + position)
                if columns is None:
                    continue
                columns.sources.append(offset + position)
                columns.places.append(offset + position)
                columns.due_at_ms.append(due_ms)
                columns.record_bytes.append(frame.lengths[place])
                columns.subjects.append(subject)
                first = position + MESSAGE_ID_POSITION
                columns.message_ids += data[first : first + MESSAGE_ID_BYTES]
            index += run.count

    def _columns_of(self, time_ms: int, source: int) -> Columns | None:
        """The columns for the next message of this time; None if it is already copied."""
        bucket = time_ms - time_ms % self.bucket_ms
        known = self.buckets.get(bucket)
        if known is not None and source <= known.copied.last_source and known.copied.next_sequence:
            return None  # a replay without the table: its file has it
        columns = self._arrived.get(bucket)
        if columns is None:
            columns = self._arrived[bucket] = Columns(bucket=bucket)
            if known is None:
                with self.lock:
                    self.buckets[bucket] = empty_bucket(bucket)
        columns.sequences.append(self.buckets[bucket].next_sequence + len(columns))
        return columns

    def _settle(self, marks: Iterable[Mark], frame: MessageFrame, state: DelayedState) -> None:
        subjects = [run.subject for run in frame.runs for _ in range(run.count)]
        for mark, subject in zip(marks, subjects, strict=True):
            self._settle_one(mark, subject, state)

    def _settle_one(self, mark: Mark, subject: str, state: DelayedState) -> None:
        sequence = self._sequence_of(mark)
        if sequence is None:
            return  # a replay: its bucket was finished and removed
        bucket = self.buckets[mark.bucket]
        if bucket.set_state(self.files, [sequence], state):
            self._settled.append(_Settled(bucket, [sequence], state, subject))

    def _release(self, frame: MessageFrame, marks: Marks) -> None:
        """Note the release of all messages of a RELEASED frame, which belong to one bucket."""
        bucket = self.buckets.get(marks.buckets[0])
        if bucket is None:
            return  # a replay: its bucket was finished and removed
        index = 0
        for run in frame.runs:
            after = index + run.count
            found = bucket.find_all(marks.sequences[index:after], marks.sources[index:after])
            known = [place for place in found if place is not None]
            new = bucket.set_state(self.files, known, DelayedState.RELEASED)
            if new:
                self._settled.append(_Settled(bucket, new, DelayedState.RELEASED, run.subject))
            index = after

    def _sequence_of(self, mark: Mark) -> int | None:
        """The sequence of the message; None if it is unknown."""
        bucket = self.buckets.get(mark.bucket)
        return None if bucket is None else bucket.find(mark.sequence, mark.source)

    def waits_for_time(self, now_ms: int) -> bool:
        """Whether a bucket could be removed if only the log's own time were `now_ms`.

        True at most once per bucket length, because buckets are not checked more often.
        """
        if now_ms < self.stored_at_ms + self.bucket_ms:
            return False
        with self.lock:
            return any(self.is_done(one, now_ms) for one in self.buckets.values())

    def is_done(self, bucket: Bucket, now_ms: int) -> bool:
        """Whether a bucket may be removed at this time of the log, once its files hold it all."""
        # An older bucket may have another length.
        longest_ms = max(self.bucket_ms, self.options.bucket_ms)
        return is_over(bucket, longest_ms, now_ms, self.options.bucket_grace_ms)

    # ---- any thread ----------------------------------------------------------------------------

    def states(self) -> list[tuple[int, int, int]]:
        """Bucket, next sequence and pending messages of each bucket, in order."""
        with self.lock:
            found = [(one.bucket, one.next_sequence, one.pending) for one in self.buckets.values()]
        return sorted(found)

    def pending_by_subject(self) -> dict[str, int]:
        """How many messages of each subject wait for their time."""
        with self.lock:
            return dict(self.pending)

    def columns(
        self,
        bucket: int,
        first_sequence: int,
        next_sequence: int,
        *,
        within: tuple[int, int] | None = None,
        on_damage: OnDamage | None = None,
    ) -> Iterator[Columns]:
        """The messages of a bucket, pending or not, in portions; raises `CorruptionError`.

        Includes all from `first_sequence` on and none from `next_sequence` on. Portions without due
        times `within` these bounds, both inclusive, may be left out. With `on_damage`, that is
        called for unreadable messages, and reading continues.
        """
        with self.lock:
            state = self.buckets.get(bucket)
            if state is None:
                return
            copied = state.copied
            first = max(0, first_sequence - copied.next_sequence)
            waiting = state.waiting.part(first, max(0, next_sequence - copied.next_sequence))
        if first_sequence < copied.next_sequence:
            yield from self.files.columns(
                bucket,
                self.subjects,
                next_position=copied.schedule_bytes,
                first_sequence=first_sequence,
                within=within,
                on_damage=on_damage,
            )
        if waiting:
            yield waiting

    def message(self, bucket: int, sequence: int) -> DelayedMessage | None:
        """One message, pending or not; raises `CorruptionError` if damage may hide it."""
        damage: list[CorruptionError] = []
        for columns in self.columns(bucket, sequence, sequence + 1, on_damage=damage.append):
            if sequence in columns.sequences:
                return columns.message(columns.sequences.index(sequence), self.subjects)
        if damage:
            raise damage[0]
        return None

    def copied_sequence(self, bucket: int) -> int:
        """The messages of a bucket below this are in its files; 0 for an unknown bucket."""
        found = self.buckets.get(bucket)
        return 0 if found is None else found.copied.next_sequence

    def states_of(self, bucket: int) -> DelayedStates | None:
        """The states of a bucket's messages, as this thread sees them."""
        found = self.buckets.get(bucket)
        return None if found is None else found.states(self.files)

    def read(self, message: DelayedMessage) -> bytes:
        """The record of a message, verified; raises `CorruptionError`."""
        one = message
        return self.records.read(one.bucket, one.subject, one.sequence, one.place, one.record_bytes)

    def read_anew(self, bucket: int) -> None:
        """Forget the content of a bucket's files: an operator may have replaced them."""
        self.files.forget(bucket)

    def close(self) -> None:
        """Close all files. Safe to call twice."""
        self.files.close()

    def _copied_place(self, bucket: int, wanted: int) -> int:
        found = self.message(bucket, wanted)
        return IN_SCHEDULE if found is None else found.place


def _of_frame(frame: MessageFrame, marks: Marks) -> list[Mark]:
    buckets = marks.buckets
    if frame.header.kind is FrameKind.RELEASED:
        buckets = (buckets[0],) * len(marks.sequences)
    return [Mark(*mark) for mark in zip(buckets, marks.sequences, marks.sources, strict=True)]


def _part(frame: MessageFrame, marks: Marks, indexes: Sequence[int]) -> MessageFrame:
    """A frame with some of the records of another."""
    subjects = [run.subject for run in frame.runs for _ in range(run.count)]
    records: dict[str, list[bytes]] = {}
    for index in indexes:
        records.setdefault(subjects[index], []).append(frame.record(index))
    is_released = frame.header.kind is FrameKind.RELEASED
    kept = Marks(
        buckets=marks.buckets if is_released else [marks.buckets[index] for index in indexes],
        sequences=[marks.sequences[index] for index in indexes],
        sources=[marks.sources[index] for index in indexes],
        due_at_ms=[marks.due_at_ms[index] for index in indexes] if marks.due_at_ms else (),
    )
    return marked_frame(frame.header.kind, records, kept)


def marked_frame(kind: FrameKind, records: dict[str, list[bytes]], marks: Marks) -> MessageFrame:
    """A frame of the broker's own. Requires: marks and records are in the same order."""
    data = build_message_frame(records, kind=kind, limits=LOG_LIMITS, marks=pack_marks(kind, marks))
    return parse_message_frame(data, LOG_LIMITS, is_verified=True)
