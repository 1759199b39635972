"""Runs pieces of work: on Spark's executors, or in processes of this machine.

A piece of work is the name of a function of this package and its JSON arguments. Executors run it
as a task of a data source (`task_source.py`). If there is no session, and nothing else needs one,
`LocalWorkers` run it without. This module does not import Spark, so jobs that need no Spark start
without it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from qmq_pipeline.work.workers import LocalWorkers

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    Workers: TypeAlias = LocalWorkers | SparkSession

TASK_FORMAT: Final = "qmq_task"
#: Spark shows options in plans, except those whose names suggest a secret.
WORK_OPTION: Final = "work_with_token"


def run_tasks(workers: Workers, function: str, pieces: Sequence[dict[str, Any]]) -> list[Any]:
    """The answers of `function` to each piece, in order.

    `function` is the full name of one in this package; arguments and answers are JSON values.
    Raises the error of the first piece that failed: `LocalWorkers` as an error of the pipeline,
    Spark within its own.
    """
    if not pieces:
        return []
    if isinstance(workers, LocalWorkers):
        return workers.run(function, pieces)
    work = json.dumps({"function": function, "pieces": list(pieces)})
    rows = workers.read.format(TASK_FORMAT).option(WORK_OPTION, work).load().collect()
    return [json.loads(row["answer"]) for row in sorted(rows, key=lambda row: int(row["number"]))]
