"""The batch readers of the format `qmq`: parts of a log, planned in the driver and read in the workers.

There are two readers, because Spark refuses to use a reader with filters if the session has
pushdown switched off, which is the default. The option `pushdown` chooses.

The decoding code is imported only in the workers: planning a batch, and each stream, runs in a separate process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import DataSourceReader, InputPartition

from qmq_broker.storage.files.format_file import Format
from qmq_broker.storage.logs.frame_seek import LogRange
from qmq_client.wire.record import TIME_MAX_MS
from qmq_pipeline.errors import ExpiredRangeError
from qmq_pipeline.places.log import ACTION_LOG, COMMIT_LOG, LogBounds, LogReader
from qmq_pipeline.places.options import LogOptions
from qmq_pipeline.places.places import open_log
from qmq_pipeline.sources.worker_heap import prepare_heap
from qmq_pipeline.tables.schemas import ACTIONS, LOG

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.datasource import Filter

#: Number of tasks of a scan: each costs Spark some 10 ms, a long task takes long to repeat, and all
#: cores must be busy to the end. So there are sixteen, fewer if they would be short and more if
#: they would be long.
_SHARES: Final = 16
_SHARE_BYTES_MIN: Final = 64 * 1024 * 1024
_SHARE_BYTES_MAX: Final = 128 * 1024 * 1024
#: An even number, because cores mostly come in pairs.
_PAIR: Final = 2


@dataclass(frozen=True, slots=True)
class LogPartition(InputPartition):
    """The range of one task."""

    options: LogOptions
    #: The store that it was planned for.
    format: Format
    first_offset: int
    next_offset: int
    #: Whether retention had deleted the range before it was read.
    is_expired: bool = False


def batch_reader(options: LogOptions) -> DataSourceReader:
    """The reader for these options."""
    return FilteringLogBatchReader(options) if options.takes_filters else LogBatchReader(options)


class LogBatchReader(DataSourceReader):
    """Reads the log from its beginning, or the offset in the options, to its durable end."""

    def __init__(self, options: LogOptions) -> None:
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        log = open_log(self._options.place, log_of(self._options))
        try:
            first, after = chosen_offsets(log, self._options)
            return plan(log, self._options, first, after)
        finally:
            log.close()

    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        # Spark makes one partition of None from an empty list.
        return read_partition(partition) if isinstance(partition, LogPartition) else iter(())


class FilteringLogBatchReader(LogBatchReader):
    """The same with filters: leaves out rows that the query's conditions on subject, time and offset exclude."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        from qmq_pipeline.rows.filters import narrow

        self._options, rest = narrow(self._options, filters)
        return rest


def log_of(options: LogOptions) -> str:
    """The log from which the table is read."""
    return ACTION_LOG if options.table is ACTIONS else COMMIT_LOG


def chosen_offsets(log: LogReader, options: LogOptions) -> tuple[int, int]:
    """The range of the log in the options; raises `ExpiredRangeError`."""
    bounds = log.bounds()
    first, after = bounds.first_offset, bounds.next_offset
    if options.first_offset is not None:
        check_retained(options.first_offset, bounds, options)
        first = log.frame_from(options.first_offset, bounds)
    if options.next_offset is not None:
        after = log.frame_from(options.next_offset, bounds)
    if options.skip_below_offset:
        first = max(first, log.frame_from(options.skip_below_offset, bounds))
    if options.first_stored_at_ms:
        first = max(first, log.offset_at(options.first_stored_at_ms, bounds))
    # An action is slightly older than its frame, which may be the next one.
    if options.next_stored_at_ms < TIME_MAX_MS and options.table is not ACTIONS:
        after = min(after, log.offset_at(options.next_stored_at_ms, bounds))
    return first, max(first, after)


def check_retained(first_offset: int, bounds: LogBounds, options: LogOptions) -> None:
    """Raise `ExpiredRangeError` if the log begins after `first_offset`."""
    if first_offset < bounds.first_offset:
        raise ExpiredRangeError(
            source=options.place.name,
            reason=f"offset {first_offset} is asked for, but retention has deleted the log "
            f"below {bounds.first_offset}",
            remedy="Begin there, or read an archive",
        )


def plan(log: LogReader, options: LogOptions, first: int, after: int) -> list[InputPartition]:
    """One partition for each share of this part of the log; for writers of parts, one for each part."""
    prepare_heap()
    if options.has_whole_parts:
        shares = log.parts(first, after, log.part_bytes(options.part_bytes_max))
    else:
        shares = log.shares(first, after, _share_count(after - first, options.partition_bytes))
    return [LogPartition(options, log.format, one.first_offset, one.next_offset) for one in shares]


def _share_count(log_bytes: int, asked_bytes: int | None) -> int:
    """The number of shares for this many bytes of a log."""
    if asked_bytes is not None:
        return -(-log_bytes // asked_bytes)
    share_bytes = min(max(_SHARE_BYTES_MIN, log_bytes // _SHARES), _SHARE_BYTES_MAX)
    return max(1, _PAIR * round(log_bytes / share_bytes / _PAIR))


def read_partition(partition: LogPartition) -> Iterator[pa.RecordBatch]:
    """The rows of one range."""
    from qmq_pipeline.rows import actions, decode, log_rows
    from qmq_pipeline.rows.quarantined import without_quarantined

    prepare_heap()
    rows_of = {ACTIONS: actions.batches, LOG: log_rows.log_batches}
    options = partition.options
    log = open_log(options.place, log_of(options), partition.format)
    try:
        selection = decode.Selection(
            columns=options.columns,
            table=options.table,
            subjects=options.subjects,
            first_stored_at_ms=options.first_stored_at_ms,
            next_stored_at_ms=options.next_stored_at_ms,
            part_bytes=log.part_bytes(options.part_bytes_max),
        )
        within = LogRange(partition.first_offset, partition.next_offset)
        if partition.is_expired:
            yield from log_rows.rows_batch([log_rows.expired_row(*within)], selection)
            return
        frames = without_quarantined(log.frames(within), options)
        yield from rows_of.get(options.table, decode.batches)(frames, selection)
    finally:
        log.close()
