"""P-f beside plain Python: what was committed against what is stored, each in a process of its own, cold.

The plain program is what a careful person would write in an afternoon: the log into a dictionary by id, the
outbox row by row against it. Both say the same, and the benchmark holds them to it. The pipeline does what its
commands do: processes of this machine ingest, and an audit starts Spark (2 GiB of heap) when it leaves a doubt.

How much of the audit the tallies spare is measured in the session that is there, against one join of everything: once,
for a join of millions takes minutes.
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

from benchmarks.measure import Effort, elapsed_s, interleave, paired_ratios
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


def cold_rows(bench: Bench, spark: SparkSession, messages: int) -> list[Row]:
    """Ratios of plain Python to ours, and of joins to tallies. Requires: a log of `Growth` of so many."""
    tables = bench.directory / "cold-tables"
    log, database = bench.directory / LOG, bench.directory / f"{LOG}.db"
    taken: dict[str, list[float]] = {"plain": [], "cold": [], "ready": []}
    for _ in range(min(bench.rounds, _ROUNDS_MAX)):
        shutil.rmtree(tables, ignore_errors=True)
        answers = {
            "plain": _timed(bench, _PLAIN, log, database),
            "cold": _timed(bench, _OURS, bench.directory, tables, "cold"),
            "ready": _timed(bench, _OURS, bench.directory, tables, "ready"),
        }
        if len({json.dumps(found) for _, found in answers.values()}) != 1:
            raise UnlikeError(str(answers))
        for name, (seconds, _) in answers.items():
            taken[name].append(seconds)
    joins = _join_figures(bench, spark, tables)
    shutil.rmtree(tables, ignore_errors=True)
    figures = (
        ("P-f: plain Python / ingest and audit, cold", taken["plain"], taken["cold"], 1.0),
        ("P-f: plain Python / audit of ready tables, cold", taken["plain"], taken["ready"], 3.5),
        *joins,
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


def _join_figures(
    bench: Bench, spark: SparkSession, tables: Path
) -> list[tuple[str, list[float], list[float], float]]:
    """The audit, and the totals alone, by joins and by tallies. Requires: ready tables."""
    from pyspark.sql import functions as fn

    from qmq_pipeline.jobs.audit import audit
    from qmq_pipeline.jobs.audit_tallies import Tallies
    from qmq_pipeline.jobs.audit_window import judged_window
    from qmq_pipeline.tables.lake import Lake
    from qmq_pipeline.tables.schemas import MESSAGES, OUTBOX

    config, lake = config_of(bench.directory, str(tables)), Lake(str(tables))

    def join_ids() -> None:
        stored = lake.read(spark, MESSAGES).selectExpr("message_id AS stored_id")
        both = lake.read(spark, OUTBOX).join(
            stored, fn.expr("message_id = stored_id"), "full_outer"
        )
        if both.where("message_id IS NULL OR stored_id IS NULL").count():
            raise UnlikeError("an id is on one side alone")

    def merge_tallies() -> None:
        words = Tallies.read(lambda: spark, lake, judged_window(lake, config)).words
        if words.committed()[0] == 0:
            raise UnlikeError("no row was counted")

    taken = interleave(
        {
            "audit by joins": lambda: elapsed_s(lambda: audit(spark, config, cross_check=True)),
            "audit": lambda: elapsed_s(lambda: audit(spark, config)),
            "join": lambda: elapsed_s(join_ids),
            "tallies": lambda: elapsed_s(merge_tallies),
        },
        rounds=1,
    )
    return [
        (
            "P-f: audit by a join of everything / by tallies",
            taken["audit by joins"],
            taken["audit"],
            1.4,
        ),
        ("P-f: totals by a join of ids / by tallies", taken["join"], taken["tallies"], 3.0),
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
    """The same by the pipeline; Spark is started when it is needed, as the commands do it."""
    from qmq_pipeline.jobs.audit import audit
    from qmq_pipeline.jobs.ingest_both import ingest_both
    from qmq_pipeline.work.workers import LocalWorkers

    config = config_of(directory, tables)
    if not is_ready:
        with LocalWorkers() as workers:
            ingest_both(workers, config)
    result = audit(start, config)
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
