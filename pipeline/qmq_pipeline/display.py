"""How a command shows how far it is: a bar that is written over on a terminal, now and then a line in a log.

A log, as cron and Airflow keep it, gets a line when a job has come to its end, and in between at most every
`LINE_S`: what takes seconds leaves a handful of lines, and what takes hours is seen to go on, within a step by the
tasks that Spark has done of it.
"""

from __future__ import annotations

from datetime import UTC, datetime
from threading import Lock
from typing import Final, TextIO

import click

from qmq_client.clock import Clock
from qmq_pipeline.jobs.progress import Progress

#: A bar is written over the one before at most so often.
BAR_S: Final = 0.2
#: What a job says of itself stands so long before the tasks of its next step are shown over it.
STEP_S: Final = 2.0
#: A line stays: a run of an hour leaves some hundred.
LINE_S: Final = 30.0
_WIDTH: Final = 24


class Display:
    """What is under way, on a stream that is a terminal or is not; nothing at all when it is to be quiet."""

    def __init__(self, stream: TextIO, clock: Clock, *, is_quiet: bool = False) -> None:
        self._stream = stream
        self._clock = clock
        self._is_quiet = is_quiet
        self._is_terminal = stream.isatty()
        #: Tasks are told from a thread of their own.
        self._lock = Lock()
        self._began_s = self._shown_s = clock.monotonic_s()

    def progress(self, progress: Progress) -> None:
        """Show how far a job is; left out when something was shown a moment ago, but not its end."""
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
        """Show how far the step under way is; left out while there is something else to show."""
        with self._lock:
            now_s = self._clock.monotonic_s()
            if now_s - self._shown_s < (STEP_S if self._is_terminal else LINE_S):
                return
            if self._is_terminal:
                self.over(f"{'step under way':<20} {_bar(done, total)} {done:,} of {total:,} tasks")
                return
            self._shown_s = now_s
            self._line(f"step under way: {done:,} of {total:,} tasks")

    def _line(self, text: str) -> None:
        if not self._is_quiet:
            at = datetime.fromtimestamp(self._clock.now_ms() / 1000, UTC)
            click.echo(f"{at.isoformat(timespec='seconds')} {text}", file=self._stream)

    def over(self, text: str) -> None:
        """On a terminal write this over what stands there, or nothing over it; in a log it would only be noise."""
        if self._is_terminal and not self._is_quiet:
            click.echo(f"\r\x1b[K{text}", file=self._stream, nl=False)


def _bar(done: int, total: int) -> str:
    filled = round(_WIDTH * done / max(total, 1))
    return "█" * filled + "·" * (_WIDTH - filled)
