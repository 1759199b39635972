"""Shows how far Spark is within a step: a job reports whole steps, and one step may take an hour.

Spark counts the tasks of its stages; a thread beside the job reads the counts now and then and
passes them on. If a session does not count (Spark Connect), nothing is passed on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark import StatusTracker
    from pyspark.sql import SparkSession

LOOK_S: Final = 1.0
#: Tasks done, and all tasks, of the active stages.
OnTasks = Callable[[int, int], None]


@contextmanager
def watched_tasks(
    spark: SparkSession, on_tasks: OnTasks, *, look_s: float = LOOK_S
) -> Iterator[None]:
    """While the block lasts, call `on_tasks` from a separate thread whenever stages are active."""
    tracker = _tracker(spark)
    if tracker is None:
        yield
        return
    is_over = Event()
    thread = Thread(target=_watch, args=(tracker, on_tasks, is_over, look_s), daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _tracker(spark: SparkSession) -> StatusTracker | None:
    from pyspark.errors import PySparkException

    try:
        return spark.sparkContext.statusTracker()
    except PySparkException:
        return None


def _watch(tracker: StatusTracker, on_tasks: OnTasks, is_over: Event, look_s: float) -> None:
    while not is_over.wait(look_s):
        try:
            counts = _counts(tracker)
        except Exception:  # the JVM is gone: the job itself will say so
            return
        if counts is not None:
            on_tasks(*counts)


def _counts(tracker: StatusTracker) -> tuple[int, int] | None:
    """Tasks done and all tasks; None if no stage is active."""
    every = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
    stages = [one for one in every if one is not None]
    if not stages:
        return None
    return sum(one.numCompletedTasks for one in stages), sum(one.numTasks for one in stages)
