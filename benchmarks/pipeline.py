"""P: what the pipeline's source and jobs cost beside Parquet, the JVM's writer and plain Python.

Everything that is compared reads the same messages in one local session on all cores, in turns, warm: a
round that is not counted comes first, so that compiled code and the page cache serve all alike. The
bodies are random bytes, half of each message, the rest of which compresses. Rows of a scan are not
collected: Spark's sink `noop` takes them.

Five columns are also set beside a source that gives ready batches: what stands between it and the log's is our
work, what stands between it and Parquet is Spark's way from Python to its rows.

Not here: the outbox beside the JDBC source (P-e), which wants a JDBC driver's jar; how long a message takes into
a live table (half of P-g); and P-f beside plain Python.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.measure import Effort, elapsed_s, interleave, paired_ratios
from benchmarks.result import Conditions, Goal, Row
from benchmarks.suite import Bench
from qmq_broker.clock import SYSTEM_CLOCK
from qmq_broker.options import StoreOptions
from qmq_broker.storage.files.disk import OsDisk
from qmq_broker.storage.store import Store
from qmq_client.wire.frame import FrameKind, build_message_frame, parse_message_frame
from qmq_client.wire.message_id import MessageIds
from qmq_client.wire.record import Record, decode_record, encode_record

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FRAME_MESSAGES: Final = 500
SUBJECTS: Final = 20
BODY_BYTES: Final = 100
_FIVE: Final = ("subject", "sequence", "message_id", "stored_at", "body_bytes")
_FRAMES_PER_COMMIT: Final = 16
_BATCH_ROWS: Final = 100_000
#: Where figures mean nothing, Spark need not think about how to be quick.
_TINY: Final = {
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}
#: Starts a session, makes one row of ten, and says when which was done.
_START: Final = """
import time
began = time.monotonic()
from qmq_pipeline.session import get_session
spark = get_session()
started = time.monotonic()
spark.range(10).count()
print(started - began, time.monotonic() - began)
spark.stop()
"""


def run(bench: Bench) -> list[Row]:
    """Ratios of scans and writes, seconds of a whole run as data grows, seconds of a start."""
    from qmq_pipeline.session import SessionOptions, get_session

    messages = bench.effort.pick(tiny=2_000, quick=200_000, full=2_000_000)
    small = bench.effort.pick(tiny=1_000, quick=100_000, full=1_000_000)
    large = bench.effort.pick(tiny=2_000, quick=400_000, full=20_000_000)
    starts = start_rows(bench)
    settings = _TINY if bench.effort is Effort.TINY else {}
    spark = get_session(SessionOptions(log_file=bench.directory / "jvm.log", settings=settings))
    try:
        return [
            *scan_rows(bench, spark, messages),
            *stream_rows(bench, spark, messages),
            *growth_rows(bench, spark, small, large),
            *starts,
        ]
    finally:
        spark.stop()


def start_rows(bench: Bench) -> list[Row]:
    """P-h: what somebody waits for before anything of his own is done."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    samples: list[tuple[float, float]] = []
    for _ in range(bench.rounds):
        began_s = time.monotonic()
        said = subprocess.run(
            [sys.executable, "-c", _START],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        samples.append((float(said[0]), time.monotonic() - began_s))
    conditions = Conditions(durability="none", client="fresh process, local session")
    figures = (
        ("P-h: start of a local session", [first for first, _ in samples], 5.0),
        ("P-h: cold start to the first small answer", [whole for _, whole in samples], 13.0),
    )
    return [
        Row(
            figure=figure,
            unit="s",
            samples=tuple(taken),
            conditions=conditions,
            goal=Goal(bound=bound, is_floor=False),
        )
        for figure, taken, bound in figures
    ]


def scan_rows(bench: Bench, spark: SparkSession, messages: int) -> list[Row]:
    """P-a to P-d: the source beside Parquet of the same rows, plain Python, and the JVM's writer."""
    log = bench.directory / "log"
    fill(log, messages)
    ingested = _Folders(bench.directory / "ingested")
    tables = _ingest(spark, log, ingested.fresh())
    from qmq_pipeline.lake import Lake
    from qmq_pipeline.schemas import MESSAGES

    parquet = Lake(tables).read(spark, MESSAGES)
    written = _Folders(bench.directory / "written")
    variants = {
        "all": lambda: _taken_s(_source(spark, log)),
        "all of Parquet": lambda: _taken_s(parquet),
        "five": lambda: _taken_s(_source(spark, log, *_FIVE)),
        "five of Parquet": lambda: _taken_s(parquet.select(*_FIVE)),
        "ready": lambda: _taken_s(_ready(spark, messages)),
        "count": lambda: elapsed_s(lambda: _count(_source(spark, log, "subject"))),
        "count of Parquet": lambda: elapsed_s(lambda: _count(parquet)),
        "plain Python": lambda: elapsed_s(lambda: plain_scan(log)),
        "workers": lambda: elapsed_s(lambda: _ingest(spark, log, ingested.fresh())),
        "JVM": lambda: elapsed_s(lambda: _write(_source(spark, log), written.fresh())),
    }
    if bench.effort is not Effort.TINY:
        interleave(variants, rounds=1)  # warm
    taken = interleave(variants, rounds=bench.rounds)
    goals = (
        ("P-a: Parquet / source, all columns", "all of Parquet", "all", 0.5, True),
        ("P-a: Parquet / source, five columns", "five of Parquet", "five", 0.55, True),
        ("P-a: ready batches / source, five columns", "ready", "five", 0.75, True),
        ("P-b: plain Python / source, all columns", "plain Python", "all", 4.0, True),
        ("P-c: Parquet / source, count by subject", "count of Parquet", "count", 0.35, True),
        ("P-d: ingest / scan of all columns", "workers", "all", 1.3, False),
        ("P-d: JVM's writer / ingest", "JVM", "workers", 2.0, True),
    )
    conditions = _conditions(messages)
    return [
        Row(
            figure=figure,
            unit="ratio",
            samples=tuple(paired_ratios(taken[above], taken[below])),
            conditions=conditions,
            goal=Goal(bound=bound, is_floor=is_floor),
        )
        for figure, above, below, bound, is_floor in goals
    ]


def stream_rows(bench: Bench, spark: SparkSession, messages: int) -> list[Row]:
    """Half of P-g: a micro-batch of 100,000 rows, from the trigger to its commit.

    Requires: the log of `scan_rows`.
    """
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
            conditions=_conditions(messages),
            goal=Goal(bound=0.35, is_floor=False),
        )
    ]


