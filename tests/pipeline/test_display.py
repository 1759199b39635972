"""What a person at a terminal sees of a job under way, and what the log of a schedule gets."""

from __future__ import annotations

import io
from threading import Event
from typing import TYPE_CHECKING

from qmq_pipeline.display import LINE_S, STEP_S, Display
from qmq_pipeline.jobs.progress import Progress
from qmq_pipeline.spark.task_watch import watched_tasks
from tests.pipeline.world import WallClock

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def ingest_of_ten(stream: io.StringIO, *, is_quiet: bool = False) -> str:
    """What is shown of ten steps, each of which takes a third of the pause between two lines."""
    clock = WallClock()
    display = Display(stream, clock, is_quiet=is_quiet)
    display.over("starting Spark …")
    for done in range(1, 11):
        clock.sleep(LINE_S / 3)
        display.progress(Progress(stage="ingest", done=done, total=10, rows=done * 1_000))
    display.over("")
    return stream.getvalue()


def test_a_log_gets_a_line_now_and_then_and_one_at_the_end() -> None:
    assert ingest_of_ten(io.StringIO()).splitlines() == [
        "2025-10-09T08:53:50+00:00 ingest: 3 of 10, 3,000 rows, 100/s",
        "2025-10-09T08:54:20+00:00 ingest: 6 of 10, 6,000 rows, 100/s",
        "2025-10-09T08:54:50+00:00 ingest: 9 of 10, 9,000 rows, 100/s",
        "2025-10-09T08:55:00+00:00 ingest: 10 of 10, 10,000 rows, 100/s",
    ]


def test_a_terminal_has_one_line_that_is_written_over_and_is_gone_at_the_end() -> None:
    shown = ingest_of_ten(Terminal()).split("\r\x1b[K")
    assert shown[:2] == ["", "starting Spark …"]
    assert [line.count("█") for line in shown[2:-1]] == [2, 5, 7, 10, 12, 14, 17, 19, 22, 24]
    assert shown[-1] == ""
    assert "\n" not in "".join(shown)


def test_who_wants_quiet_has_it_on_both() -> None:
    assert ingest_of_ten(io.StringIO(), is_quiet=True) == ""
    assert ingest_of_ten(Terminal(), is_quiet=True) == ""


def test_a_long_step_shows_the_tasks_that_spark_has_done_of_it() -> None:
    clock, log = WallClock(), io.StringIO()
    display = Display(log, clock)
    for done in range(7):
        clock.sleep(LINE_S / 3)
        display.tasks(done, 40)
    assert log.getvalue().splitlines() == [
        "2025-10-09T08:53:50+00:00 step under way: 2 of 40 tasks",
        "2025-10-09T08:54:20+00:00 step under way: 5 of 40 tasks",
    ]
    clock, terminal = WallClock(), Terminal()
    display = Display(terminal, clock)
    display.progress(Progress(stage="ingest", done=1, total=1, rows=5))
    display.tasks(1, 40)
    assert "tasks" not in terminal.getvalue()
    clock.sleep(STEP_S)
    display.tasks(20, 40)
    assert terminal.getvalue().endswith("████████████············ 20 of 40 tasks")
    quiet = io.StringIO()
    Display(quiet, WallClock(), is_quiet=True).tasks(1, 1)
    assert quiet.getvalue() == ""


def test_tasks_of_a_step_under_way_are_counted(spark: SparkSession) -> None:
    told: list[tuple[int, int]] = []
    is_told = Event()

    def on_tasks(done: int, total: int) -> None:
        told.append((done, total))
        is_told.set()

    with watched_tasks(spark, on_tasks, look_s=0.01):
        # Each round is a step, since a fast machine may be done between two looks.
        while not is_told.is_set():
            spark.range(0, 4_000_000, 1, 4).selectExpr("SUM(id % 7)").collect()
    assert all(0 <= done <= total for done, total in told)
    assert told[0][1] in {1, 4, 5}
