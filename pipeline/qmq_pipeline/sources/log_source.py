"""Spark's data source `qmq`: the logs of a broker as tables, batch.

::

    spark.read.format("qmq").option("path", "/var/lib/qmq").option("columns", "subject,stored_at").load()

A partition is a range of the log that begins and ends at frames. The driver reads a few bytes of each
segment to plan; workers read, verify and decode, and hand Arrow batches on. A range that is read twice
gives the same rows (P1): what it holds never changes, and nothing beyond the durable end is planned.

There are two readers because a reader that can take filters makes every read fail in a session where
that is switched off, which is Spark's default. The option `pushdown` chooses; `session.py` sets both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from qmq_pipeline import action_rows
from qmq_pipeline.decode import Selection, batches
from qmq_pipeline.errors import ExpiredRangeError
from qmq_pipeline.filters import narrow
from qmq_pipeline.log import ACTION_LOG, COMMIT_LOG, LogBounds, LogReader
from qmq_pipeline.options import LogOptions, parse_columns, parse_log_options
from qmq_pipeline.places import open_log
from qmq_pipeline.schemas import ACTIONS

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.datasource import Filter
    from pyspark.sql.types import StructType


FORMAT: Final = "qmq"


@dataclass(frozen=True, slots=True)
class LogPartition(InputPartition):
    """What one task reads."""

    options: LogOptions
    first_offset: int
    next_offset: int


class LogDataSource(DataSource):
    """The format `qmq`."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> str:
        options = parse_log_options(self.options)
        return options.table.ddl(options.columns)

    def reader(self, schema: StructType) -> DataSourceReader:
        options = self._options(schema)
        return (
            FilteringLogBatchReader(options) if options.takes_filters else LogBatchReader(options)
        )

    def _options(self, schema: StructType) -> LogOptions:
        """The columns are those of the schema: the user may have given a narrower one."""
        options = parse_log_options(self.options)
        return replace(options, columns=parse_columns(",".join(schema.fieldNames()), options.table))


class LogBatchReader(DataSourceReader):
    """Reads the log from where it begins, or the option says, to what is durable now."""

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
        # Spark makes one partition of None out of none at all.
        return read_partition(partition) if isinstance(partition, LogPartition) else iter(())


class FilteringLogBatchReader(LogBatchReader):
    """The same; leaves out what the query's own conditions on subject, time and offset exclude."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        self._options, rest = narrow(self._options, filters)
        return rest


def log_of(options: LogOptions) -> str:
    """Which log the table is read from."""
    return ACTION_LOG if options.table is ACTIONS else COMMIT_LOG


def chosen_offsets(log: LogReader, options: LogOptions) -> tuple[int, int]:
    """From where to where these options want the log; raises `ExpiredRangeError`."""
    bounds = log.bounds()
    first, after = bounds.first_offset, bounds.next_offset
    if options.first_offset is not None:
        check_retained(options.first_offset, bounds, options)
        first = options.first_offset
    if options.next_offset is not None:
        after = min(after, options.next_offset)
    if options.first_stored_at_ms:
        first = max(first, log.offset_at(options.first_stored_at_ms, bounds))
    return first, max(first, after)


def check_retained(first_offset: int, bounds: LogBounds, options: LogOptions) -> None:
    """Raise `ExpiredRangeError` when the log begins behind `first_offset`."""
    if first_offset < bounds.first_offset:
        raise ExpiredRangeError(
            source=options.place.name,
            reason=f"offset {first_offset} is asked for, but retention has given up everything "
            f"below {bounds.first_offset}",
            remedy="Begin there, or read an archive",
        )


def plan(log: LogReader, options: LogOptions, first: int, after: int) -> list[InputPartition]:
    """One partition for each range."""
    ranges = log.ranges(first, after, options.partition_bytes)
    return [LogPartition(options, one.first_offset, one.next_offset) for one in ranges]


def read_partition(partition: LogPartition) -> Iterator[pa.RecordBatch]:
    """The rows of one range."""
    from qmq_broker.storage.frame_seek import LogRange

    options = partition.options
    log = open_log(options.place, log_of(options))
    try:
        frames = log.frames(LogRange(partition.first_offset, partition.next_offset))
        if options.table is ACTIONS:
            yield from action_rows.batches(frames, options.columns)
            return
        yield from batches(
            frames,
            Selection(
                columns=options.columns,
                table=options.table,
                subjects=options.subjects,
                first_stored_at_ms=options.first_stored_at_ms,
                next_stored_at_ms=options.next_stored_at_ms,
            ),
        )
    finally:
        log.close()
