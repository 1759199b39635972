"""The quarantine of damaged files of delayed messages whose content the commit log still has.

The files of a bucket are copies from the commit log, until its segments are removed. If the log
reaches back to the first message of the bucket, and is valid from there on, both files of a damaged
bucket are removed. The table then no longer covers them, nor messages copied from that first
message on, so the next start derives the bucket from the log with the same sequences and states,
and nothing is lost.

If the log does not have all messages, the files are the only copy and nothing of them is discarded.
They stay in the table, and a start holds back and counts damaged messages. A file shorter than its
length in the table would stop a start: it is reported and filled with zeros, which count as damage,
so that a restored file still matches later. Without a table a start would judge by the files alone,
which is impossible with damaged ones.

The table is replaced first, then the files are removed: an interrupted run is repeated, or a start
completes it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec

from qmq_broker.errors import CorruptionError
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.disk_port import Disk
from qmq_broker.storage.files.faults import Fault, Level
from qmq_broker.storage.files.format_file import Format
from qmq_broker.storage.files.journal import remove_journal
from qmq_broker.storage.files.small_file import replace_file
from qmq_broker.storage.schedule.bucket import (
    LOGS,
    Bucket,
    BucketState,
    ScheduleTable,
    read_table,
)
from qmq_broker.storage.schedule.columns import Subjects
from qmq_broker.storage.schedule.files import ScheduleFiles
from qmq_broker.storage.upkeep.inspect_log import DamagedRange
from qmq_broker.storage.upkeep.quarantine_report import QuarantineReport, write_report
from qmq_broker.storage.upkeep.verify_journals import schedule_faults
from qmq_client.clock import Clock

_log = logging.getLogger(__name__)


class _ShortFile(NamedTuple):
    """A file that ends before its synced end, without another copy of the rest."""

    log: str
    bucket: int
    there_bytes: int
    synced_bytes: int
    #: Pending messages that are in no other part of the file.
    lost: int


class ScheduleQuarantine:
    """One run over the files of delayed messages. `prepare` changes nothing."""

    def __init__(
        self, disk: Disk, clock: Clock, format_: Format, *, first_offset: int, next_offset: int
    ) -> None:
        """Both offsets are those of the commit log."""
        store_id = format_.store_id
        self._disk = disk
        self._clock = clock
        self._store_id = store_id
        self._segment_bytes = format_.segment_bytes
        self._first_offset = first_offset
        self._files = ScheduleFiles(disk, store_id)
        faults = schedule_faults(disk, store_id, next_offset)
        #: One fault per damaged bucket.
        self._damaged = {
            bucket: fault
            for fault in faults
            if fault.level is Level.DAMAGED and (bucket := _bucket_of(fault)) is not None
        }
        self._table = read_table(disk, store_id)
        #: Files to be filled.
        self._short: list[_ShortFile] = []

    def prepare(self, holes: Sequence[DamagedRange]) -> None:
        """Decide which buckets to derive again from the log, which has these holes, and which files to fill.

        Raises `CorruptionError` if neither the log nor the table has the messages.
        """
        states = {state.bucket: state for state in self._table.buckets} if self._table else {}
        for bucket in [bucket for bucket in self._damaged if self._lacks(bucket, holes)]:
            fault = self._damaged.pop(bucket)
            if bucket not in states:
                raise CorruptionError(
                    segment=fault.file,
                    offset=fault.offset or 0,
                    reason=f"{fault.what}; the commit log does not have all of its messages any more",
                )
            self._short += self._short_files(states[bucket])
            _log.warning("left unchanged, damaged messages will be held: file=%s", fault.file)

    def run(self) -> list[QuarantineReport]:
        """Remove files of damaged buckets, report and fill short ones; durable on return."""
        if self._damaged:
            self._remove()
        return [self._filled(short) for short in self._short]

    def _remove(self) -> None:
        remove_journal(
            self._disk, layout.ENTRIES
        )  # the table says that the files have all messages
        if self._table is not None:
            table = self._without_damaged(self._table)
            replace_file(self._disk, layout.SCHEDULE_TABLE, msgspec.msgpack.encode(table))
        for log in LOGS:
            for bucket, fault in self._damaged.items():
                if self._files.has(log, bucket):
                    self._files.remove(log, bucket)
                    self._disk.sync_directory(layout.bucket_directory(log, bucket))
                    path = layout.bucket_path(log, bucket)
                    _log.warning(
                        "will be rebuilt from the commit log: file=%s reason=%s", path, fault.what
                    )

    def _without_damaged(self, table: ScheduleTable) -> ScheduleTable:
        """The table without the buckets that are derived again.

        For those buckets, the log is read from the segment with their first message on.
        """
        first_source = min(self._first_source(bucket) or 0 for bucket in self._damaged)
        kept = tuple(state for state in table.buckets if state.bucket not in self._damaged)
        return ScheduleTable(
            store_id=table.store_id,
            copied_offset=first_source - first_source % self._segment_bytes,
            bucket_ms=table.bucket_ms,
            buckets=kept,
            pending=self._pending(kept),
        )

    def _pending(self, states: Iterable[BucketState]) -> dict[str, int]:
        """Pending messages per subject, as far as they can be read."""
        pending: Counter[str] = Counter()
        subjects = Subjects()
        for state in states:
            with suppress(CorruptionError):
                settled = Bucket(state).states(self._files)
                for part in self._files.columns(
                    state.bucket, subjects, next_position=state.schedule_bytes
                ):
                    waiting = settled.pending(part.sequences)
                    pending.update(subjects.names[part.subjects[index]] for index in waiting)
        return dict(pending)

    def _filled(self, short: _ShortFile) -> QuarantineReport:
        """Report the missing part, then fill it with zeros."""
        report = QuarantineReport(
            store_id=self._store_id.hex(),
            at_ms=self._clock.now_ms(),
            first_offset=short.bucket + short.there_bytes,
            next_offset=short.bucket + short.synced_bytes,
            reason=f"{short.synced_bytes} bytes were synced, {short.there_bytes} are there",
            lost=(),
            log=short.log,
            delayed=short.lost,
            may_hold_delayed=short.log == layout.DISPATCH,
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
        """Close the files."""
        self._files.close()

    def _lacks(self, bucket: int, holes: Sequence[DamagedRange]) -> bool:
        """Whether the log lacks messages of a bucket."""
        first_source = self._first_source(bucket)
        if first_source is None or first_source < self._first_offset:
            return True
        return any(hole.next_offset > first_source for hole in holes)

    def _short_files(self, state: BucketState) -> Iterator[_ShortFile]:
        lengths = zip(LOGS, (state.schedule_bytes, state.dispatch_bytes), strict=True)
        for log, synced_bytes in lengths:
            there_bytes = self._files.length(log, state.bucket)
            if there_bytes < synced_bytes:
                lost = self._lost(state, there_bytes) if log == layout.SCHEDULE else 0
                yield _ShortFile(log, state.bucket, there_bytes, synced_bytes, lost)

    def _lost(self, state: BucketState, there_bytes: int) -> int:
        """Pending messages of a bucket that are not in the first bytes of its file."""
        left = msgspec.structs.replace(state, schedule_bytes=there_bytes)
        readable = sum(self._pending([left]).values())
        return state.next_sequence - state.dispatched - readable

    def _first_source(self, bucket: int) -> int | None:
        """Commit log offset of the bucket's first record; None if unknown."""
        if not self._first_offset:
            return 0  # no segment was ever deleted
        if not self._files.has(layout.SCHEDULE, bucket):
            return None
        length = self._files.length(layout.SCHEDULE, bucket)
        try:
            columns = self._files.columns(bucket, Subjects(), next_position=length)
            return next((part.sources[0] for part in columns), None)
        except CorruptionError:
            return None


def _bucket_of(fault: Fault) -> int | None:
    """The bucket that a fault concerns; None for a fault of another file."""
    log, _, name = fault.file.partition("/")
    return layout.parse_bucket(name.rpartition("/")[2]) if log in LOGS else None
