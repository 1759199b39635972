"""Progress bars while the demo runs; plain lines where there is no terminal."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from examples.flights.plan import COUNTER, TALLIES

#: Without a terminal, a line this often.
LINE_EVERY_S = 5.0


class Screen:
    """Shows how far each service is."""

    def __init__(self, flights: int, messages: int, console: Console | None = None) -> None:
        console = Console(file=sys.stderr) if console is None else console
        self._is_terminal = console.is_terminal
        self._progress = Progress(
            TextColumn("{task.description:<34}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed_text]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not self._is_terminal,
        )
        totals = {"departures": flights, TALLIES: messages, COUNTER: messages}
        self._totals = totals
        self._began_s = time.monotonic()
        self._line_due_s = self._began_s
        self._done = dict.fromkeys(totals, 0)
        self._tasks = {
            name: self._progress.add_task(_DESCRIPTIONS[name], total=total, speed_text="")
            for name, total in totals.items()
        }

    def show(self, name: str, done: int) -> None:
        """This service has worked on `done` flights or messages."""
        # A message that comes again counts again.
        self._done[name] = min(max(self._done[name], done), self._totals[name])
        elapsed_s = max(time.monotonic() - self._began_s, 0.001)
        speed = f"{self._done[name] / elapsed_s:,.0f}/s"
        self._progress.update(self._tasks[name], completed=self._done[name], speed_text=speed)
        if not self._is_terminal and time.monotonic() >= self._line_due_s:
            self._line_due_s = time.monotonic() + LINE_EVERY_S
            parts = [f"{one} {self._done[one]:,}/{total:,}" for one, total in self._totals.items()]
            print("  ".join(parts), file=sys.stderr, flush=True)

    def __enter__(self) -> Screen:
        self._progress.start()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()


_DESCRIPTIONS = {
    "departures": "departures (transactions)",
    TALLIES: "tallies (effects through the inbox)",
    COUNTER: "counter (messages)",
}
