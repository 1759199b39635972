"""The batch reader of the format `qmq_outbox`: ranges of rows, planned in the driver and read in the workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from qmq_client.settings.sections import DatabaseSection
from qmq_pipeline.places.outbox_options import OutboxOptions
from qmq_pipeline.rows.outbox import batches, first_and_next_id, id_ranges
from qmq_pipeline.sources.worker_heap import prepare_heap


@dataclass(frozen=True, slots=True)
class OutboxPartition(InputPartition):
    """The range of one task."""

    section: DatabaseSection
    columns: tuple[str, ...]
    first_id: int
    next_id: int
    scanned_at_ms: int
    #: Only rows that are open or were sent since then; None for all.
    changed_since_ms: int | None = None


class OutboxBatchReader(DataSourceReader):
    """Reads every row that exists when the read is planned."""

    def __init__(self, options: OutboxOptions) -> None:
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        return [one for section in self._options.sections for one in plan(section, self._options)]

    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        # Spark makes one partition of None from an empty list.
        return read_partition(partition) if isinstance(partition, OutboxPartition) else iter(())


def plan(section: DatabaseSection, options: OutboxOptions) -> list[InputPartition]:
    """One partition for each range of the existing rows."""
    prepare_heap()
    first_id, next_id, now_ms = first_and_next_id(section)
    return [
        OutboxPartition(section, options.columns, begin, end, now_ms)
        for begin, end in id_ranges(first_id, next_id, options.partition_rows)
    ]


def read_partition(partition: OutboxPartition) -> Iterator[pa.RecordBatch]:
    """The current rows of one range; deleted rows are left out."""
    prepare_heap()
    for batch in batches(
        partition.section,
        first_id=partition.first_id,
        next_id=partition.next_id,
        scanned_at_ms=partition.scanned_at_ms,
        changed_since_ms=partition.changed_since_ms,
    ):
        yield batch.select(list(partition.columns))
