"""Work for the executors as a data source: one task for each piece of work, and a text back from each.

Spark's other ways to run code in a worker need pandas (`mapInArrow`), or the classic API that
shared clusters lack (RDDs). A data source needs neither. A piece of work is the name of a function
of this package and its arguments as JSON. It must be safe to repeat, because Spark reruns tasks at
will.

Callers use `run_tasks` in `tasks.py`. Tasks are planned and done in `task_batches.py`, which is
imported only when a reader is asked for, as with the other sources.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceReader

from qmq_pipeline.sources.tasks import TASK_FORMAT, WORK_OPTION

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


class TaskDataSource(DataSource):
    """The format `qmq_task`; for this package's own use."""

    @classmethod
    def name(cls) -> str:
        return TASK_FORMAT

    def schema(self) -> str:
        return "number INT, answer STRING"

    def reader(self, schema: StructType) -> DataSourceReader:
        from qmq_pipeline.sources.task_batches import TaskReader

        return TaskReader(self.options[WORK_OPTION])
