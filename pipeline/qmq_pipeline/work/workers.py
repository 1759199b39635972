"""Processes of this machine that do pieces of work where Spark is not needed: it takes seconds to
start.

Spark's tasks read a log and write Parquet in Python. On one machine the same functions run in
processes of our own, one per core, and a small ingest is done before Spark would have started. On a
cluster, and in an existing session, Spark's executors do it: `sources/tasks.py` chooses.

Not for: rows. Pieces and answers are a few hundred bytes of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from types import TracebackType
from typing import Any, Final

from qmq_pipeline.errors import PipelineError, carried
from qmq_pipeline.places.outage_notices import NOTICES, OutageNotice

_MODULE: Final = "qmq_pipeline.work.worker"
#: Tasks done and all tasks, of one call of `run`.
OnTasks = Callable[[int, int], None]
_Piece = tuple[int, dict[str, Any]]


def _cores_here() -> int:
    """Cores that this process may use; all of the machine if the system does not tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _nobody(_: int, __: int) -> None:
    """Ignores progress."""


class LocalWorkers:
    """Up to `count` processes, each started when there is work for it; a context that ends them.

    One thread at a time.
    """

    def __init__(self, count: int | None = None, *, on_tasks: OnTasks = _nobody) -> None:
        """`count`: None for as many as this process has cores."""
        self._count = count or _cores_here()
        self._on_tasks = on_tasks
        self._processes: list[_Process] = []

    def __enter__(self) -> LocalWorkers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        self.close()

    def run(self, function: str, pieces: Sequence[dict[str, Any]]) -> list[Any]:
        """The answers of `function` to each piece, in order.

        Raises the error of the package that a piece ended with, by class and text, and
        `PipelineError` for any other, or if a process died. Pieces not begun by then are dropped;
        those in progress are finished. No piece is done twice.
        """
        answers: list[Any] = [None] * len(pieces)
        while len(self._processes) < min(self._count, len(pieces)):
            self._processes.append(_Process())
        left: Iterator[_Piece] = iter(enumerate(pieces))
        done, lock = 0, Lock()

        def take() -> _Piece | None:
            with lock:
                return next(left, None)

        def work(process: _Process) -> None:
            nonlocal left, done
            try:
                while (piece := take()) is not None:
                    answers[piece[0]] = process.do(function, piece[1])
                    with lock:
                        done += 1
                        self._on_tasks(done, len(pieces))
            except BaseException:
                with lock:
                    left = iter(())
                raise

        with ThreadPoolExecutor(max(1, len(self._processes))) as threads:
            try:
                for _ in threads.map(work, self._processes):
                    pass
            except BaseException as error:
                # Ctrl-C, or a process that died: work in progress is not waited for.
                if not isinstance(error, PipelineError) or not all(self._alive()):
                    self._kill()
                raise
        return answers

    def close(self) -> None:
        """End the processes."""
        processes, self._processes = self._processes, []
        for one in processes:
            one.close()

    def _alive(self) -> Iterator[bool]:
        return (one.is_alive for one in self._processes)

    def _kill(self) -> None:
        for one in self._processes:
            one.kill()
        self.close()


@contextlib.contextmanager
def _sigint_blocked() -> Iterator[None]:
    """For starting a process: Ctrl-C reaches all processes of a terminal, and a new one cannot
    ignore it yet.

    In this process the signal arrives a moment later.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Process:
    """One worker; one thread at a time."""

    def __init__(self) -> None:
        # It finds its modules where this process does, and nothing in the folder it happens to
        # start in.
        found = os.pathsep.join(filter(None, sys.path))
        environment = os.environ | {"PYTHONPATH": found, "PYTHONSAFEPATH": "1"}
        with _sigint_blocked():
            self._process = subprocess.Popen(
                [sys.executable, "-m", _MODULE],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                text=True,
                encoding="utf-8",
            )

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def do(self, function: str, arguments: dict[str, Any]) -> Any:
        """The answer to one piece; raises a `PipelineError`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(
                json.dumps({"function": function, "arguments": arguments}) + "\n"
            )
            self._process.stdin.flush()
            said = self._answer()
        except BrokenPipeError:
            said = None
        finally:
            NOTICES.gone(self)
        if said is None:
            code = self._process.wait()
            raise PipelineError(
                f"a worker process ended with code {code} in the middle of its work; -9 may mean that memory was "
                "short. Run the job again: it continues from its last commit."
            )
        if "error" in said:
            raise carried(said["error"], said["text"])
        return said["answer"]

    def _answer(self) -> dict[str, Any] | None:
        """What it answers in the end; outages that it tells of on the way are told on. None if it died."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said: dict[str, Any] = json.loads(line)
            if "outage" not in said:
                return said
            notice = OutageNotice(**said["outage"])
            (NOTICES.began if notice.reason else NOTICES.over)(self, notice)
        return None

    def kill(self) -> None:
        """Kill it at once."""
        self._process.kill()

    def close(self) -> None:
        """Let it finish, and wait for that."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
