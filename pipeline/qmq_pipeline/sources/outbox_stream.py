"""The streaming reader of the format `qmq_outbox`: a micro-batch is one scan of each outbox.

::

    spark.readStream.format("qmq_outbox").option("database", "orders").load()

A scan gives all rows from the mark of the last one on, and below it those that are open, or that were sent since then
and are kept; see `rows/outbox.py`. So a row is returned again whenever it changes, and in each scan
while it is open: an open row that is missing in a later scan was deleted. With the trigger
`availableNow` a query makes one scan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from qmq_pipeline.places.outbox_options import OutboxOptions
from qmq_pipeline.rows.outbox import ScanMark, id_ranges, plan_scan
from qmq_pipeline.sources.outbox_batches import OutboxPartition, read_partition
from qmq_pipeline.sources.read_limits import SupportsTriggerAvailableNow
from qmq_pipeline.sources.worker_heap import prepare_heap

if TYPE_CHECKING:
    import pyarrow as pa

    from qmq_client.settings.sections import DatabaseSection

#: Database → the fields of its `ScanMark`.
Offset = dict[str, dict[str, Any]]


class OutboxStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Scans each outbox, including those of databases that are added later."""

    def __init__(self, options: OutboxOptions) -> None:
        self._options = options
        #: The one scan of an `availableNow` query; None for any other query.
        self._target: Offset | None = None
        self._is_single = False

    def initialOffset(self) -> Offset:
        return _encoded({section.name: ScanMark() for section in self._options.sections})

    def prepareForTriggerAvailableNow(self) -> None:
        self._is_single = True

    def latestOffset(self, start: Offset | None = None, limit: Any = None) -> Offset:
        if self._target is not None:
            return self._target
        known = {} if start is None else _decoded(start)
        # Spark before 4.2 does not pass the query's position: then the scan reads all rows.
        found = {
            section.name: plan_scan(
                section, known.get(section.name, ScanMark()), safety_ms=self._options.safety_ms
            )
            for section in self._options.sections
        }
        scan = _encoded(found)
        if self._is_single:
            self._target = scan
        return scan

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        prepare_heap()
        goes = _decoded(end)
        found: list[InputPartition] = []
        for section in self._options.sections:
            if start.get(section.name) != end.get(section.name) and section.name in goes:
                found += self._scan(section, goes[section.name])
        return found

    def _scan(self, section: DatabaseSection, scan: ScanMark) -> Iterator[InputPartition]:
        columns, at_ms = self._options.columns, scan.scanned_at_ms
        for begin, end in id_ranges(scan.first_id, scan.end_id, self._options.partition_rows):
            yield OutboxPartition(section, columns, begin, end, at_ms)
        if scan.first_id > 0:
            since_ms = max(0, scan.since_ms - self._options.safety_ms)
            yield OutboxPartition(section, columns, 0, scan.first_id, at_ms, since_ms)

    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        return read_partition(partition) if isinstance(partition, OutboxPartition) else iter(())


def _decoded(offset: Mapping[str, Mapping[str, Any]]) -> dict[str, ScanMark]:
    """One mark for each database that the checkpoint knows."""
    marks = {}
    for name, fields in offset.items():
        seen = fields["witness"]
        witness = (str(seen[0]), int(seen[1])) if seen else None
        marks[name] = ScanMark(**{**fields, "witness": witness})
    return marks


def _encoded(marks: Mapping[str, ScanMark]) -> Offset:
    """Always in the same order, because Spark sometimes compares offsets as text."""
    return {name: asdict(mark) for name, mark in sorted(marks.items())}
