"""Workers answer, failures are seen, and no process of a benchmark outlives it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.machine import MEMORY_FILE_SYSTEMS, ROOT, NoDiskError, file_system, find_directory
from benchmarks.processes import ProcessError, Processes, Worker

WORKERS = "tests.benchmarks.workers"


def test_a_worker_hears_and_tells_whatever_it_prints(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        worker = processes.start_worker(f"{WORKERS}:add", first=2)
        assert worker.hear() == "hello"
        worker.tell(3)
        assert worker.hear() == 5


def test_a_worker_that_fails_is_seen_with_the_end_of_its_log(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        worker = processes.start_worker(f"{WORKERS}:fail")
        assert worker.hear() == "hello"
        with pytest.raises(ProcessError, match="exit code 1\nno such luck"):
            worker.hear()


def run_until_interrupted(directory: Path, started: list[Worker]) -> None:
    with Processes(directory) as processes:
        started.append(processes.start_worker(f"{WORKERS}:wait_for_ever"))
        assert started[0].hear() == "hello"
        raise KeyboardInterrupt


def test_an_interrupted_benchmark_ends_its_processes(tmp_path: Path) -> None:
    started: list[Worker] = []
    with pytest.raises(KeyboardInterrupt):
        run_until_interrupted(tmp_path, started)
    assert started[0].process.poll() is not None
    started[0].stop()  # again, without harm


def test_a_directory_in_memory_is_refused() -> None:
    memory = Path("/dev/shm")
    if not memory.is_dir() or file_system(memory)[0] not in MEMORY_FILE_SYSTEMS:
        pytest.skip("no directory in memory here")
    with pytest.raises(NoDiskError, match="--directory"):
        find_directory(memory)


LOST_SIGNAL = """
import os, signal, weakref
from benchmarks import interruption

class Thing: pass

interruption.listen()
thing = Thing()
reference = weakref.ref(thing, lambda _: os.kill(os.getpid(), signal.SIGTERM))
try:
    del thing  # Python drops what the signal's handler raises inside the callback
    print("lost")
    interruption.check()
except KeyboardInterrupt:
    print("seen")
os.kill(os.getpid(), signal.SIGINT)
print("a second signal leaves the clean-up alone")
"""


def test_a_signal_is_seen_even_when_python_drops_its_exception() -> None:
    line = [sys.executable, "-c", LOST_SIGNAL]
    done = subprocess.run(line, capture_output=True, text=True, timeout=30, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "lost",
        "seen",
        "a second signal leaves the clean-up alone",
    ]
