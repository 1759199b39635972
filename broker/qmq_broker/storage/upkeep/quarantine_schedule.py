"""Damaged files of delayed messages, given up where the commit log still has all that was in them.

A bucket's files are copies out of the commit log until its segments go. As long as the log reaches back to
the bucket's first message, and is whole from there on, both files of a damaged bucket are removed, with the
table: the next start derives the bucket from the log, with the same sequences and the same fates, and
nothing is lost. Where the log does not reach so far the files are the only copy: nothing of them is given up.
They are left for a start, which holds what is damaged and counts it. A start would halt for a file that is
shorter than the table says: such a one is reported and filled with zeros, which is damage like any other, so
that a file that is put back later still fits. First what is damaged goes, then what only goes with it, so
that an interrupted run is begun again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from qmq_broker.clock import Clock
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
from qmq_broker.storage.upkeep.quarantine_report import QuarantineReport, write_report
from qmq_broker.storage.upkeep.verify_schedule import schedule_faults

_log = logging.getLogger(__name__)


class _ShortFile(NamedTuple):
    """A file that ends before what was synced, and nobody has the rest."""

    log: str
    bucket: int
    there_bytes: int
    synced_bytes: int


class ScheduleQuarantine:
    """One run over the files of delayed messages. `prepare` changes nothing."""

    def __init__(
        self, disk: Disk, clock: Clock, store_id: bytes, *, first_offset: int, next_offset: int
    ) -> None:
        """The two offsets are those of the commit log."""
        self._disk = disk
        self._clock = clock
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
        #: Files to be filled.
        self._short: list[_ShortFile] = []

    def prepare(self, holes: Sequence[DamagedRange]) -> None:
        """Decide what is to be made again from the log, which has these holes, and what is filled.

        Raises `CorruptionError` for what the log does not have when the table cannot stay either.
        """
        lacking = [bucket for bucket in self._damaged if self._lacks(bucket, holes)]
        table = read_table(self._disk, self._store_id)
        states = {state.bucket: state for state in table.buckets} if table else {}
        stays = not holes and len(lacking) == len(self._damaged)
        for bucket in lacking:
            fault = self._damaged[bucket]
            if not stays or bucket not in states:
                raise CorruptionError(
                    segment=fault.file,
                    offset=fault.offset or 0,
                    reason=f"{fault.what}; the commit log does not have all of its messages any more",
                )
            del self._damaged[bucket]
            self._short += self._short_files(states[bucket])
            _log.warning("left, what is damaged will be held: file=%s", fault.file)

    def run(self) -> list[QuarantineReport]:
        """Remove the files of damaged buckets, or report and fill short ones; durable on return."""
        if self._damaged:
            self._remove()
        return [self._filled(short) for short in self._short]

    def _remove(self) -> None:
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

    def _filled(self, short: _ShortFile) -> QuarantineReport:
        """Say what is missing, then put zeros in its place."""
        report = QuarantineReport(
            store_id=self._store_id.hex(),
            at_ms=self._clock.now_ms(),
            first_offset=short.bucket + short.there_bytes,
            next_offset=short.bucket + short.synced_bytes,
            reason=f"{short.synced_bytes} bytes were synced, {short.there_bytes} are there",
            lost=(),
            log=short.log,
        )
        write_report(self._disk, report)
        directory = layout.bucket_directory(short.log, short.bucket)
        self._disk.make_directory(directory)
        self._disk.sync_directory(short.log)
        file = self._disk.open(layout.bucket_path(short.log, short.bucket), is_new=True)
        try:
            file.allocate(short.synced_bytes)
            file.sync()
        finally:
            file.close()
        self._disk.sync_directory(directory)
        return report

    def close(self) -> None:
        """Give the files back."""
        self._files.close()

    def _lacks(self, bucket: int, holes: Sequence[DamagedRange]) -> bool:
        """Whether the log does not have all messages of a bucket."""
        first_source = self._first_source(bucket)
        if first_source is None or first_source < self._first_offset:
            return True
        return any(hole.next_offset > first_source for hole in holes)

    def _short_files(self, state: BucketState) -> Iterator[_ShortFile]:
        lengths = zip(LOGS, (state.schedule_bytes, state.dispatch_bytes), strict=True)
        for log, synced_bytes in lengths:
            there_bytes = self._files.length(log, state.bucket)
            if there_bytes < synced_bytes:
                yield _ShortFile(log, state.bucket, there_bytes, synced_bytes)

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
