"""Work for the executors as a data source: one task for each piece of work, a text back from each.

Spark's other doors to a worker want pandas (`mapInArrow`) or the classic API that shared clusters lack
(RDDs). A data source wants neither. A piece of work is the name of a function of this package and its
arguments as JSON; it must be safe to do twice, because Spark runs tasks again when it likes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

#: Spark shows options in plans, but not those whose name says that they hold a secret.
_OPTION: Final = "work_with_token"
_SCHEMA: Final = pa.schema([("number", pa.int32()), ("answer", pa.string())])
_OURS: Final = "qmq_pipeline."


@dataclass(frozen=True, slots=True)
class _Piece(InputPartition):
    number: int
    function: str
    arguments: str


class TaskDataSource(DataSource):
    """The format `qmq_task`; for this package's own use."""

    @classmethod
    def name(cls) -> str:
        return "qmq_task"

    def schema(self) -> str:
        return "number INT, answer STRING"

    def reader(self, schema: StructType) -> DataSourceReader:
        return _TaskReader(self.options[_OPTION])


class _TaskReader(DataSourceReader):
    def __init__(self, work: str) -> None:
        self._work = work

    def partitions(self) -> Sequence[InputPartition]:
        work = json.loads(self._work)
        return [
            _Piece(number, work["function"], json.dumps(arguments))
            for number, arguments in enumerate(work["pieces"])
        ]

    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, _Piece):
            return
        module, _, name = partition.function.rpartition(".")
        if not module.startswith(_OURS):
            raise ValueError(f"{partition.function} is not of this package")
        answer = getattr(import_module(module), name)(**json.loads(partition.arguments))
        yield pa.RecordBatch.from_pydict(
            {"number": [partition.number], "answer": [json.dumps(answer)]}, schema=_SCHEMA
        )


def run_tasks(spark: SparkSession, function: str, pieces: Sequence[dict[str, Any]]) -> list[Any]:
    """The answers of `function` to each piece, computed by the executors, in order.

    `function` is the full name of one in this package; arguments and answers are what JSON can say.
    """
    if not pieces:
        return []
    work = json.dumps({"function": function, "pieces": list(pieces)})
    rows = spark.read.format(TaskDataSource.name()).option(_OPTION, work).load().collect()
    return [json.loads(row["answer"]) for row in sorted(rows, key=lambda row: int(row["number"]))]
