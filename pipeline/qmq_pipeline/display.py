"""Shows how far a command is: on a terminal one line, redrawn in place; in a log a line now and then.

What is shown are the finished tasks of Spark's active stages, which a thread reads beside the job. A log, as cron and
Airflow keep it, gets a line at the end of each stage of a job, and one every `LINE_S` during a long one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from threading import Event, Thread
from typing import TYPE_CHECKING, Final, TextIO

import click

from qmq_client.clock import Clock
from qmq_pipeline.jobs.progress import Progress

if TYPE_CHECKING:
    from pyspark import StatusTracker
    from pyspark.sql import SparkSession

LOOK_S: Final = 1.0
#: Lines stay in a log: a run of an hour leaves some hundred.
LINE_S: Final = 30.0
_WIDTH: Final = 24


class Display(logging.Handler):
    """Progress on a stream, be it a terminal or not, and what is logged; shows nothing if quiet."""

    def __init__(self, stream: TextIO, clock: Clock, *, is_quiet: bool = False) -> None:
        super().__init__()
        self._stream = stream
        self._clock = clock
        self._is_quiet = is_quiet
        self._is_terminal = stream.isatty()
        self._shown_s = clock.monotonic_s()

    def progress(self, progress: Progress) -> None:
        """A stage of a job is done."""
        rows = f", {progress.rows:,} rows" if progress.rows else ""
        self.over("")
        self._line(f"{progress.stage}: {progress.done:,} of {progress.total:,}{rows}")

    def tasks(self, done: int, total: int) -> None:
        """Show how far the current step is; in a log only now and then."""
        now_s = self._clock.monotonic_s()
        if self._is_terminal:
            filled = round(_WIDTH * done / max(total, 1))
            bar = "█" * filled + "·" * (_WIDTH - filled)
            self.over(f"{bar} {done:,} of {total:,} tasks")
        elif now_s - self._shown_s >= LINE_S:
            self._line(f"{done:,} of {total:,} tasks")

    def emit(self, record: logging.LogRecord) -> None:
        """Show what is logged, such as a broker that does not answer."""
        self.over("")
        self._line(record.getMessage())

    def _line(self, text: str) -> None:
        self._shown_s = self._clock.monotonic_s()
        if not self._is_quiet:
            at = datetime.fromtimestamp(self._clock.now_ms() / 1000, UTC)
            click.echo(f"{at.isoformat(timespec='seconds')} {text}", file=self._stream)

    def over(self, text: str) -> None:
        """On a terminal, replace the current line by this text; in a log it would only be noise."""
        if self._is_terminal and not self._is_quiet:
            click.echo(f"\r\x1b[K{text}", file=self._stream, nl=False)


@contextmanager
def watched_tasks(
    spark: SparkSession, display: Display, *, look_s: float = LOOK_S
) -> Iterator[None]:
    """While the block lasts, show the tasks of active stages; nothing where a session does not count (Spark Connect)."""
    from pyspark.errors import PySparkException

    try:
        tracker = spark.sparkContext.statusTracker()
    except PySparkException:
        yield
        return
    is_over = Event()
    thread = Thread(target=_watch, args=(tracker, display, is_over, look_s), daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _watch(tracker: StatusTracker, display: Display, is_over: Event, look_s: float) -> None:
    while not is_over.wait(look_s):
        try:
            every = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
        except Exception:  # the JVM is gone: the job itself will say so
            return
        stages = [one for one in every if one is not None]
        if stages:
            done = sum(one.numCompletedTasks for one in stages)
            display.tasks(done, sum(one.numTasks for one in stages))
