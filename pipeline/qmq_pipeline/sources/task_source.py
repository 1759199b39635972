"""Work for the executors as a data source: one task for each piece of work, a text back from each.

Spark's other doors to a worker want pandas (`mapInArrow`) or the classic API that shared clusters lack
(RDDs). A data source wants neither. A piece of work is the name of a function of this package and its
arguments as JSON; it must be safe to do twice, because Spark runs tasks again when it likes.

Who wants work done calls `run_tasks` in `tasks.py`; tasks are planned and done in `task_batches.py`, which is imported
by who is asked to, as with the other sources.
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
