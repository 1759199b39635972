"""Spark's data source `qmq`: the logs of a broker as tables, in batches; `log_stream.py` has streams.

::

    spark.read.format("qmq").option("path", "/var/lib/qmq").option("columns", "subject,stored_at").load()

A partition is a range of the log that begins and ends at frames. The driver reads a few bytes of each
segment to plan; workers read, verify and decode, and hand Arrow batches on. A range that is read twice
gives the same rows (P1): what it holds never changes, and nothing beyond the durable end is planned.

There are two readers because a reader that can take filters makes every read fail in a session where
that is switched off, which is Spark's default. The option `pushdown` chooses; `spark/session.py` sets both.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)

from qmq_pipeline.places.options import LogOptions, parse_columns, parse_log_options
from qmq_pipeline.places.places import open_log, with_token
from qmq_pipeline.rows.filters import narrow
from qmq_pipeline.sources.archive_partitions import (
    ArchivePartition,
    is_archive,
    plan_archive,
    read_archive,
)
from qmq_pipeline.sources.log_partitions import (
    LogPartition,
    chosen_offsets,
    log_of,
    plan,
    read_partition,
)
from qmq_pipeline.sources.log_stream import LogStreamReader

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.datasource import Filter
    from pyspark.sql.types import StructType


FORMAT: Final = "qmq"


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

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return LogStreamReader(self._options(schema))

    def _options(self, schema: StructType) -> LogOptions:
        """The columns are those of the schema: the user may have given a narrower one."""
        options = parse_log_options(self.options)
        return replace(
            options,
            place=with_token(options.place, os.environ),
            columns=parse_columns(",".join(schema.fieldNames()), options.table),
        )


class LogBatchReader(DataSourceReader):
    """Reads the log from where it begins, or the option says, to what is durable now."""

    def __init__(self, options: LogOptions) -> None:
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        if is_archive(self._options.place):
            return plan_archive(self._options)
        log = open_log(self._options.place, log_of(self._options))
        try:
            first, after = chosen_offsets(log, self._options)
            return plan(log, self._options, first, after)
        finally:
            log.close()

    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        if isinstance(partition, ArchivePartition):
            return read_archive(partition)
        # Spark makes one partition of None out of none at all.
        return read_partition(partition) if isinstance(partition, LogPartition) else iter(())


class FilteringLogBatchReader(LogBatchReader):
    """The same; leaves out what the query's own conditions on subject, time and offset exclude."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        self._options, rest = narrow(self._options, filters)
        return rest
