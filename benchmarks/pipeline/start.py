"""P-h: what somebody waits for before anything of his own is done."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Final

from benchmarks.result import Conditions, Goal, Row
from benchmarks.suite import Bench

#: Starts a session, makes one row of ten, and says when which was done.
_START: Final = """
import time
began = time.monotonic()
from qmq_pipeline.spark.session import get_session
spark = get_session()
started = time.monotonic()
spark.range(10).count()
print(started - began, time.monotonic() - began)
spark.stop()
"""


def start_rows(bench: Bench) -> list[Row]:
    """Seconds of a session's start, and of a whole process up to its first answer."""
    samples: list[tuple[float, float]] = []
    for _ in range(bench.rounds):
        began_s = time.monotonic()
        said = subprocess.run(
            [sys.executable, "-c", _START],
            env=environment(),
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        samples.append((float(said[0]), time.monotonic() - began_s))
    figures = (
        ("P-h: start of a local session", [first for first, _ in samples], 5.0),
        ("P-h: cold start to the first small answer", [whole for _, whole in samples], 13.0),
    )
    return [
        Row(
            figure=figure,
            unit="s",
            samples=tuple(taken),
            conditions=Conditions(durability="none", client="fresh process, local session"),
            goal=Goal(bound=bound, is_floor=False),
        )
        for figure, taken, bound in figures
    ]


def environment() -> dict[str, str]:
    """What a fresh process needs to find what this one has."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
