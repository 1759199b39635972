"""One bucket of delayed messages in memory: what is not in its files yet, and all states."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from threading import Lock
from typing import Final

import msgspec

from qmq_broker.errors import CorruptionError, UnknownFormatError
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.disk_port import Disk
from qmq_broker.storage.files.small_file import decode_whole, read_file, unseal
from qmq_broker.storage.schedule.columns import Columns
from qmq_broker.storage.schedule.files import ScheduleFiles
from qmq_broker.storage.schedule.states import DelayedState, DelayedStates, pack_state, unpack_state

#: Due times are grouped by the hour unless the options say otherwise.
HOUR_MS: Final = 3_600_000


class BucketState(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How much of one bucket is in its files."""

    #: First millisecond of its due times.
    bucket: int
    #: Messages in its schedule log.
    next_sequence: int
    #: Length of the schedule log.
    schedule_bytes: int
    #: Commit log offset of the last record that was copied.
    last_source: int
    #: Messages in its dispatch log.
    dispatched: int
    #: Length of the dispatch log.
    dispatch_bytes: int


class ScheduleTable(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How much of all buckets is in their files."""

    store_id: bytes
    #: In the commit log below this, everything about delayed messages is in the files.
    copied_offset: int
    #: Length of the buckets for messages that come after it.
    bucket_ms: int
    buckets: tuple[BucketState, ...]
    #: Pending messages of each subject that has some.
    pending: dict[str, int]


def read_table(disk: Disk, store_id: bytes) -> ScheduleTable | None:
    """The table; None if it is missing, damaged, or of another store.

    Raises `UnknownFormatError`.
    """
    data = read_file(disk, layout.SCHEDULE_TABLE)
    content = None if data is None else unseal(data)
    if content is None:
        return None
    table = decode_whole(layout.SCHEDULE_TABLE, content, ScheduleTable)
    return table if table.store_id == store_id else None


class Bucket:
    """The delayed messages of one span of due times.

    Changed by the writer, and by the thread that copies, under the lock of the schedule. Invariant:
    sequences below `copied.next_sequence` are in the schedule log, those from there to
    `next_sequence` in `waiting`.
    """

    def __init__(self, copied: BucketState) -> None:
        #: What the files hold.
        self.copied = copied
        self.bucket = copied.bucket
        #: What is only in the commit log.
        self.waiting = Columns(bucket=self.bucket)
        #: States that are durable and not in the dispatch log: its next entries.
        self.undispatched = array("Q")
        self.next_sequence = copied.next_sequence
        #: Messages whose state is durable.
        self.settled = copied.dispatched
        self._states: DelayedStates | None = None if copied.dispatched else DelayedStates()
        #: Two threads must not read the states from the file at once: one would miss new ones.
        self._reading = Lock()

    @property
    def pending(self) -> int:
        """Messages that wait for their time."""
        return self.next_sequence - self.settled

    @property
    def is_copied(self) -> bool:
        """Whether the files hold all of it."""
        return not self.waiting and not self.undispatched

    def states(self, files: ScheduleFiles) -> DelayedStates:
        """The states of its messages; read on first use. Raises `CorruptionError`."""
        with self._reading:
            if self._states is None:
                states = DelayedStates()
                later = self.undispatched[:]  # before the end: a copy may bring them after it
                end = self.copied.dispatch_bytes
                try:
                    for state, sequence in files.states(self.bucket, next_position=end):
                        states.set(sequence, state)
                except UnknownFormatError as error:  # held as damage is; only commands refuse it
                    path = layout.bucket_path(layout.DISPATCH, self.bucket)
                    raise CorruptionError(segment=path, offset=0, reason=str(error)) from error
                for state, sequence in map(unpack_state, later):
                    states.set(sequence, state)
                self._states = states
            return self._states

    def set_state(
        self, files: ScheduleFiles, sequences: Sequence[int], state: DelayedState
    ) -> list[int]:
        """Give these pending messages this state; returns those that were pending.

        If damage hides their earlier states, returns all: none of these is released until the
        file is whole again, so only the last word of the log is kept.
        """
        try:
            return self.states(files).set_all(sequences, state)
        except CorruptionError:
            return list(sequences)

    def find(self, sequence: int, source: int) -> int | None:
        """Find a message by its source, in case frames before it were lost."""
        index = sequence - self.copied.next_sequence
        if index < 0:
            return sequence
        sources = self.waiting.sources
        if index < len(sources) and sources[index] == source:
            return sequence
        found = self.waiting.find_source(source)
        return None if found is None else self.waiting.sequences[found]

    def find_all(self, sequences: Sequence[int], sources: Sequence[int]) -> Sequence[int | None]:
        """The same as `find`, for many."""
        if max(sequences, default=0) < self.copied.next_sequence:
            return sequences
        return [self.find(*pair) for pair in zip(sequences, sources, strict=True)]

    def settle(self, state: DelayedState, sequences: Sequence[int]) -> None:
        """These states became durable."""
        first = pack_state(state, 0)
        self.undispatched.extend([first | sequence for sequence in sequences])
        self.settled += len(sequences)

    def forget_waiting(self, copied: BucketState, dispatched: int) -> None:
        """Forget this many waiting messages: they are in the files now."""
        count = copied.next_sequence - self.copied.next_sequence
        self.waiting = self.waiting.part(count, len(self.waiting))
        left = self.undispatched[dispatched:]
        # In this order: `states` looks the other way round, in any thread, and must find each state somewhere.
        self.copied = copied
        self.undispatched = left


def empty_bucket(bucket: int) -> Bucket:
    """A bucket without files."""
    return Bucket(BucketState(bucket, 0, 0, 0, 0, 0))


def is_over(bucket: Bucket, bucket_ms: int, now_ms: int, grace_ms: int) -> bool:
    """Whether a bucket is finished; its files may go once they hold all of it.

    Requires: `now_ms` is the log's own time, which never goes back: nothing stored later goes to a
    bucket before it.
    """
    return not bucket.pending and bucket.bucket + bucket_ms + grace_ms <= now_ms


LOGS: Final = (layout.SCHEDULE, layout.DISPATCH)
