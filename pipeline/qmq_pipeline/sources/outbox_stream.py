"""The streaming reader of the format `qmq_outbox`: offsets are row numbers, one for each database.

::

    spark.readStream.format("qmq_outbox").option("database", "orders").option("safety_s", "30").load()

Numbers are taken before their transactions commit, so a stream comes no further than where no row can come
in late: behind the youngest row that is `safety_s` old. Each row is given once, when it is that old, as it
is then. What came and went before is never seen, and no row a second time when it changes: a stream of
an outbox is every commit only where accepted rows are kept for longer than that.

`maxRowsPerTrigger` bounds a micro-batch, in equal shares of the databases; with the trigger `availableNow` the query
comes no further than where the tables ended when it began. From Spark 4.2 on bounds are honoured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from qmq_pipeline.errors import SourceError
from qmq_pipeline.places.outbox_options import OutboxOptions
from qmq_pipeline.rows.outbox import first_and_next_id, next_settled_id
from qmq_pipeline.sources.outbox_partitions import OutboxPartition, plan, read_partition
from qmq_pipeline.sources.read_limits import (
    ReadAllAvailable,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

if TYPE_CHECKING:
    import pyarrow as pa


class OutboxStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads each outbox from its first row on; a database that is added later, from its first too."""

    def __init__(self, options: OutboxOptions) -> None:
        self._options = options
        #: Where the tables ended when a query for what is available began; None for any other query.
        self._target: dict[str, int] | None = None

    def initialOffset(self) -> dict[str, int]:
        # Not the first row that is there: one of a lower number may be about to commit.
        return {section.name: 0 for section in self._options.sections}

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self.reportLatestOffset()

    def getDefaultReadLimit(self) -> Any:
        rows_max = self._options.batch_rows_max
        return ReadAllAvailable() if rows_max is None else ReadMaxRows(rows_max)

    def latestOffset(
        self, start: dict[str, int] | None = None, limit: Any = None
    ) -> dict[str, int]:
        # Spark before 4.2 neither says where it stands nor asks for less.
        here = self.initialOffset() if start is None else self._checked(start)
        rows_max = getattr(limit, "max_rows", None)
        share = None if rows_max is None else max(1, int(rows_max) // len(here))
        return {
            section.name: next_settled_id(
                section,
                first_id=here[section.name],
                end_id=None if self._target is None else self._target[section.name],
                rows_max=share,
                safety_ms=self._options.safety_ms,
            )
            for section in self._options.sections
        }

    def reportLatestOffset(self) -> dict[str, int]:
        return {one.name: first_and_next_id(one)[1] for one in self._options.sections}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        first, after = self._checked(start), self._checked(end)
        return [
            one
            for section in self._options.sections
            if first[section.name] < after[section.name]
            for one in plan(section, self._options, first[section.name], after[section.name])
        ]

    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        return read_partition(partition) if isinstance(partition, OutboxPartition) else iter(())

    def _checked(self, position: Mapping[str, int]) -> dict[str, int]:
        """One entry for each database, sorted: Spark compares offsets as text in places."""
        found = self.initialOffset()
        gone = sorted(position.keys() - found.keys())
        if gone:
            raise SourceError(
                source=", ".join(found),
                reason=f"the checkpoint is also of {', '.join(gone)}",
                remedy="Name these databases too, or use another checkpoint location",
            )
        return found | {name: int(row_id) for name, row_id in position.items()}
