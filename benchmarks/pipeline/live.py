"""The other half of P-g: from a send to its row in a table, with a broker at work and somebody who follows it.

A sender of its own process sends a thousand messages a second. What follows it is a query of one's own on the stream of
the source, which appends each micro-batch to a folder of Parquet files, and `ingest --follow`, which keeps our tables.
A row counts as there when its file is, or when its batch is committed, by the clock that all processes of a machine
share.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING, Any, Final

import pyarrow.parquet as pq

from benchmarks.load import encode_message
from benchmarks.measure import percentile
from benchmarks.result import Conditions, Goal, Row
from benchmarks.suite import Bench
from benchmarks.worker import Control
from qmq_client import Message
from qmq_client.signal_flag import SignalFlag
from qmq_client.transport.http import HttpTransport
from qmq_client.wire.frame import build_message_frame
from qmq_pipeline.jobs.follow import follow
from qmq_pipeline.places.config import PipelineConfig
from qmq_pipeline.places.options import Place
from qmq_pipeline.tables.lake import Lake
from qmq_pipeline.tables.schemas import MESSAGES
from qmq_pipeline.work.workers import LocalWorkers

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
#: The least that the command takes.
_EVERY_S: Final = 0.1


def live_rows(bench: Bench, spark: SparkSession) -> list[Row]:
    """Percentiles of each round, in seconds."""
    messages = bench.effort.pick(tiny=200, quick=8_000, full=20_000)
    rounds: dict[str, list[list[float]]] = {"a query of one's own": [], "ingest --follow": []}
    for number in range(min(bench.rounds, _ROUNDS_MAX)):
        folder = bench.directory / f"live-{number}"
        rounds["a query of one's own"].append(_latencies_s(bench, spark, messages, folder))
        tables = bench.directory / f"tables-{number}"
        rounds["ingest --follow"].append(_followed_s(bench, messages, tables))
    note = f"{messages:,} messages per round, {_PER_S:,} a second, the first {_WARM_UP_S:.0f} s left out"
    clients = {
        "a query of one's own": "local session over HTTP",
        "ingest --follow": f"local workers over HTTP, a look every {_EVERY_S} s",
    }
    return [
        Row(
            figure=f"P-g: send → row in a table that follows, by {who}, {name}",
            unit="s",
            samples=tuple(percentile(times, share) for times in some),
            conditions=Conditions(
                durability="fdatasync before the answer",
                client=f"{clients[who]}; sender through HttpTransport in a process of its own",
                batch_messages=_PER_FRAME,
                message_bytes=_BODY_BYTES,
                note=note,
            ),
            goal=Goal(bound=bound, is_floor=False),
        )
        for who, some in rounds.items()
        for name, share, bound in (("p50", 0.5, 0.25), ("p99", 0.99, 0.5))
    ]


def _followed_s(bench: Bench, messages: int, folder: Path) -> list[float]:
    """The same for our own tables: messages come in order, so how many rows there are says which."""
    wanted = messages + _PER_FRAME
    #: How many rows there were, and when.
    there: list[tuple[int, float]] = []
    stop = SignalFlag()
    with bench.processes() as processes:
        broker = processes.start_broker()
        sender = processes.start_worker(
            f"{__name__}:send", broker_url=broker.url, messages=messages
        )
        sender.hear()

        def on_batch(rows: Mapping[str, int]) -> None:
            before = there[-1][0] if there else 0
            there.append((before + rows.get(MESSAGES.name, 0), time.time()))
            if len(there) == 1:
                sender.tell("go")
            elif there[-1][0] >= wanted:
                stop.set()

        config = PipelineConfig(tables=str(folder), place=Place(broker_url=broker.url))
        deadline = Timer(_DEADLINE_S, stop.set)
        deadline.start()
        try:
            with LocalWorkers() as workers:
                follow(workers, config, stop, every_s=_EVERY_S, on_batch=on_batch)
        finally:
            deadline.cancel()
        if there[-1][0] < wanted:
            raise TimeoutError(f"{there[-1][0]} of {wanted} rows came")
        sender.hear()
    born_s = _born_s(Lake(str(folder)))
    begin_s = there[0][1]
    every = [
        (at_s - born_s[sequence], at_s)
        for (first, _), (after, at_s) in itertools.pairwise(there)
        for sequence in range(first, after)
    ]
    warm = [taken for taken, at_s in every if at_s >= begin_s + _WARM_UP_S]
    return warm or [taken for taken, _ in every]


def _born_s(lake: Lake) -> list[float]:
    """When each message was made, in order of their sequences."""
    files = [file for one in lake.ranges(MESSAGES) for file in one.files]
    born_s: list[float] = []
    for file in files:
        for batch in lake.read_file(MESSAGES, file.path, ["born_at"]):
            born_s += [at.timestamp() for at in batch["born_at"].to_pylist()]
    return born_s


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
