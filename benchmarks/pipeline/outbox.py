"""P-e: rows of an outbox by our source beside Spark's own JDBC source, the same columns of the same table.

The driver's jar comes from Maven Central by Spark's own way, once, and stays under `.cache`. Without it our
rate stands alone.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.machine import ROOT
from benchmarks.measure import Effort, elapsed_s, interleave, paired_ratios
from benchmarks.pipeline.logs import conditions, fill
from benchmarks.pipeline.start import environment
from benchmarks.result import Goal, Row
from benchmarks.suite import Bench

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_PACKAGE: Final = "org.xerial:sqlite-jdbc:3.46.1.3"
_JARS: Final = ROOT / ".cache" / "bench-jars"
_DEADLINE_S: Final = 120
_FETCH: Final = """
import sys
from pathlib import Path
from qmq_pipeline.spark.session import SessionOptions, get_session
settings = {"spark.jars.packages": sys.argv[1], "spark.jars.ivy": sys.argv[2]}
get_session(SessionOptions(log_file=Path(sys.argv[2]) / "log", settings=settings)).stop()
"""
#: What our source reads, too: of the record its first bytes.
_QUERY: Final = (
    "(SELECT id, message_id, subject, state, attempts, created_at_ms, due_at_ms, "
    "SUBSTR(record, 1, 43) AS head, LENGTH(record) AS record_bytes, last_error FROM qmq_outbox)"
)
#: SQLite has no types for what is computed, and the driver guesses numbers.
_SCHEMA: Final = (
    "id BIGINT, message_id BINARY, subject STRING, state INT, attempts INT, created_at_ms BIGINT, "
    "due_at_ms BIGINT, head BINARY, record_bytes INT, last_error STRING"
)
_PARTITIONS: Final = 4


def find_jar() -> Path | None:
    """The JDBC driver of SQLite; None where it cannot be had."""
    found = sorted((_JARS / "jars").glob("*sqlite-jdbc*.jar"))
    if not found:
        _JARS.mkdir(parents=True, exist_ok=True)
        line = [sys.executable, "-c", _FETCH, _PACKAGE, str(_JARS)]
        try:
            subprocess.run(
                line, env=environment(), capture_output=True, check=False, timeout=_DEADLINE_S
            )
        except subprocess.TimeoutExpired:
            return None
        found = sorted((_JARS / "jars").glob("*sqlite-jdbc*.jar"))
    return found[0] if found else None


def outbox_rows(bench: Bench, spark: SparkSession, rows: int, *, has_jar: bool) -> list[Row]:
    """Rows per second, and the ratio to JDBC where there is its driver."""
    rows -= rows % 500
    path = bench.directory / "outbox.db"
    fill(bench.directory / "outbox-log", rows, outbox=path)
    variants = {"ours": lambda: _taken_s(_ours(spark, path, rows))}
    if has_jar:
        variants["JDBC"] = lambda: _taken_s(_jdbc(spark, path, rows))
    if bench.effort is not Effort.TINY:
        interleave(variants, rounds=1)  # warm
    taken = interleave(variants, rounds=bench.rounds)
    what = conditions(rows, "SQLite, as many rows of an outbox")
    found = [
        Row(
            figure="P-e: outbox by our source",
            unit="million rows/s",
            samples=tuple(rows / 1e6 / one for one in taken["ours"]),
            conditions=what,
        )
    ]
    if has_jar:
        ratio = Row(
            figure="P-e: JDBC / our source, outbox",
            unit="ratio",
            samples=tuple(paired_ratios(taken["JDBC"], taken["ours"])),
            conditions=what,
            goal=Goal(bound=0.45, is_floor=True),
        )
        found.insert(0, ratio)
    return found


def _ours(spark: SparkSession, path: Path, rows: int) -> DataFrame:
    reader = spark.read.format("qmq_outbox").option("url", f"sqlite:///{path}")
    return reader.option("partition_rows", str(-(-rows // _PARTITIONS))).load()


def _jdbc(spark: SparkSession, path: Path, rows: int) -> DataFrame:
    options = {
        "url": f"jdbc:sqlite:{path}",
        "driver": "org.sqlite.JDBC",
        "dbtable": _QUERY,
        "customSchema": _SCHEMA,
        "partitionColumn": "id",
        "lowerBound": "1",
        "upperBound": str(rows),
        "numPartitions": str(_PARTITIONS),
        "fetchsize": "20000",
    }
    return spark.read.format("jdbc").options(**options).load()


def _taken_s(frame: DataFrame) -> float:
    return elapsed_s(lambda: frame.write.format("noop").mode("overwrite").save())
