"""One bucket of delayed messages in memory: the messages that its files lack, and all states."""

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
    #: Number of messages in its schedule log.
    next_sequence: int
    #: Length of the schedule log.
    schedule_bytes: int
    #: Commit log offset of the last record that was copied.
    last_source: int
    #: Number of states in its dispatch log.
    dispatched: int
    #: Length of the dispatch log.
    dispatch_bytes: int


class ScheduleTable(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How much of every bucket is in its files."""

    store_id: bytes
    #: All frames about delayed messages below this commit log offset are in the files.
    copied_offset: int
    #: Span of due times of a new bucket.
    bucket_ms: int
    buckets: tuple[BucketState, ...]
    #: Number of pending messages by subject; subjects without any are left out.
    pending: dict[str, int]


def read_table(disk: Disk, store_id: bytes) -> ScheduleTable | None:
    """Read the table; None if it is missing, damaged, or of another store.

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

    The writer and the copying thread change it, under the lock of the schedule. Invariant: sequences
    below `copied.next_sequence` are in the schedule log, those from there to `next_sequence` in
    `waiting`.
    """

    def __init__(self, copied: BucketState) -> None:
        #: How much the files hold.
        self.copied = copied
        self.bucket = copied.bucket
        #: Messages that are only in the commit log.
        self.waiting = Columns(bucket=self.bucket)
        #: Durable states that the dispatch log lacks: its next entries.
        self.undispatched = array("Q")
        self.next_sequence = copied.next_sequence
        #: Number of messages with a durable state.
        self.settled = copied.dispatched
        self._states: DelayedStates | None = None if copied.dispatched else DelayedStates()
        #: Only one thread at a time reads the states from the file: a second one would miss new states.
        self._reading = Lock()

    @property
    def pending(self) -> int:
        """Number of messages that wait for their due time."""
        return self.next_sequence - self.settled

    @property
    def is_copied(self) -> bool:
        """Whether the files hold all messages and states."""
        return not self.waiting and not self.undispatched

    def states(self, files: ScheduleFiles) -> DelayedStates:
        """The states of its messages, read on first use. Raises `CorruptionError`."""
        with self._reading:
            if self._states is None:
                states = DelayedStates()
                later = self.undispatched[:]  # read before `end`: a copy moves them below it
                end = self.copied.dispatch_bytes
                try:
                    for state, sequence in files.states(self.bucket, next_position=end):
                        states.set(sequence, state)
                except UnknownFormatError as error:  # treated as damage; only commands refuse it
                    path = layout.bucket_path(layout.DISPATCH, self.bucket)
                    raise CorruptionError(segment=path, offset=0, reason=str(error)) from error
                for state, sequence in map(unpack_state, later):
                    states.set(sequence, state)
                self._states = states
            return self._states

    def set_state(
        self, files: ScheduleFiles, sequences: Sequence[int], state: DelayedState
    ) -> list[int]:
        """Set the state of the pending ones of these messages; returns them.

        If damage hides the earlier states, returns all of them: none of these messages is released
        until the file can be read again.
        """
        try:
            return self.states(files).set_all(sequences, state)
        except CorruptionError:
            return list(sequences)

    def find(self, sequence: int, source: int) -> int | None:
        """The sequence of a message; found by its source if frames before it were lost; None if it
        is not in the bucket.
        """
        index = sequence - self.copied.next_sequence
        if index < 0:
            return sequence
        sources = self.waiting.sources
        if index < len(sources) and sources[index] == source:
            return sequence
        found = self.waiting.find_source(source)
        return None if found is None else self.waiting.sequences[found]

    def find_all(self, sequences: Sequence[int], sources: Sequence[int]) -> Sequence[int | None]:
        """`find` for many messages."""
        if max(sequences, default=0) < self.copied.next_sequence:
            return sequences
        return [self.find(*pair) for pair in zip(sequences, sources, strict=True)]

    def settle(self, state: DelayedState, sequences: Sequence[int]) -> None:
        """Record a state that became durable."""
        first = pack_state(state, 0)
        self.undispatched.extend([first | sequence for sequence in sequences])
        self.settled += len(sequences)

    def forget_waiting(self, copied: BucketState, dispatched: int) -> None:
        """Forget the messages and the first `dispatched` states that were copied to the files."""
        count = copied.next_sequence - self.copied.next_sequence
        self.waiting = self.waiting.part(count, len(self.waiting))
        left = self.undispatched[dispatched:]
        # In this order: `states` reads the two in the reverse order, in any thread, and so misses no state.
        self.copied = copied
        self.undispatched = left


def empty_bucket(bucket: int) -> Bucket:
    """A new bucket, without files."""
    return Bucket(BucketState(bucket, 0, 0, 0, 0, 0))


def is_over(bucket: Bucket, bucket_ms: int, now_ms: int, grace_ms: int) -> bool:
    """Whether a bucket is finished, so that its files may be deleted once they hold all of its states.

    Requires: `now_ms` is the log's own time. It never goes back, so later messages never belong to
    an earlier bucket.
    """
    return not bucket.pending and bucket.bucket + bucket_ms + grace_ms <= now_ms


LOGS: Final = (layout.SCHEDULE, layout.DISPATCH)
