"""Shows how far a command is: on a terminal a bar, redrawn in place; in a log an occasional line.

A log, as cron and Airflow keep it, gets a line at the end of each job, and in between at most one
every `LINE_S`. So a job of seconds leaves a handful of lines, and a job of hours shows that it goes
on, within a step by the number of Spark's finished tasks.
"""

from __future__ import annotations

from datetime import UTC, datetime
from threading import Lock
from typing import Final, TextIO

import click

from qmq_client.clock import Clock
from qmq_pipeline.jobs.progress import Progress
from qmq_pipeline.places.outage_notices import OutageNotice

#: A bar is redrawn at most this often.
BAR_S: Final = 0.2
#: A job's own progress is shown at least this long before the tasks of its next step replace it.
STEP_S: Final = 2.0
#: Lines stay in a log: a run of an hour leaves some hundred.
LINE_S: Final = 30.0
_WIDTH: Final = 24


class Display:
    """Progress on a stream, be it a terminal or not; shows nothing if quiet."""

    def __init__(self, stream: TextIO, clock: Clock, *, is_quiet: bool = False) -> None:
        self._stream = stream
        self._clock = clock
        self._is_quiet = is_quiet
        self._is_terminal = stream.isatty()
        #: Task counts come from another thread.
        self._lock = Lock()
        self._began_s = self._shown_s = clock.monotonic_s()

    def progress(self, progress: Progress) -> None:
        """Show how far a job is; skipped if something was shown a moment ago, unless the job is at its end."""
        with self._lock:
            now_s = self._clock.monotonic_s()
            pause_s = BAR_S if self._is_terminal else LINE_S
            if now_s - self._shown_s < pause_s and progress.done < progress.total:
                return
            self._shown_s = now_s
            rate = progress.rows / max(now_s - self._began_s, 0.001)
            if self._is_terminal:
                bar = _bar(progress.done, progress.total)
                self.over(f"{progress.stage:<20} {bar} {progress.rows:>12,} rows {rate:>10,.0f}/s")
                return
            line = f"{progress.stage}: {progress.done:,} of {progress.total:,}"
            if progress.rows:
                line += f", {progress.rows:,} rows, {rate:,.0f}/s"
            self._line(line)

    def tasks(self, done: int, total: int) -> None:
        """Show how far the current step is; skipped while something else is on show."""
        with self._lock:
            now_s = self._clock.monotonic_s()
            if now_s - self._shown_s < (STEP_S if self._is_terminal else LINE_S):
                return
            if self._is_terminal:
                self.over(f"{'step under way':<20} {_bar(done, total)} {done:,} of {total:,} tasks")
                return
            self._shown_s = now_s
            self._line(f"step under way: {done:,} of {total:,} tasks")

    def outage(self, notice: OutageNotice) -> None:
        """Tell of a broker that is away, or is back."""
        with self._lock:
            self.over("")
            self._line(str(notice))

    def _line(self, text: str) -> None:
        if not self._is_quiet:
            at = datetime.fromtimestamp(self._clock.now_ms() / 1000, UTC)
            click.echo(f"{at.isoformat(timespec='seconds')} {text}", file=self._stream)

    def over(self, text: str) -> None:
        """On a terminal, replace the current line by this text; in a log it would only be noise."""
        if self._is_terminal and not self._is_quiet:
            click.echo(f"\r\x1b[K{text}", file=self._stream, nl=False)


def _bar(done: int, total: int) -> str:
    filled = round(_WIDTH * done / max(total, 1))
    return "█" * filled + "·" * (_WIDTH - filled)
