"""Work for the executors as a data source: one task for each piece of work, a text back from each.

Spark's other doors to a worker want pandas (`mapInArrow`) or the classic API that shared clusters lack
(RDDs). A data source wants neither. A piece of work is the name of a function of this package and its
arguments as JSON; it must be safe to do twice, because Spark runs tasks again when it likes.

Who wants work done calls `run_tasks` in `tasks.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from qmq_pipeline.sources.tasks import TASK_FORMAT, WORK_OPTION
from qmq_pipeline.sources.worker_heap import keep_loaded
from qmq_pipeline.work.worker import do_piece

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

_SCHEMA: Final = pa.schema([("number", pa.int32()), ("answer", pa.string())])


@dataclass(frozen=True, slots=True)
class _Piece(InputPartition):
    number: int
    function: str
    arguments: str


class TaskDataSource(DataSource):
    """The format `qmq_task`; for this package's own use."""

    @classmethod
    def name(cls) -> str:
        return TASK_FORMAT

    def schema(self) -> str:
        return "number INT, answer STRING"

    def reader(self, schema: StructType) -> DataSourceReader:
        return _TaskReader(self.options[WORK_OPTION])


class _TaskReader(DataSourceReader):
    def __init__(self, work: str) -> None:
        self._work = work

    def partitions(self) -> Sequence[InputPartition]:
        keep_loaded()
        work = json.loads(self._work)
        return [
            _Piece(number, work["function"], json.dumps(arguments))
            for number, arguments in enumerate(work["pieces"])
        ]

    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, _Piece):
            return
        answer = do_piece(partition.function, json.loads(partition.arguments))
        keep_loaded()
        yield pa.RecordBatch.from_pydict(
            {"number": [partition.number], "answer": [json.dumps(answer)]}, schema=_SCHEMA
        )
