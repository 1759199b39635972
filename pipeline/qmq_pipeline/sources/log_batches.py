"""The batch readers of the format `qmq`.

There are two, because Spark refuses every read of a reader that takes filters if its session has
that switched off, which is the default. The option `pushdown` chooses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, InputPartition

from qmq_pipeline.places.options import LogOptions
from qmq_pipeline.places.places import open_log
from qmq_pipeline.rows.filters import narrow
from qmq_pipeline.sources.log_partitions import (
    LogPartition,
    chosen_offsets,
    log_of,
    plan,
    read_partition,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.datasource import Filter


def batch_reader(options: LogOptions) -> DataSourceReader:
    """The reader that these options ask for."""
    return FilteringLogBatchReader(options) if options.takes_filters else LogBatchReader(options)


class LogBatchReader(DataSourceReader):
    """Reads the log from its beginning, or from where the options say, to its durable end."""

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
    """The same, without what the query's own conditions on subject, time and offset exclude."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        self._options, rest = narrow(self._options, filters)
        return rest
