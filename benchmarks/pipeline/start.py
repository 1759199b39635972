"""P-h: what somebody waits for before anything of his own is done."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import time
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
print(started - began)
spark.stop()
"""


def start_rows(bench: Bench) -> list[Row]:
    """Seconds of a session's start, and of a whole process up to its first answer."""
    is_tiny = bench.effort is Effort.TINY
    samples: list[tuple[float, float]] = []
    start = _here if is_tiny else _in_a_fresh_process
    for _ in range(min(bench.rounds, _ROUNDS_MAX)):
        began_s = time.monotonic()
        samples.append((float(start(_START)), time.monotonic() - began_s))
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
            ),
            goal=Goal(bound=bound, is_floor=False),
        )
        for figure, taken, bound in figures
    ]


def _in_a_fresh_process(program: str) -> str:
    line = [sys.executable, "-c", program]
    done = subprocess.run(line, env=environment(), capture_output=True, text=True, check=True)
    return done.stdout


def _here(program: str) -> str:
    """In tests, where seconds mean nothing: this process has a Java already."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(program, {})
    return said.getvalue()


def environment() -> dict[str, str]:
    """What a fresh process needs to find what this one has."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
