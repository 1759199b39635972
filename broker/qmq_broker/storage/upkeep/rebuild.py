"""Rebuilds derived files of a stopped broker; the logs are only read.

A start does the same on its own if such a file is missing or wrong. Doing it before shortens that
start, and repairs files whose damage no checksum shows. The consume queues are rebuilt only up to
the durable end, so that they do not cover frames that a power cut may still remove. Their table is
removed durably first and written last: a crash in between is a start without it.
"""

from __future__ import annotations

import os

import msgspec

from qmq_broker.errors import CorruptionError
from qmq_broker.options import StoreOptions
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.checkpoint import START, CheckpointFiles, LogPoint
from qmq_broker.storage.files.disk_port import Disk
from qmq_broker.storage.files.format_file import Format, required_format
from qmq_broker.storage.files.journal import remove_journal
from qmq_broker.storage.files.retained import Retained, read_retained
from qmq_broker.storage.files.sharing import refuse_shared
from qmq_broker.storage.logs.frame_scan import FrameScan
from qmq_broker.storage.logs.kinds import COMMIT_KINDS
from qmq_broker.storage.logs.log_recovery import examine
from qmq_broker.storage.logs.segments import Segments
from qmq_broker.storage.logs.summary import remove_summaries
from qmq_broker.storage.queues.consume_queues import UNFLUSHED_BYTES_MAX, ConsumeQueues
from qmq_broker.storage.queues.queue_table import remove_queue_tables
from qmq_broker.storage.staging import stage_scanned
from qmq_broker.storage.upkeep.inspect_files import inspect_files
from qmq_client.clock import Clock
from qmq_client.wire.errors import ProtocolError


class Rebuilt(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a rebuild."""

    subjects: int
    #: Entries of the consume queues.
    entries: int
    #: Commit log offset up to which they are in their files.
    indexed_offset: int
    #: Key index files that were removed; the broker rebuilds them in the background.
    index_files: int
    #: Summaries of segments that were removed; rebuilt in the same way.
    summaries: int
    #: Files of the journal of ids that were removed; the next start reads frames instead.
    id_files: int
    duration_ms: int


def rebuild_store(disk: Disk, clock: Clock, *, with_index: bool = False) -> Rebuilt:
    """Rebuild the consume queues; with `with_index` also remove key index, summaries and ids.

    Raises `LockedError`, `SharedFilesError`, `UnknownFormatError`, and `CorruptionError` with
    nothing changed if the logs are damaged where they must be read.
    """
    began_s = clock.monotonic_s()
    format_ = required_format(
        disk
    )  # before the lock, which would create a file in a foreign directory
    lock = disk.lock(layout.LOCK, f"pid {os.getpid()} (store rebuild)")
    try:
        refuse_shared(disk)
        inspect_files(disk, format_, len)  # files of another version are refused in both logs
        retained = read_retained(disk, format_.store_id)
        segments = Segments(disk, layout.COMMIT_LOG, format_.segment_bytes)
        try:
            next_offset = _durable_offset(disk, segments, format_, retained)
            queues = _make_queues(disk, segments, format_, retained, next_offset)
        finally:
            segments.close()
        index_files = remove_index(disk) if with_index else 0
        summaries = remove_summaries(disk) if with_index else 0
        id_files = remove_journal(disk, layout.IDS) if with_index else 0
    finally:
        lock.release()
    return Rebuilt(
        subjects=len(queues),
        entries=sum(queues.values()),
        indexed_offset=next_offset,
        index_files=index_files,
        summaries=summaries,
        id_files=id_files,
        duration_ms=round((clock.monotonic_s() - began_s) * 1000),
    )


def _durable_offset(disk: Disk, segments: Segments, format_: Format, retained: Retained) -> int:
    """The offset up to which the log is good and durable; the whole log is read before any change."""
    last = CheckpointFiles(disk, format_.store_id).read()
    first_offset = retained.first_offset
    known = last.commit_log if last else START
    point = LogPoint(
        durable_offset=max(known.durable_offset, first_offset),
        last_frame_offset=first_offset,
        last_stored_at_ms=known.last_stored_at_ms,
    )
    finding = examine(
        segments,
        COMMIT_KINDS,
        store_id=format_.store_id,
        point=point,
        first_offset=first_offset,
    )
    return finding.durable_offset


def _make_queues(
    disk: Disk, segments: Segments, format_: Format, retained: Retained, next_offset: int
) -> dict[str, int]:
    """Write the queues; returns for each subject the number of entries in its files."""
    _remove_queues(disk)
    options = StoreOptions(queue_entries_per_file=format_.queue_entries_per_file)
    queues = ConsumeQueues(disk, options, format_.store_id)
    try:
        for directory in (layout.STATE, layout.CONSUME_QUEUES):
            disk.make_directory(directory)
        disk.sync_directory(layout.ROOT)
        queues.load(next_offset, retained)
        scan = FrameScan(
            segments, COMMIT_KINDS, store_id=format_.store_id, first_offset=retained.first_offset
        )
        for frame in scan if retained.first_offset < next_offset else ():
            try:
                stage_scanned(queues, frame)
            except ProtocolError as error:
                raise CorruptionError(
                    segment=segments.path(frame.offset), offset=frame.offset, reason=str(error)
                ) from error
            queues.make_visible()
            if queues.unflushed_bytes > UNFLUSHED_BYTES_MAX:
                queues.flush_entries()
            if scan.next_offset >= next_offset:
                break
        queues.flush(next_offset)
        found = {subject: queues.visible(subject) for subject in queues.subjects()}
        return {
            subject: queue.next_sequence - queue.first_sequence
            for subject, queue in found.items()
            if queue is not None
        }
    finally:
        queues.close()


def _remove_queues(disk: Disk) -> None:
    remove_queue_tables(disk)
    remove_journal(disk, layout.ENTRIES)
    for name in disk.names(layout.CONSUME_QUEUES):
        subject = layout.parse_subject(name)
        if subject is None:
            continue
        for number in disk.names(layout.queue_directory(subject)):
            base = layout.parse_number(number)
            if base is not None:
                disk.unlink(layout.queue_path(subject, base))
        disk.sync_directory(layout.queue_directory(subject))


def remove_index(disk: Disk) -> int:
    """Remove the key index, its table first; returns how many files.

    A crash at any step is safe.
    """
    if layout.INDEX_TABLE.rpartition("/")[2] in disk.names(layout.STATE):
        disk.unlink(layout.INDEX_TABLE)
        disk.sync_directory(layout.STATE)
    names = [name for name in disk.names(layout.INDEX) if layout.is_index_name(name)]
    for name in names:
        disk.unlink(layout.index_path(name))
    if names:
        disk.sync_directory(layout.INDEX)
    return len(names)
