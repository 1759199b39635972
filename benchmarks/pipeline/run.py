"""P: what the pipeline's sources and jobs cost beside Parquet, JDBC, the JVM's writer and plain Python.

Everything that is compared reads the same messages on the same cores, in turns. Warm figures come from one local
session: a round that is not counted goes first, so that compiled code and the page cache serve all alike. Cold
ones are those of fresh processes, with the start of Spark in them where the command starts it. The bodies are random bytes, half of each
message, the rest of which compresses. Rows of a scan are not collected: Spark's sink `noop` takes them.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from benchmarks.measure import Effort
from benchmarks.pipeline.growth import Growth
from benchmarks.pipeline.live import live_rows
from benchmarks.pipeline.outbox import find_jar, outbox_rows
from benchmarks.pipeline.plain import cold_rows
from benchmarks.pipeline.scan import scan_rows, wide_rows
from benchmarks.pipeline.start import start_rows
from benchmarks.pipeline.stream import stream_rows
from benchmarks.result import Row
from benchmarks.suite import Bench

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Where figures mean nothing, Spark need not think about how to be quick.
_TINY: Final = {
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.maxPlanStringLength": "1000",
    "spark.sql.ui.explainMode": "simple",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:ReservedCodeCacheSize=128m",
}


#: A round of millions takes minutes.
_ROUNDS_MAX: Final = 2
#: The last growth takes about four minutes; a machine that was slow until then is spared it.
_LARGE_BEFORE_S: Final = 720.0


def run(bench: Bench) -> Iterator[Row]:
    """P-a to P-h, as they come.

    With `--full-size` twice as many for the scans and for plain Python, and all jobs on twenty million messages,
    which takes long; without it only those two whose work is for all there is are run on so many.
    """
    from qmq_pipeline.spark.session import SessionOptions, get_session

    began_s = time.monotonic()
    is_tiny = bench.effort is Effort.TINY
    messages = bench.effort.pick(tiny=2_000, quick=200_000, full=1_000_000)
    if bench.is_full_size:
        messages *= 2
    jar = None if is_tiny else find_jar()
    settings = {**(_TINY if is_tiny else {}), **({"spark.jars": str(jar)} if jar else {})}
    spark = get_session(SessionOptions(log_file=bench.directory / "jvm.log", settings=settings))
    try:
        yield from scan_rows(bench, spark, messages)
        if not is_tiny:  # the same code, with other bodies
            yield from wide_rows(bench, spark, messages // 4)
        yield from outbox_rows(bench, spark, messages // 2, has_jar=jar is not None)
        yield from stream_rows(bench, spark, messages)
        yield from live_rows(bench, spark)
        yield from _growth_rows(bench, spark, began_s)
    finally:
        with contextlib.suppress(OSError):  # Ctrl-C ends the JVM, too, and is what has to be told
            spark.stop()
    yield from start_rows(bench)


def _growth_rows(bench: Bench, spark: SparkSession, began_s: float) -> Iterator[Row]:
    """One log that grows to its full size, with what is measured on its way."""
    small = bench.effort.pick(tiny=2_000, quick=100_000, full=1_000_000)
    middle = bench.effort.pick(tiny=2_000, quick=200_000, full=5_000_000)
    large = bench.effort.pick(tiny=2_000, quick=400_000, full=20_000_000)
    if bench.is_full_size:
        middle *= 2
    rounds = min(bench.rounds, _ROUNDS_MAX)
    growth = Growth(bench, spark)
    growth.to(small)
    if bench.effort is not Effort.TINY:  # the first jobs of all
        growth.run_two(rounds)
    growth.run_all(rounds)
    if middle > small:
        growth.to(middle)
        growth.run_two(1)
        growth.run_all(1)
    yield from cold_rows(bench, middle)
    taken_s = time.monotonic() - began_s
    if large > middle and (bench.is_full_size or taken_s < _LARGE_BEFORE_S):
        growth.to(large)
        growth.run_two(1)
        if bench.is_full_size:
            growth.run_all(1)
    elif large > middle:
        print(
            f"pipeline: {taken_s:.0f} s are over, so the log does not grow to {large:,} messages; "
            "--full-size takes the time",
            file=sys.stderr,
        )
    yield from growth.rows()
