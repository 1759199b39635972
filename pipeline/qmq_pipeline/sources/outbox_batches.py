"""The batch reader of the format `qmq_outbox`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, InputPartition

from qmq_pipeline.places.outbox_options import OutboxOptions
from qmq_pipeline.sources.outbox_partitions import OutboxPartition, plan, read_partition

if TYPE_CHECKING:
    import pyarrow as pa


class OutboxBatchReader(DataSourceReader):
    """Reads every row that exists when the read is planned."""

    def __init__(self, options: OutboxOptions) -> None:
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        return [one for section in self._options.sections for one in plan(section, self._options)]

    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        # Spark makes one partition of None from an empty list.
        return read_partition(partition) if isinstance(partition, OutboxPartition) else iter(())
