"""What a person at a terminal sees of a job under way, and what the log of a schedule gets."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from threading import Event
from typing import TYPE_CHECKING, Any, NoReturn, cast

from pyspark.errors import PySparkAttributeError

from qmq_pipeline.command import LINE_S, Display, watched_tasks
from qmq_pipeline.jobs.progress import Progress
from tests.pipeline.world import WallClock

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def ingest_of_ten(stream: io.StringIO, *, is_quiet: bool = False) -> str:
    """What is shown of ten tasks, each of which takes a third of the pause between two lines, and of the end."""
    clock = WallClock()
    display = Display(stream, clock, is_quiet=is_quiet)
    display.over("starting Spark …")
    for done in range(1, 11):
        clock.sleep(LINE_S / 3)
        display.tasks(done, 10)
    display.progress(Progress(stage="ingest", done=1, total=2, rows=10_000))
    display.over("")
    return stream.getvalue()


def test_a_log_gets_a_line_now_and_then_and_one_at_the_end() -> None:
    assert ingest_of_ten(io.StringIO()).splitlines() == [
        "2025-10-09T08:53:50+00:00 3 of 10 tasks",
        "2025-10-09T08:54:20+00:00 6 of 10 tasks",
        "2025-10-09T08:54:50+00:00 9 of 10 tasks",
        "2025-10-09T08:55:00+00:00 ingest: 1 of 2, 10,000 rows",
    ]


def test_a_terminal_has_one_line_that_is_written_over_and_a_line_for_each_stage_that_is_done() -> (
    None
):
    shown = ingest_of_ten(Terminal()).split("\r\x1b[K")
    assert shown[:2] == ["", "starting Spark …"]
    assert [line.count("█") for line in shown[2:-2]] == [2, 5, 7, 10, 12, 14, 17, 19, 22, 24]
    assert shown[-2:] == ["2025-10-09T08:55:00+00:00 ingest: 1 of 2, 10,000 rows\n", ""]


def test_who_wants_quiet_has_it_on_both() -> None:
    assert ingest_of_ten(io.StringIO(), is_quiet=True) == ""
    assert ingest_of_ten(Terminal(), is_quiet=True) == ""


class Watched(Display):
    """Notes what it is told."""

    def __init__(self) -> None:
        super().__init__(io.StringIO(), WallClock())
        self.told: list[tuple[int, int]] = []
        self.is_told = Event()

    def tasks(self, done: int, total: int) -> None:
        self.told.append((done, total))
        self.is_told.set()


def test_tasks_of_a_step_under_way_are_counted(spark: SparkSession) -> None:
    display = Watched()
    with watched_tasks(spark, display, look_s=0.01):
        # Each round is a step, since a fast machine may be done between two looks.
        while not display.is_told.is_set():
            spark.range(0, 4_000_000, 1, 4).selectExpr("SUM(id % 7)").collect()
    assert all(0 <= done <= total for done, total in display.told)
    assert display.told[0][1] in {1, 4, 5}


@dataclass
class Remote:
    """A session of Spark Connect as far as progress goes: it has no context, and calls handlers while it waits."""

    handlers: list[Any] = field(default_factory=list)

    @property
    def sparkContext(self) -> NoReturn:
        raise PySparkAttributeError("a session of Spark Connect has none")

    def registerProgressHandler(self, handler: Any) -> None:
        self.handlers.append(handler)

    def removeProgressHandler(self, handler: Any) -> None:
        self.handlers.remove(handler)

    def says(self, *stages: tuple[int, int], done: bool = False) -> None:
        every = [RemoteStage(num_completed_tasks=one, num_tasks=all_) for one, all_ in stages]
        for handler in self.handlers:
            handler(stages=every, inflight_tasks=1, operation_id="a query", done=done)


@dataclass
class RemoteStage:
    num_completed_tasks: int
    num_tasks: int


def test_a_session_of_spark_connect_tells_the_tasks_of_a_query_while_it_is_watched() -> None:
    display, remote = Watched(), Remote()
    with watched_tasks(cast("SparkSession", remote), display):
        remote.says((0, 4))
        remote.says((4, 4), (1, 2))
        remote.says((4, 4), (2, 2), done=True)
        remote.says(done=True)
    remote.says((1, 4))
    assert display.told == [(0, 4), (5, 6)]
