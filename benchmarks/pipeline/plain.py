"""P-f beside plain Python: what was committed against what is stored, each in a process of its own, cold.

The plain program is what a careful person would write in an afternoon: the log into a dictionary by id, the
outbox row by row against it. Both say the same, and the benchmark holds them to it. The pipeline does what its
commands do, with a heap of 2 GiB.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.measure import Effort, elapsed_s, paired_ratios
from benchmarks.pipeline.growth import LOG, NOTE, config_of
from benchmarks.pipeline.logs import conditions, plain_records
from benchmarks.pipeline.start import environment
from benchmarks.result import Goal, Row
from benchmarks.suite import Bench

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: A round of millions takes a minute.
_ROUNDS_MAX: Final = 2
_KINDS: Final = ("lost", "ghost", "duplicate", "late", "altered")
_LATE_MS: Final = 60_000
_PLAIN: Final = """
import json, sys
from pathlib import Path
from benchmarks.pipeline.plain import plain_audit
print(json.dumps(plain_audit(Path(sys.argv[1]), Path(sys.argv[2]))))
"""
_OURS: Final = """
import json, sys
from pathlib import Path
from benchmarks.pipeline.plain import our_audit
from qmq_pipeline.spark.session import SessionOptions, get_session
start = lambda: get_session(SessionOptions(driver_memory="2g"))
is_ready = sys.argv[3] == "ready"
print(json.dumps(our_audit(start, Path(sys.argv[1]), sys.argv[2], is_ready=is_ready)))
"""


class UnlikeError(Exception):
    """Plain Python and the pipeline did not find the same."""


def cold_rows(bench: Bench, messages: int) -> list[Row]:
    """Ratios of plain Python to ours. Requires: a log of `Growth` of so many."""
    tables = bench.directory / "cold-tables"
    log, database = bench.directory / LOG, bench.directory / f"{LOG}.db"
    taken: dict[str, list[float]] = {"plain": [], "cold": [], "ready": []}
    for _ in range(min(bench.rounds, _ROUNDS_MAX)):
        shutil.rmtree(tables, ignore_errors=True)
        answers = {
            "plain": _timed(bench, _PLAIN, log, database),
            "cold": _timed(bench, _OURS, bench.directory, tables, "cold"),
        }
        is_tiny = bench.effort is Effort.TINY
        answers["ready"] = (
            answers["cold"] if is_tiny else _timed(bench, _OURS, bench.directory, tables, "ready")
        )
        if len({json.dumps(found) for _, found in answers.values()}) != 1:
            raise UnlikeError(str(answers))
        for name, (seconds, _) in answers.items():
            taken[name].append(seconds)
    shutil.rmtree(tables, ignore_errors=True)
    figures = (
        ("P-f: plain Python / ingest and audit, cold", taken["plain"], taken["cold"], 1.0),
        ("P-f: plain Python / audit of ready tables, cold", taken["plain"], taken["ready"], 3.5),
    )
    return [
        Row(
            figure=figure,
            unit="ratio",
            samples=tuple(paired_ratios(above, below)),
            conditions=conditions(messages, NOTE),
            goal=Goal(bound=bound, is_floor=True),
        )
        for figure, above, below, bound in figures
    ]


def plain_audit(log: Path, database: Path) -> dict[str, int]:
    """Committed against stored, without Spark or Arrow."""
    stored: dict[bytes, tuple[bytes, int]] = {}
    found = dict.fromkeys(("committed", "stored", *_KINDS), 0)
    for _, data, stored_at_ms in plain_records(log):
        found["stored"] += 1
        known = stored.setdefault(data[4:20], (data[:4], stored_at_ms))
        if known[1] != stored_at_ms or known[0] != data[:4]:
            found["duplicate"] += 1
            found["altered"] += known[0] != data[:4]
    connection = sqlite3.connect(database)
    rows = connection.execute(
        "SELECT message_id, SUBSTR(record, 1, 4), created_at_ms, state FROM qmq_outbox"
    )
    for message_id, crc, created_at_ms, _ in rows:
        found["committed"] += 1
        one = stored.pop(message_id, None)
        if one is None:
            found["lost"] += 1
            continue
        found["altered"] += one[0] != crc
        found["late"] += one[1] - created_at_ms > _LATE_MS
    found["ghost"] = len(stored)
    connection.close()
    return found


def our_audit(
    start: Callable[[], SparkSession], directory: Path, tables: str, *, is_ready: bool
) -> dict[str, int]:
    """The same by the pipeline, with the start of Spark."""
    from qmq_pipeline.jobs.audit import audit
    from qmq_pipeline.jobs.ingest import ingest

    spark, config = start(), config_of(directory, tables)
    if not is_ready:
        ingest(spark, config)
    result = audit(spark, config)
    counts = {"committed": result.committed, "stored": result.stored}
    return counts | {kind: result.findings[kind] for kind in _KINDS}


def _timed(bench: Bench, program: str, *arguments: object) -> tuple[float, dict[str, int]]:
    """Seconds that a fresh process takes, and what it found; in tests, where seconds mean nothing, none is started."""
    if bench.effort is Effort.TINY:
        directory, other = Path(str(arguments[0])), str(arguments[1])
        if program is _PLAIN:
            return 1.0, plain_audit(directory, Path(other))
        from qmq_pipeline.spark.session import get_session

        return 1.0, our_audit(get_session, directory, other, is_ready=arguments[2] == "ready")
    said: list[str] = []
    line = [sys.executable, "-c", program, *map(str, arguments)]

    def work() -> None:
        done = subprocess.run(line, env=environment(), capture_output=True, text=True, check=False)
        if done.returncode:
            raise UnlikeError(done.stderr[-2_000:])
        said.append(done.stdout.splitlines()[-1])

    seconds = elapsed_s(work)
    found: dict[str, int] = json.loads(said[0])
    return seconds, found
