"""Half of P-g: a micro-batch of 100,000 rows, from the trigger to its commit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from benchmarks.pipeline.logs import conditions
from benchmarks.result import Goal, Row
from benchmarks.suite import Bench

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_BATCH_ROWS: Final = 100_000


def stream_rows(bench: Bench, spark: SparkSession, messages: int) -> list[Row]:
    """Seconds of each batch that is neither the first nor the last. Requires: the log of `scan_rows`."""
    log = bench.directory / "log"
    length = sum(path.stat().st_blocks * 512 for path in (log / "commitlog").iterdir())
    rows_wanted = min(_BATCH_ROWS, messages // 2)
    query = (
        spark.readStream.format("qmq")
        .option("path", str(log))
        .option("max_bytes_per_trigger", str(length * rows_wanted // messages))
        .load()
        .writeStream.format("noop")
        .option("checkpointLocation", str(bench.directory / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    taken_ms = [one.durationMs["triggerExecution"] for one in query.recentProgress]
    # The first batch warms up, the last is shorter than the others.
    samples = [one / 1000 for one in taken_ms[1:-1] or taken_ms]
    return [
        Row(
            figure=f"P-g: a micro-batch of about {rows_wanted:,} rows",
            unit="s",
            samples=tuple(samples),
            conditions=conditions(messages),
            goal=Goal(bound=0.35, is_floor=False),
        )
    ]
