"""The other half of P-g: from a send to its row in a table, with a broker at work and somebody who follows it.

A sender of its own process sends a thousand messages a second. What follows it is a query of one's own on the stream of
the source, which appends each micro-batch to a folder of Parquet files. A row counts as there when its file is, by the clock
that all processes of a machine share.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow.parquet as pq

from benchmarks.load import encode_message
from benchmarks.measure import percentile
from benchmarks.result import Conditions, Goal, Row
from benchmarks.suite import Bench
from benchmarks.worker import Control
from qmq_client import Message
from qmq_client.transport.http import HttpTransport
from qmq_client.wire.frame import build_message_frame

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SUBJECT: Final = "live"
#: A round is messages of twenty seconds; percentiles of thousands of them vary little.
_ROUNDS_MAX: Final = 2
_PER_S: Final = 1_000
_PER_FRAME: Final = 20
_BODY_BYTES: Final = 200
#: Messages of the first seconds warm the query up.
_WARM_UP_S: Final = 4.0
_DEADLINE_S: Final = 120.0
_LOOK_S: Final = 0.05


def live_rows(bench: Bench, spark: SparkSession) -> list[Row]:
    """Percentiles of each round, in seconds."""
    messages = bench.effort.pick(tiny=200, quick=8_000, full=20_000)
    rounds = []
    for number in range(min(bench.rounds, _ROUNDS_MAX)):
        rounds.append(_latencies_s(bench, spark, messages, bench.directory / f"live-{number}"))
    note = f"{messages:,} messages per round, {_PER_S:,} a second, the first {_WARM_UP_S:.0f} s left out"
    return [
        Row(
            figure=f"P-g: send → row in a table that follows, {name}",
            unit="s",
            samples=tuple(percentile(times, share) for times in rounds),
            conditions=Conditions(
                durability="fdatasync before the answer",
                client="local session over HTTP; sender through HttpTransport in a process of its own",
                batch_messages=_PER_FRAME,
                message_bytes=_BODY_BYTES,
                note=note,
            ),
            goal=Goal(bound=bound, is_floor=False),
        )
        for name, share, bound in (("p50", 0.5, 0.25), ("p99", 0.99, 0.5))
    ]


def _latencies_s(bench: Bench, spark: SparkSession, messages: int, folder: Path) -> list[float]:
    """Of every message behind the warm-up, how long after its send its row was there."""
    written: dict[int, float] = {}
    with bench.processes() as processes:
        broker = processes.start_broker()
        sender = processes.start_worker(
            f"{__name__}:send", broker_url=broker.url, messages=messages
        )
        sender.hear()  # the first frame is stored, so there is a log to follow

        def keep(frame: DataFrame, number: int) -> None:
            frame.write.parquet(str(folder / f"batch={number}"))
            written[number] = time.time()

        query = _follow(spark, broker.url, folder, keep)
        try:
            sender.tell("go")
            sender.hear()
            _wait_for(query, folder, written, messages + _PER_FRAME)
        finally:
            query.stop()
    first_ms = 1000 * min(written.values())
    rows = spark.read.parquet(str(folder)).selectExpr("batch", "unix_millis(born_at) AS ms")
    every = [(written[row["batch"]] - row["ms"] / 1000, row["ms"]) for row in rows.collect()]
    warm = [taken for taken, ms in every if ms >= first_ms + 1000 * _WARM_UP_S]
    return warm or [taken for taken, _ in every]


def _follow(spark: SparkSession, url: str, folder: Path, keep: Any) -> Any:
    reader = spark.readStream.format("qmq").option("broker_url", url)
    columns = "subject,sequence,message_id,born_at,stored_at,body"
    return (
        reader.option("columns", columns)
        .load()
        .writeStream.foreachBatch(keep)
        .option("checkpointLocation", str(folder) + "-checkpoint")
        .start()
    )


def _wait_for(query: Any, folder: Path, written: Mapping[int, float], rows: int) -> None:
    """Until so many rows are there. They are counted here: in a batch the count would be of its time."""
    ends_at_s = time.monotonic() + _DEADLINE_S
    counted: dict[int, int] = {}
    while sum(counted.values()) < rows:
        for number in written.keys() - counted.keys():
            files = (folder / f"batch={number}").glob("*.parquet")
            counted[number] = sum(pq.read_metadata(file).num_rows for file in files)
        if query.exception() is not None:
            raise query.exception()
        if time.monotonic() > ends_at_s:
            raise TimeoutError(f"{sum(counted.values())} of {rows} rows came")
        time.sleep(_LOOK_S)


def send(control: Control, *, broker_url: str, messages: int) -> None:
    """The sender: a frame at once, and on a word the others, each at its time."""
    transport = HttpTransport(broker_url)
    body = b"." * _BODY_BYTES

    def frame() -> bytes:
        made = [encode_message(Message(SUBJECT, body)) for _ in range(_PER_FRAME)]
        return build_message_frame({SUBJECT: made})

    transport.send(frame())
    control.tell("there")
    control.hear()
    begin_s = time.monotonic()
    for number in range(messages // _PER_FRAME):
        wait_s = begin_s + number * _PER_FRAME / _PER_S - time.monotonic()
        if wait_s > 0:
            time.sleep(wait_s)
        transport.send(frame())
    control.tell("done")
    transport.close()