def growth_rows(bench: Bench, spark: SparkSession, small: int, large: int) -> list[Row]:
    """P-f: ingest to audit of a few messages and of many; how much more one of many costs."""
    per_million: dict[int, list[float]] = {}
    again: list[float] = []
    for messages in (small, large):
        log = bench.directory / f"log-{messages}"
        fill(log, messages)
        folders = _Folders(bench.directory / f"run-{messages}")
        taken_s: list[float] = []
        repeated_s: list[float] = []
        for _ in range(bench.rounds):
            tables = folders.fresh()
            taken_s.append(elapsed_s(partial(_run, spark, log, tables)))
            repeated_s.append(elapsed_s(partial(_run, spark, log, tables)))
        per_million[messages] = [one * 1e6 / messages for one in taken_s]
        again = paired_ratios(taken_s, repeated_s)
        folders.remove()
        shutil.rmtree(log)
    rows = [
        Row(
            figure=f"P-f: ingest to audit, {messages:,} messages",
            unit="s per million",
            samples=tuple(taken),
            conditions=_conditions(messages),
        )
        for messages, taken in per_million.items()
    ]
    ratio = Row(
        figure=f"P-f: one message of {large:,} / one of {small:,}",
        unit="ratio",
        samples=tuple(paired_ratios(per_million[large], per_million[small])),
        conditions=_conditions(large),
        goal=Goal(bound=1.1, is_floor=False),
    )
    repeated = Row(
        figure=f"P-f: {large:,} messages / once more when nothing is new",
        unit="ratio",
        samples=tuple(again),
        conditions=_conditions(large),
        goal=Goal(bound=3.5, is_floor=True),
    )
    return [ratio, repeated, *rows]


