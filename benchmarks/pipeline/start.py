"""P-h: what somebody waits for before anything of his own is done."""

from __future__ import annotations

import contextlib
import io
import os
import select
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.measure import Effort
from benchmarks.result import Conditions, Goal, Row
from benchmarks.suite import Bench

_ROUNDS_MAX: Final = 3
#: Starts a session, makes one row of ten, and says when which was done.
_START: Final = """
import time
began = time.monotonic()
from qmq_pipeline.spark.session import get_session
spark = get_session()
started = time.monotonic()
spark.range(10).count()
print(started - began, spark._jvm.java.lang.ProcessHandle.current().pid())
spark.stop()
"""
#: The second start keeps the classes that it has loaded for all that come after it, see `spark/shared_classes.py`.
_STARTS_BEFORE: Final = 2
_JVM_END_S: Final = 120


def start_rows(bench: Bench) -> list[Row]:
    """Seconds of a session's start, and of a whole process up to its first answer."""
    is_tiny = bench.effort is Effort.TINY
    samples: list[tuple[float, float]] = []
    # A cache of its own: what this user's has kept, or could not keep, is not what is measured.
    with tempfile.TemporaryDirectory(dir=bench.directory) as cache:
        start = _here if is_tiny else partial(_in_a_fresh_process, cache=cache)
        for _ in range(0 if is_tiny else _STARTS_BEFORE):
            _wait_for_the_end_of(int(start(_START).split()[1]))
        for _ in range(min(bench.rounds, _ROUNDS_MAX)):
            began_s = time.monotonic()
            said = start(_START).split()
            samples.append((float(said[0]), time.monotonic() - began_s))
        if not is_tiny and not [*Path(cache).rglob("*.jsa")]:
            raise RuntimeError("the second start kept no classes: not what this row says")
    figures = (
        ("P-h: start of a local session", [first for first, _ in samples], 5.0),
        ("P-h: cold start to the first small answer", [whole for _, whole in samples], 13.0),
    )
    return [
        Row(
            figure=figure,
            unit="s",
            samples=tuple(taken),
            conditions=Conditions(
                durability="none",
                client="fresh process, local session",
                note=f"with the classes that the {_STARTS_BEFORE}nd start has kept",
            ),
            goal=Goal(bound=bound, is_floor=False),
        )
        for figure, taken, bound in figures
    ]


def _in_a_fresh_process(program: str, *, cache: str) -> str:
    line = [sys.executable, "-c", program]
    known = environment() | {"XDG_CACHE_HOME": cache}
    done = subprocess.run(line, env=known, capture_output=True, text=True, check=True)
    return done.stdout


def _wait_for_the_end_of(jvm: int) -> None:
    """What it keeps is written when its session is long over."""
    try:
        handle = os.pidfd_open(jvm)
    except ProcessLookupError:
        return
    try:
        select.select([handle], [], [], _JVM_END_S)
    finally:
        os.close(handle)


def _here(program: str) -> str:
    """In tests, where seconds mean nothing: this process has a Java already."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(program, {})
    return said.getvalue()


def environment() -> dict[str, str]:
    """What a fresh process needs to find what this one has."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
