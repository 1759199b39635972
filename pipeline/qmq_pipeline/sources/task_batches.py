"""The batch reader of the format `qmq_task`: one task per piece of work, one row per answer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from qmq_pipeline.sources.worker_heap import prepare_heap
from qmq_pipeline.work.worker import do_piece

_SCHEMA: Final = pa.schema([("number", pa.int32()), ("answer", pa.string())])


@dataclass(frozen=True, slots=True)
class _Piece(InputPartition):
    number: int
    function: str
    arguments: str


class TaskReader(DataSourceReader):
    """Plans and does the pieces of one call of `run_tasks`."""

    def __init__(self, work: str) -> None:
        self._work = work

    def partitions(self) -> Sequence[InputPartition]:
        prepare_heap()
        work = json.loads(self._work)
        return [
            _Piece(number, work["function"], json.dumps(arguments))
            for number, arguments in enumerate(work["pieces"])
        ]

    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, _Piece):
            return
        answer = do_piece(partition.function, json.loads(partition.arguments))
        prepare_heap()
        yield pa.RecordBatch.from_pydict(
            {"number": [partition.number], "answer": [json.dumps(answer)]}, schema=_SCHEMA
        )