def fill(directory: Path, messages: int) -> None:
    """A broker's data directory with so many messages, closed as a broker closes it.

    Requires: a multiple of `FRAME_MESSAGES`.
    """
    options = StoreOptions(dedupe_ids=0, index_entries=0, segment_bytes=256 * 1024 * 1024)
    store = Store.open(OsDisk(str(directory)), SYSTEM_CLOCK, options)
    endless = _frames()
    for left in range(messages // FRAME_MESSAGES, 0, -_FRAMES_PER_COMMIT):
        frames = itertools.islice(endless, min(left, _FRAMES_PER_COMMIT))
        store.append([parse_message_frame(frame) for frame in frames])
        store.sync()
    store.close()


def plain_scan(directory: Path) -> int:
    """Every field of every message as a tuple, by one process without Spark or Arrow."""
    from qmq_pipeline.log import COMMIT_LOG
    from qmq_pipeline.options import Place
    from qmq_pipeline.places import open_log

    reader, count = open_log(Place(path=str(directory)), COMMIT_LOG), 0
    bounds = reader.bounds()
    for within in reader.ranges(bounds.first_offset, bounds.next_offset):
        for scanned in reader.frames(within):
            if scanned.header.kind is not FrameKind.MESSAGES:
                continue
            for subject, data in parse_message_frame(scanned.data).records():
                record = decode_record(subject, data)
                _ = tuple(getattr(record, name) for name in Record.__struct_fields__)
                count += 1
    reader.close()
    return count


class _Folders:
    """Folders for what is written again in each round; the one before goes first."""

    def __init__(self, parent: Path) -> None:
        self._parent = parent
        self._number = 0

    def fresh(self) -> str:
        """A name that nothing stands under. The first one stays: others read it."""
        if self._number > 1:
            shutil.rmtree(self._parent / str(self._number), ignore_errors=True)
        self._number += 1
        return str(self._parent / str(self._number))

    def remove(self) -> None:
        shutil.rmtree(self._parent, ignore_errors=True)


def _frames() -> Iterator[bytes]:
    """Frames without end, the ids as a producer makes them."""
    ids, draw = MessageIds(1), random.Random(7)
    names = [f"subject-{number}" for number in range(SUBJECTS)]
    for number in itertools.count():
        name = names[number % SUBJECTS]
        records = [
            encode_record(
                Record(
                    message_id=ids.next_id(),
                    subject=name,
                    key=f"customer-{i % 50}",
                    headers=(("source", "benchmark"), ("trace", f"{i:016x}")),
                    body=draw.randbytes(BODY_BYTES),
                    born_at_ms=SYSTEM_CLOCK.now_ms(),
                )
            )
            for i in range(FRAME_MESSAGES)
        ]
        yield build_message_frame({name: records})


def _source(spark: SparkSession, log: Path, *columns: str) -> DataFrame:
    reader = spark.read.format("qmq").option("path", str(log))
    return (reader.option("columns", ",".join(columns)) if columns else reader).load()


def _ready(spark: SparkSession, rows: int) -> DataFrame:
    from benchmarks.pipeline_floor import FORMAT, FloorSource

    spark.dataSource.register(FloorSource)
    return spark.read.format(FORMAT).option("rows", str(rows)).load()


def _taken_s(frame: DataFrame) -> float:
    return elapsed_s(lambda: frame.write.format("noop").mode("overwrite").save())


def _count(frame: DataFrame) -> int:
    return len(frame.groupBy("subject").count().collect())


def _write(frame: DataFrame, folder: str) -> None:
    frame.write.parquet(folder)


def _config(log: Path, tables: str) -> Any:
    from qmq_pipeline.config import PipelineConfig
    from qmq_pipeline.options import Place

    return PipelineConfig(tables=tables, place=Place(path=str(log)))


def _ingest(spark: SparkSession, log: Path, tables: str) -> str:
    from qmq_pipeline.jobs.ingest import ingest

    ingest(spark, _config(log, tables))
    return tables


def _run(spark: SparkSession, log: Path, tables: str) -> None:
    from qmq_pipeline.jobs.run import run as run_all

    run_all(spark, _config(log, tables))


def _conditions(messages: int) -> Conditions:
    return Conditions(
        durability="none",
        client=f"local session, {os.cpu_count()} cores",
        batch_messages=FRAME_MESSAGES,
        message_bytes=BODY_BYTES,
        note=f"{messages:,} messages of {SUBJECTS} subjects, with key and two headers",
    )
