"""A source that gives ready batches: what Spark alone takes for rows that come from Python."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from qmq_pipeline.rows.decode import BATCH_ROWS
from qmq_pipeline.tables.schemas import MESSAGES

FORMAT = "qmq_floor"
#: Columns as wide as those of the source that it stands beside.
COLUMNS = ("subject", "sequence", "message_id", "stored_at", "body_bytes")
_ROWS_PER_TASK = 150_000


class FloorSource(DataSource):
    """The format `qmq_floor`; its option `rows` says how many."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> str:
        return MESSAGES.ddl(COLUMNS)

    def reader(self, schema: StructType) -> DataSourceReader:
        return _FloorReader(int(self.options["rows"]))


class _Rows(InputPartition):
    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.count = count


class _FloorReader(DataSourceReader):
    def __init__(self, rows: int) -> None:
        self._rows = rows

    def partitions(self) -> Sequence[InputPartition]:
        firsts = range(0, self._rows, _ROWS_PER_TASK)
        return [_Rows(min(_ROWS_PER_TASK, self._rows - first)) for first in firsts]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, _Rows)
        numbers = np.arange(BATCH_ROWS)
        ready = pa.RecordBatch.from_arrays(
            [
                pa.repeat(pa.scalar("subject-11"), BATCH_ROWS),
                pa.array(numbers),
                pa.repeat(pa.scalar("0" * 32), BATCH_ROWS),
                pa.array(numbers).view(pa.timestamp("us", tz="UTC")),
                pa.array(numbers.astype(np.int32)),
            ],
            schema=MESSAGES.arrow(COLUMNS),
        )
        for first in range(0, partition.count, BATCH_ROWS):
            yield ready.slice(0, min(BATCH_ROWS, partition.count - first))
