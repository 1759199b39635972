"""`qmq pipeline ingest --follow`: what comes into the logs comes into the bronze tables, until somebody stops it.

Two streams of the source tell when there is something new, in messages or in actions; a micro-batch of both is
one run of `ingest`, whose workers write the files. So no row goes through the JVM, and the tables are kept by
their own commits: what the streams have in their checkpoint is worth nothing, and is a temporary folder.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from threading import Event, Lock
from typing import TYPE_CHECKING, Final

from qmq_pipeline.jobs.ingest import Ingested, ingest
from qmq_pipeline.jobs.ingest_outbox import ingest_outbox
from qmq_pipeline.places.config import PipelineConfig
from qmq_pipeline.places.log import ACTION_LOG, COMMIT_LOG
from qmq_pipeline.places.places import with_token
from qmq_pipeline.sources.log_source import FORMAT

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: Log → the table whose stream tells of it, and the least column of it.
_STREAMS: Final = {
    COMMIT_LOG: ("messages", "physical_offset"),
    ACTION_LOG: ("actions", "action_offset"),
}
#: How long the main thread sleeps at a time: a signal is heard between two sleeps at the latest.
_LOOK_S: Final = 0.2


@dataclass(slots=True, kw_only=True)
class Followed:
    """What came in, altogether."""

    batches: int = 0
    #: Table → rows.
    rows: dict[str, int] = field(default_factory=dict)


#: Told what each batch brought: table → rows.
OnBatch = Callable[[Mapping[str, int]], None]


class _Follower:
    """What is shared between the thread that waits and the one in which Spark runs batches."""

    def __init__(
        self, spark: SparkSession, config: PipelineConfig, stop: Event, on_batch: OnBatch
    ) -> None:
        self._spark = spark
        self._config = config
        self._stop = stop
        self._on_batch = on_batch
        self.busy = Lock()
        self.done = Followed()
        self.error: Exception | None = None

    def batch(self, _: DataFrame, __: int) -> None:
        """One micro-batch; what the stream would give is not looked at."""
        with self.busy:
            if not self._stop.is_set():
                try:
                    self.run_once()
                except Exception as error:  # is raised again where somebody reads it
                    self.error = error
                    self._stop.set()

    def run_once(self, *, skip_expired: bool = False) -> Ingested:
        """One run of `ingest`; expired ranges may be skipped by the first alone: later ones are new."""
        # The outboxes first: what they show as sent is in the log when that is read.
        outbox = ingest_outbox(self._spark, self._config)
        found = ingest(self._spark, self._config, skip_expired=skip_expired)
        rows = {**({"outbox": sum(outbox.values())} if outbox else {}), **found.rows}
        self.done.batches += 1
        for name, count in rows.items():
            self.done.rows[name] = self.done.rows.get(name, 0) + count
        if any(rows.values()) or self.done.batches == 1:
            self._on_batch(rows)
        return found


def follow(
    spark: SparkSession,
    config: PipelineConfig,
    stop: Event,
    *,
    every_s: float,
    skip_expired: bool = False,
    on_batch: OnBatch,
) -> Followed:
    """Ingest what is there, then what comes, at most every so often, until `stop` is set.

    A batch that is under way then is brought to its end. Raises a `PipelineError`, as `ingest` does.
    """
    follower = _Follower(spark, config, stop, on_batch)
    begin = follower.run_once(skip_expired=skip_expired)
    with tempfile.TemporaryDirectory(prefix="qmq-follow-") as folder:
        query = (
            _news(spark, config, begin.next_offsets)
            .writeStream.foreachBatch(follower.batch)
            .option("checkpointLocation", f"file://{folder}")
            .trigger(processingTime=f"{round(every_s * 1000)} milliseconds")
            .start()
        )
        try:
            while query.isActive and not stop.wait(_LOOK_S):
                pass
        finally:
            stop.set()
            with follower.busy:
                query.stop()
        failed = query.exception()
    if follower.error is not None:
        raise follower.error
    if failed is not None:
        raise failed
    return follower.done


def _news(spark: SparkSession, config: PipelineConfig, offsets: Mapping[str, int]) -> DataFrame:
    """A row for whatever is stored or done behind these offsets."""
    assert config.place is not None
    place = {
        name: str(value)
        for name, value in asdict(with_token(config.place, os.environ)).items()
        if value
    }
    streams = [
        spark.readStream.format(FORMAT)
        .options(**place)
        .option("table", table)
        .option("columns", column)
        .option("first_offset", str(offsets[log]))
        .load()
        .selectExpr(f"{column} AS news")
        for log, (table, column) in _STREAMS.items()
    ]
    return streams[0].unionByName(streams[1])
