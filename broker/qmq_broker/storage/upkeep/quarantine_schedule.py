"""Damaged files of delayed messages, given up where the commit log still has all that was in them.

A bucket's files are copies out of the commit log until its segments go. As long as the log reaches back to
the bucket's first message, and is whole from there on, both files of a damaged bucket are removed, with the
table: the next start derives the bucket from the log, with the same sequences and the same fates, and
nothing is lost. Where the log does not reach so far the files are the only copy: nothing is given up. They
are left for a start, which holds what is damaged and counts it, unless it would halt for them. First what is
damaged goes, then what only goes with it, so that an interrupted run is begun again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from qmq_broker.errors import CorruptionError
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.disk import Disk
from qmq_broker.storage.files.faults import Fault, Level
from qmq_broker.storage.files.journal import remove_journal
from qmq_broker.storage.schedule.bucket import LOGS, BucketState, read_table
from qmq_broker.storage.schedule.columns import Subjects
from qmq_broker.storage.schedule.files import ScheduleFiles
from qmq_broker.storage.upkeep.backup_copy import is_there
from qmq_broker.storage.upkeep.inspect_log import DamagedRange
from qmq_broker.storage.upkeep.verify_schedule import schedule_faults

_log = logging.getLogger(__name__)


class ScheduleQuarantine:
    """One run over the files of delayed messages. `prepare` changes nothing."""

    def __init__(self, disk: Disk, store_id: bytes, *, first_offset: int, next_offset: int) -> None:
        """The two offsets are those of the commit log."""
        self._disk = disk
        self._store_id = store_id
        self._first_offset = first_offset
        self._files = ScheduleFiles(disk, store_id)
        faults = schedule_faults(disk, store_id, next_offset)
        #: One fault of each damaged bucket.
        self._damaged = {
            bucket: fault
            for fault in faults
            if fault.level is Level.DAMAGED and (bucket := _bucket_of(fault)) is not None
        }

    def prepare(self, holes: Sequence[DamagedRange]) -> None:
        """Decide what is to be made again from the log, which has these holes.

        Raises `CorruptionError` for what the log does not have and a start would halt for: a file that
        is shorter than the table says, or any, when the table cannot stay.
        """
        lacking = [bucket for bucket in self._damaged if self._lacks(bucket, holes)]
        table = read_table(self._disk, self._store_id)
        states = {state.bucket: state for state in table.buckets} if table else {}
        stays = not holes and len(lacking) == len(self._damaged)
        for bucket in lacking:
            fault = self._damaged[bucket]
            if not stays or bucket not in states or self._is_short(states[bucket]):
                raise CorruptionError(
                    segment=fault.file,
                    offset=fault.offset or 0,
                    reason=f"{fault.what}; the commit log does not have all of its messages any more",
                )
            del self._damaged[bucket]
            _log.warning("left, what is damaged will be held: file=%s", fault.file)

    def run(self) -> int:
        """Remove the files of damaged buckets; durable on return. How many buckets that were."""
        if not self._damaged:
            return 0
        if is_there(self._disk, layout.SCHEDULE_TABLE):
            self._disk.unlink(layout.SCHEDULE_TABLE)
            self._disk.sync_directory(layout.STATE)
        remove_journal(self._disk, layout.ENTRIES)  # it says that the files have everything
        for log in LOGS:
            for bucket, fault in self._damaged.items():
                if self._files.has(log, bucket):
                    self._files.remove(log, bucket)
                    self._disk.sync_directory(layout.bucket_directory(log, bucket))
                    path = layout.bucket_path(log, bucket)
                    _log.warning(
                        "to be made again from the commit log: file=%s reason=%s", path, fault.what
                    )
        return len(self._damaged)

    def close(self) -> None:
        """Give the files back."""
        self._files.close()

    def _lacks(self, bucket: int, holes: Sequence[DamagedRange]) -> bool:
        """Whether the log does not have all messages of a bucket."""
        first_source = self._first_source(bucket)
        if first_source is None or first_source < self._first_offset:
            return True
        return any(hole.next_offset > first_source for hole in holes)

    def _is_short(self, state: BucketState) -> bool:
        lengths = zip(LOGS, (state.schedule_bytes, state.dispatch_bytes), strict=True)
        return any(self._files.length(log, state.bucket) < length for log, length in lengths)

    def _first_source(self, bucket: int) -> int | None:
        """Where the bucket's first record stands in the commit log; None when nobody can say."""
        if not self._first_offset:
            return 0  # nothing was ever given up
        if not self._files.has(layout.SCHEDULE, bucket):
            return None
        length = self._files.length(layout.SCHEDULE, bucket)
        try:
            columns = self._files.columns(bucket, Subjects(), next_position=length)
            return next((part.sources[0] for part in columns), None)
        except CorruptionError:
            return None


def _bucket_of(fault: Fault) -> int | None:
    """The bucket that a fault is about; None for a fault of another file."""
    log, _, name = fault.file.partition("/")
    return layout.parse_bucket(name.rpartition("/")[2]) if log in LOGS else None
