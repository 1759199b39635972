"""Child processes of the demo: started, watched, killed and restarted by the supervisor.

A service tells how far it is by lines of JSON on its standard output; everything else it prints
goes to a log file in the run's folder.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]


class ProcessError(Exception):
    """A process of the demo ended although nobody asked it to."""


class Child:
    """One process with a name; `start` again after a kill gives it a new life."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        directory: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._arguments = [sys.executable, *arguments]
        #: Beside this process's own; what other users of the machine must not see is here.
        self._environment = {} if environment is None else dict(environment)
        self._log = directory / f"{name}.log"
        self._process: subprocess.Popen[str] | None = None
        self._listener: threading.Thread | None = None
        #: What the process last said about itself in this life.
        self.status: dict[str, Any] = {}
        #: The same of its earlier lives.
        self.earlier: list[dict[str, Any]] = []
        self.lives = 0
        self._is_asked = False

    def start(self) -> None:
        """Start it; returns at once."""
        if self.lives:
            self.earlier.append(self.status)
            self.status = {}
        self._is_asked = False
        self.lives += 1
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                self._arguments,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=REPOSITORY,
                env={
                    **os.environ,
                    **self._environment,
                    "PYTHONPATH": _python_path(),
                    "PYTHONFAULTHANDLER": "1",
                    "PYTHONUNBUFFERED": "1",
                },
            )
        self._listener = threading.Thread(target=self._listen, args=(self._process,), daemon=True)
        self._listener.start()

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self._process_now().kill()
        self._process_now().wait()

    def ask_to_stop(self) -> None:
        """SIGTERM, once."""
        process = self._process_now()
        if process.poll() is None and not self._is_asked:
            self._is_asked = True
            process.send_signal(signal.SIGTERM)

    def stop(self, deadline_s: float = 60.0) -> int:
        """SIGTERM and its exit code; raises `ProcessError` when it does not stop in time."""
        process = self._process_now()
        self.ask_to_stop()
        try:
            code = process.wait(deadline_s)
            self.hear_out()
            return code
        except subprocess.TimeoutExpired:
            process.kill()
            raise ProcessError(f"{self.name} did not stop within {deadline_s} s") from None

    def total(self, name: str) -> int:
        """A count that each life begins anew, over all of them."""
        return sum(int(status.get(name, 0)) for status in [*self.earlier, self.status])

    def hear_out(self) -> None:
        """Read the last words of a process that has ended."""
        if self._listener is not None:
            self._listener.join(10.0)

    def discard(self) -> None:
        """End it whatever it is doing; for cleaning up after an error."""
        if self._process is not None and self._process.poll() is None:
            self.kill()

    def exit_code(self) -> int | None:
        """None while it runs; negative when a signal ended it."""
        return self._process_now().poll()

    def check(self) -> None:
        """Raise `ProcessError` with the end of its log when it ended, well or not."""
        code = self.exit_code()
        if code is not None:
            tail = self._log.read_text(errors="replace")[-2000:]
            raise ProcessError(f"{self.name} ended with code {code}:\n{tail}")

    def log_text(self) -> str:
        """What it printed besides its status, over all its lives."""
        return self._log.read_text(errors="replace")

    def _process_now(self) -> subprocess.Popen[str]:
        if self._process is None:
            raise ProcessError(f"{self.name} was never started")
        return self._process

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout, self._log.open("a") as log:
            for line in process.stdout:
                if line.startswith('{"status":'):
                    self.status = self.status | json.loads(line)["status"]
                else:
                    log.write(line)
                    log.flush()


def say(**status: object) -> None:
    """Tell the supervisor how far this process is."""
    print(json.dumps({"status": status}), flush=True)


def wait_until(
    condition: Callable[[], bool], *, what: str, deadline_s: float, pause_s: float = 0.02
) -> None:
    """Wait for a condition of another process; raises `ProcessError` after the deadline."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > deadline:
            raise ProcessError(f"waited {deadline_s} s in vain: {what}")
        time.sleep(pause_s)


def _python_path() -> str:
    parts = [str(REPOSITORY)]
    parts += [str(REPOSITORY / folder) for folder in ("broker", "watchdog", "migrations")]
    return os.pathsep.join([*parts, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
