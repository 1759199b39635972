"""P-a to P-d: the source of the log beside Parquet of the same rows, plain Python, and the JVM's writer.

Five columns are also set beside a source that gives ready batches: what stands between it and the log's is our
work, what stands between it and Parquet is Spark's way from Python to its rows.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.measure import Effort, elapsed_s, interleave, paired_ratios
from benchmarks.pipeline.logs import Folders, conditions, fill, plain_scan
from benchmarks.result import Conditions, Goal, Row
from benchmarks.suite import Bench

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_FIVE: Final = ("subject", "sequence", "message_id", "stored_at", "body_bytes")
_WIDE_BYTES: Final = 1024


def scan_rows(bench: Bench, spark: SparkSession, messages: int) -> list[Row]:
    """P-a to P-d: the source beside Parquet of the same rows, plain Python, and the JVM's writer."""
    log = bench.directory / "log"
    fill(log, messages)
    ingested = Folders(bench.directory / "ingested")
    tables = ingested.fresh()
    first_s = elapsed_s(lambda: _ingest(spark, log, tables))
    parquet = _parquet(spark, tables)
    written = Folders(bench.directory / "written")
    is_tiny = bench.effort is Effort.TINY
    variants = {
        "all": lambda: _taken_s(_source(spark, log)),
        "all of Parquet": lambda: _taken_s(parquet),
        "five": lambda: _taken_s(_source(spark, log, *_FIVE)),
        "five of Parquet": lambda: _taken_s(parquet.select(*_FIVE)),
        "ready": lambda: _taken_s(_ready(spark, messages)),
        "count": lambda: elapsed_s(lambda: _count(_source(spark, log, "subject"))),
        "count of Parquet": lambda: elapsed_s(lambda: _count(parquet)),
        "plain Python": lambda: elapsed_s(lambda: plain_scan(log)),
        # Where figures mean nothing, the tables are not made again.
        "ingest": lambda: (
            first_s if is_tiny else elapsed_s(lambda: _ingest(spark, log, ingested.fresh()))
        ),
        "JVM": lambda: elapsed_s(lambda: _write(_source(spark, log), written.fresh())),
    }
    goals = (
        ("P-a: Parquet / source, all columns", "all of Parquet", "all", 0.5, True),
        ("P-a: Parquet / source, five columns", "five of Parquet", "five", 0.55, True),
        ("P-a: ready batches / source, five columns", "ready", "five", None, True),
        ("P-b: plain Python / source, all columns", "plain Python", "all", 4.0, True),
        ("P-c: Parquet / source, count by subject", "count of Parquet", "count", 0.35, True),
        ("P-d: ingest / source to Parquet", "ingest", "JVM", 1.5, False),
    )
    rows = _ratios(bench, variants, goals, conditions(messages))
    rate = Row(
        figure="P-d: ingest, rows a second",
        unit="M/s",
        samples=(messages / variants["ingest"]() / 1e6,),
        conditions=conditions(messages),
        goal=Goal(bound=0.3, is_floor=True),
    )
    return [*rows, rate]


def wide_rows(bench: Bench, spark: SparkSession, messages: int) -> list[Row]:
    """P-a once more, with bodies of a KiB that do not compress."""
    log = bench.directory / "wide log"
    fill(log, messages, body_bytes=_WIDE_BYTES)
    folders = Folders(bench.directory / "wide tables")
    parquet = _parquet(spark, _ingest(spark, log, folders.fresh()))
    variants = {
        "all": lambda: _taken_s(_source(spark, log)),
        "all of Parquet": lambda: _taken_s(parquet),
        "five": lambda: _taken_s(_source(spark, log, *_FIVE)),
        "five of Parquet": lambda: _taken_s(parquet.select(*_FIVE)),
    }
    goals = (
        ("P-a: Parquet / source, all columns, 1 KiB", "all of Parquet", "all", 0.65, True),
        ("P-a: Parquet / source, five columns, 1 KiB", "five of Parquet", "five", 0.55, True),
    )
    found = _ratios(bench, variants, goals, conditions(messages, body_bytes=_WIDE_BYTES))
    folders.remove()
    shutil.rmtree(log)
    return found


def _ratios(
    bench: Bench,
    variants: dict[str, Callable[[], float]],
    goals: Iterable[tuple[str, str, str, float | None, bool]],
    what: Conditions,
) -> list[Row]:
    """Rows of figure, variant above, variant below, bound if any, and whether that is the least allowed."""
    if bench.effort is not Effort.TINY:
        interleave(variants, rounds=1)  # warm
    taken = interleave(variants, rounds=bench.rounds)
    return [
        Row(
            figure=figure,
            unit="ratio",
            samples=tuple(paired_ratios(taken[above], taken[below])),
            conditions=what,
            goal=None if bound is None else Goal(bound=bound, is_floor=is_floor),
        )
        for figure, above, below, bound, is_floor in goals
    ]


def _source(spark: SparkSession, log: Path, *columns: str) -> DataFrame:
    reader = spark.read.format("qmq").option("path", str(log))
    return (reader.option("columns", ",".join(columns)) if columns else reader).load()


def _parquet(spark: SparkSession, tables: str) -> DataFrame:
    """The same messages, as ingest has written them."""
    from qmq_pipeline.tables.schemas import LOG, MESSAGES
    from qmq_pipeline.tables.store import Tables

    rows = Tables(spark, tables).read(LOG)
    return rows.where("kind = 'message'").select(*MESSAGES.names)


def _ready(spark: SparkSession, rows: int) -> DataFrame:
    from benchmarks.pipeline.floor import FORMAT, FloorSource

    spark.dataSource.register(FloorSource)
    return spark.read.format(FORMAT).option("rows", str(rows)).load()


def _taken_s(frame: DataFrame) -> float:
    return elapsed_s(lambda: frame.write.format("noop").mode("overwrite").save())


def _count(frame: DataFrame) -> int:
    return len(frame.groupBy("subject").count().collect())


def _write(frame: DataFrame, folder: str) -> None:
    frame.write.parquet(folder)


def _ingest(spark: SparkSession, log: Path, tables: str) -> str:
    from qmq_pipeline.jobs.ingest import ingest
    from qmq_pipeline.places.config import PipelineConfig
    from qmq_pipeline.places.options import Place

    ingest(spark, PipelineConfig(tables=tables, place=Place(path=str(log))))
    return tables
