"""Spark's data source `qmq_outbox`: the rows of one or many outbox tables; `outbox_stream.py` has streams.

::

    spark.read.format("qmq_outbox").option("url", "postgresql://reader@db/orders").load()
    spark.read.format("qmq_outbox").option("database", "orders,payments").load()    # of qmq.toml

Bodies stay in the database. A partition is a range of row numbers, read in short transactions.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)

from qmq_pipeline.places.outbox_options import OutboxOptions, parse_outbox_options
from qmq_pipeline.sources.outbox_partitions import OutboxPartition, plan, read_partition
from qmq_pipeline.sources.outbox_stream import OutboxStreamReader
from qmq_pipeline.tables.schemas import OUTBOX

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

FORMAT: Final = "qmq_outbox"


class OutboxDataSource(DataSource):
    """The format `qmq_outbox`."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> str:
        # A wrong option is said here, by `load`: a stream would say it in a thread of its own.
        parse_outbox_options(self.options, os.environ, OUTBOX.names)
        return OUTBOX.ddl()

    def reader(self, schema: StructType) -> DataSourceReader:
        return OutboxBatchReader(self._options(schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return OutboxStreamReader(self._options(schema))

    def _options(self, schema: StructType) -> OutboxOptions:
        return parse_outbox_options(self.options, os.environ, schema.fieldNames())


class OutboxBatchReader(DataSourceReader):
    """Reads every row that is there when it is planned."""

    def __init__(self, options: OutboxOptions) -> None:
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        return [one for section in self._options.sections for one in plan(section, self._options)]

    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        # Spark makes one partition of None out of none at all.
        return read_partition(partition) if isinstance(partition, OutboxPartition) else iter(())
