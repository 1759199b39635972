"""The streaming reader of the format `qmq_outbox`: an offset is a row number for each database.

::

    spark.readStream.format("qmq_outbox").option("database", "orders").option("safety_s", "30").load()

Numbers are assigned before their transactions commit, so a stream reads only as far as no row can
still come in: behind the youngest row that is `safety_s` old. Each row is given once, when it is that
old, as it is then. A row that was deleted before is never seen, and a later change is not shown. So
a stream of an outbox has every commit only if accepted rows are kept for longer than that.

SQLite reuses numbers once the highest rows are gone. So an offset also records the row at its end: when
that row is gone, the stream continues with the first row that may be new, see `next_position`.

`maxRowsPerTrigger` bounds a micro-batch, in equal shares of the databases. With the trigger
`availableNow` the query ends where the tables ended when it began. Spark honours bounds from 4.2 on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from qmq_pipeline.errors import SourceError
from qmq_pipeline.places.outbox_options import OutboxOptions
from qmq_pipeline.rows.outbox import Position, first_and_next_id, next_position
from qmq_pipeline.sources.outbox_partitions import OutboxPartition, plan, read_partition
from qmq_pipeline.sources.read_limits import (
    ReadAllAvailable,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

if TYPE_CHECKING:
    import pyarrow as pa

#: Database → the fields of its `Position`.
Offset = dict[str, list[Any]]


class OutboxStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads each outbox from its first row on, including those of databases that are added later."""

    def __init__(self, options: OutboxOptions) -> None:
        self._options = options
        #: The ends of the tables when an `availableNow` query began; None for any other query.
        self._target: dict[str, int] | None = None

    def initialOffset(self) -> Offset:
        # Not the lowest id in the table: a row with a lower number may be about to commit.
        return _encoded({section.name: Position() for section in self._options.sections})

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = {one.name: first_and_next_id(one)[1] for one in self._options.sections}

    def getDefaultReadLimit(self) -> Any:
        rows_max = self._options.batch_rows_max
        return ReadAllAvailable() if rows_max is None else ReadMaxRows(rows_max)

    def latestOffset(self, start: Offset | None = None, limit: Any = None) -> Offset:
        # Spark before 4.2 passes neither its position nor a limit.
        here = self._decoded(self.initialOffset() if start is None else start)
        rows_max = getattr(limit, "max_rows", None)
        share = None if rows_max is None else max(1, int(rows_max) // len(here))
        return _encoded(
            {
                section.name: next_position(
                    section,
                    here[section.name],
                    end_id=None if self._target is None else self._target[section.name],
                    rows_max=share,
                    safety_ms=self._options.safety_ms,
                )
                for section in self._options.sections
            }
        )

    def reportLatestOffset(self) -> Offset:
        return _encoded(
            {one.name: Position(first_and_next_id(one)[1]) for one in self._options.sections}
        )

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        before, now = self._decoded(start), self._decoded(end)
        found: list[InputPartition] = []
        for section in self._options.sections:
            come, goes = before[section.name], now[section.name]
            first_id = come.next_id if goes.again_from is None else goes.again_from
            if goes != come and first_id < goes.next_id:
                found += plan(section, self._options, first_id, goes.next_id)
        return found

    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        return read_partition(partition) if isinstance(partition, OutboxPartition) else iter(())

    def _decoded(self, offset: Mapping[str, Sequence[Any]]) -> dict[str, Position]:
        """One position for each database; one that the checkpoint does not know begins at its first row."""
        found = {section.name: Position() for section in self._options.sections}
        gone = sorted(offset.keys() - found.keys())
        if gone:
            raise SourceError(
                source=", ".join(found),
                reason=f"the checkpoint is also of {', '.join(gone)}",
                remedy="Name these databases too, or use another checkpoint location",
            )
        for name, (next_id, witness, again_from) in offset.items():
            known = (str(witness[0]), int(witness[1])) if witness else None
            found[name] = Position(int(next_id), known, again_from)
        return found


def _encoded(positions: Mapping[str, Position]) -> Offset:
    """Always in one order, because Spark compares offsets as text in places."""
    return {
        name: [one.next_id, list(one.witness) if one.witness else None, one.again_from]
        for name, one in sorted(positions.items())
    }
