"""The processes of a benchmark: brokers and workers, each ended by its own id whatever happens.

A worker is a function of a benchmark's module that runs in a process of its own (see `worker.py`).
Parent and worker talk in lines of JSON over the worker's standard streams. Only what was started
here is ended, in `Processes.__exit__`, which also runs on Ctrl-C and SIGTERM.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from benchmarks import interruption
from benchmarks.machine import ROOT

START_DEADLINE_S: Final = 20.0
#: Longer than any round: reached only when something hangs.
ANSWER_DEADLINE_S: Final = 120.0
STOP_DEADLINE_S: Final = 10.0
#: How often a wait looks for an interruption.
LOOK_S: Final = 0.5
LOG_LINES_SHOWN: Final = 12
#: What is asked is on this machine: no proxy of the environment is.
OPENER: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))
#: The kind of a process's clock that counts what the scheduler gave it.
_SCHEDULED: Final = 2


class ProcessError(Exception):
    """A process of the benchmark ended, or did not answer in time; carries the end of its log."""


@dataclass(slots=True, kw_only=True)
class Child:
    """One process that was started here."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def check(self) -> None:
        """Raise `ProcessError` when the process has ended."""
        if self.process.poll() is not None:
            raise self.error(f"ended with exit code {self.process.returncode}")

    def error(self, what: str) -> ProcessError:
        """The error that shows the end of this process's log."""
        tail = self.log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]
        return ProcessError("\n".join([f"{self.name} {what}", *tail]))

    def cpu_s(self) -> float:
        """See `processor_s`."""
        return processor_s(self.process.pid)

    def written_bytes(self) -> int:
        """Bytes handed to the disk so far."""
        return written_bytes(self.process.pid)

    def stop(self) -> None:
        """Ask to end, then end. Safe to call twice."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_DEADLINE_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


@dataclass(slots=True, kw_only=True)
class Broker(Child):
    """A broker process on a port of this machine."""

    address: tuple[str, int]

    @property
    def url(self) -> str:
        """What clients are given."""
        return "http://{}:{}".format(*self.address)


class Worker(Child):
    """A function in a process of its own."""

    def tell(self, value: Any) -> None:
        """Send one value to the worker."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(value).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self.error("took no more orders") from None

    def hear(self, within_s: float = ANSWER_DEADLINE_S) -> Any:
        """The next value from the worker; raises `ProcessError` when none comes in time."""
        assert self.process.stdout is not None
        # The stream is unbuffered: what `select` does not announce is not in any buffer either.
        ends_at_s = time.monotonic() + within_s
        while not select.select([self.process.stdout], [], [], LOOK_S)[0]:
            interruption.check()
            if time.monotonic() > ends_at_s:
                raise self.error(f"said nothing for {within_s:.0f} s")
        line = self.process.stdout.readline()
        if not line.endswith(b"\n"):
            self.process.wait(STOP_DEADLINE_S)
            raise self.error(f"ended with exit code {self.process.returncode}")
        return json.loads(line)


class Processes:
    """Starts brokers and workers with their logs in one directory, and ends them all."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._children: list[Child] = []

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for child in reversed(self._children):
            child.stop()
        self._children.clear()

    def start_broker(self, *options: str, data: Path | None = None) -> Broker:
        """A broker, ready for requests, on the data directory given or a new one."""
        name = f"broker-{len(self._children)}"
        address = ("127.0.0.1", free_port())
        line = [sys.executable, "-m", "qmq_broker", "serve"]
        line += ["--data", str(data or self.directory / name)]
        line += ["--listen", "{}:{}".format(*address)]
        process, log = self._start(name, [*line, *options], is_worker=False)
        broker = Broker(name=name, process=process, log=log, address=address)
        self._children.append(broker)
        wait_until_ready(broker)
        return broker

    def start_worker(
        self,
        function: str,
        *,
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
        **arguments: Any,
    ) -> Worker:
        """A process that runs a function, given as `module:function`, of (control, **arguments)."""
        line = [python, "-m", "benchmarks.worker", function, json.dumps(arguments)]
        return self.start_program(function.rpartition(":")[2], line, environment)

    def start_program(
        self, name: str, line: list[str], environment: Mapping[str, str] | None = None
    ) -> Worker:
        """A program that talks as a worker does."""
        name = f"{name}-{len(self._children)}"
        process, log = self._start(name, line, is_worker=True, environment=environment)
        worker = Worker(name=name, process=process, log=log)
        self._children.append(worker)
        return worker

    def _start(
        self,
        name: str,
        line: list[str],
        *,
        is_worker: bool,
        environment: Mapping[str, str] | None = None,
    ) -> tuple[subprocess.Popen[bytes], Path]:
        interruption.check()
        log = self.directory / f"{name}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                line,
                env={**os.environ, **(environment or {})},
                cwd=ROOT,
                bufsize=0,
                stdin=subprocess.PIPE if is_worker else subprocess.DEVNULL,
                stdout=subprocess.PIPE if is_worker else file,
                stderr=file,
                start_new_session=True,  # Ctrl-C is ours: we end them in order
            )
        return process, log


def wait_until_ready(broker: Broker) -> None:
    """Wait for the broker's first yes to `/readyz`."""
    deadline_s = time.monotonic() + START_DEADLINE_S
    while time.monotonic() < deadline_s:
        broker.check()
        try:
            with OPENER.open(f"{broker.url}/readyz", timeout=1.0):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.02)
    raise broker.error(f"was not ready after {START_DEADLINE_S:.0f} s")


def free_port() -> int:
    """A port nobody listens on at this moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def processor_s(process_id: int) -> float:
    """Processor seconds that a process used so far, user and system; 0 when it is gone.

    From its clock, as clock_getcpuclockid(3) names it: /proc counts ticks, and a short turn takes less
    than one.
    """
    try:
        return time.clock_gettime((~process_id << 3) | _SCHEDULED)
    except OSError:
        return 0.0


def written_bytes(process_id: int) -> int:
    """Bytes that a process handed to the disk so far; 0 where the system does not say."""
    try:
        text = Path(f"/proc/{process_id}/io").read_text()
    except OSError:
        return 0
    fields = dict(line.split(": ") for line in text.splitlines())
    return int(fields.get("write_bytes", 0))
