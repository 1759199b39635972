"""`qmq pipeline ingest`: logs and outboxes into the bronze tables, by streams of Spark with a checkpoint.

There are three streams, and each is a few lines: it reads the source and writes each micro-batch into a table. A
batch of a log begins where a part of the log begins (`whole_parts`), and replaces the parts that it has. So a batch
that is repeated, because a task, an executor or the driver died, adds nothing: every message is one row. A scan of
an outbox appends rows, of which the newest of each message counts.

The outboxes are read first, so that messages they show as sent are in the log when it is read. The
actions are read before the log for the same reason.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from qmq_client.clock import SYSTEM_CLOCK
from qmq_client.signal_flag import SignalFlag
from qmq_pipeline.errors import OptionError, TablesError, UnreachableError
from qmq_pipeline.jobs.batches import BatchWriter, tables_of
from qmq_pipeline.jobs.progress import OnProgress, Progress, no_progress
from qmq_pipeline.places.config import PipelineConfig
from qmq_pipeline.places.log import ACTION_LOG, COMMIT_LOG
from qmq_pipeline.places.options import BROKER_OPTIONS, Place
from qmq_pipeline.places.places import open_log, with_token
from qmq_pipeline.rows.outbox import require_outbox
from qmq_pipeline.spark.explain import explain
from qmq_pipeline.tables.schemas import ACTIONS, LOG, OUTBOX
from qmq_pipeline.tables.sequences import Runs
from qmq_pipeline.tables.store import Tables
from qmq_pipeline.tables.table import Table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

INGEST, ARCHIVE = "ingest", "archive"
#: Bytes of log in one micro-batch: the most that is repeated after a crash, and enough to keep all cores busy.
BATCH_BYTES: Final = 1024 * 1024 * 1024
#: How often a running query is checked, and the pause after an unreachable broker.
_LOOK_S: Final = 1
_LOST_MAX: Final = 1_000
_TABLE_OF: Final = {COMMIT_LOG: LOG, ACTION_LOG: ACTIONS}
_PLACE_OF: Final = {LOG: "physical_offset", ACTIONS: "action_offset"}
_NOUNS: Final = {"message": "messages"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ingested:
    """The rows that one run added, and the extent of the tables."""

    #: Kind of row of the log, and `actions` → rows.
    rows: dict[str, int] = field(default_factory=dict)
    #: Database → rows that are new, changed or open.
    outbox: dict[str, int] = field(default_factory=dict)
    #: Log → offset where the next run continues.
    next_offsets: dict[str, int] = field(default_factory=dict)
    #: Subject → runs of sequences that the broker has in quarantine, as far as this run met them.
    quarantined: Runs = field(default_factory=dict)


def ingest(
    spark: SparkSession,
    config: PipelineConfig,
    *,
    skip_expired: bool = False,
    on_progress: OnProgress = no_progress,
) -> Ingested:
    """Bring the bronze tables up to the ends of the logs and outboxes.

    `skip_expired`: continue after a range that retention has deleted and record the gap, instead of failing. Raises a
    `PipelineError`, or an error of Spark that `explain` understands; rows written before it stay.
    Without a place, `config` ingests only outboxes; without databases, only logs.
    """
    streams = Streams(spark, config, job=INGEST)
    before = streams.prepared()
    with streams.tables.writing("bronze"):
        names = streams.names()
        for number, name in enumerate(names):
            stage = Progress(stage=f"ingest {name}", done=number, total=len(names), rows=0)
            for batch in streams.batches(name, skip_expired=skip_expired):
                on_progress(replace(stage, stage=f"{stage.stage}, batch {batch}"))
            on_progress(replace(stage, done=number + 1))
        return streams.done(before)


def follow(
    spark: SparkSession,
    config: PipelineConfig,
    stop: SignalFlag,
    *,
    every_s: float,
    skip_expired: bool = False,
    on_batch: Callable[[Ingested], None],
) -> int:
    """Keep the bronze tables up to date until `stop` is set; returns the number of batches with rows.

    Each stream checks for new data at most every `every_s`. Existing data is ingested first, and
    only then may expired ranges be skipped. Later the streams wait for an unreachable broker
    without a limit.
    """
    first = ingest(spark, config, skip_expired=skip_expired)
    on_batch(first)
    count = 1
    streams = Streams(spark, config, job=INGEST)
    with streams.tables.writing("bronze"), streams.running(every_s):
        while not stop.wait(min(_LOOK_S, every_s)):
            if streams.came_in():
                on_batch(streams.done(streams.before()))
                count += 1
    return count


def check_sources(config: PipelineConfig) -> None:
    """Check that the sources can be read, before Spark is used; raises a `PipelineError`."""
    if not config.databases and config.place is None:
        raise OptionError(
            option="path",
            value="not given",
            allowed="a data directory or a broker",
            remedy="Give --path or --broker.",
        )
    for section in config.databases:
        require_outbox(section)
    if config.place is not None:
        open_log(with_token(config.place, os.environ), COMMIT_LOG).close()


class Streams:
    """The streams of one job, and their recorded progress."""

    def __init__(self, spark: SparkSession, config: PipelineConfig, *, job: str) -> None:
        self.spark = spark
        self.config = config
        self.tables = tables_of(spark, config)
        self._job = job
        self._queries: dict[str, StreamingQuery] = {}
        self._seen: dict[str, Any] = {}
        self._every_s = 0.0
        #: Log → position of its stream, as in the checkpoint.
        self.positions: dict[str, dict[str, Any]] = {}
        #: The progress to be recorded: log → offset, database → time of its last scan, and when the logs were read.
        self.ends: dict[str, Any] = {}

    def names(self) -> list[str]:
        """The streams: that of the outboxes, and one for each log."""
        outbox = [OUTBOX.name] if self.config.databases else []
        return outbox + ([] if self.config.place is None else [ACTION_LOG, COMMIT_LOG])

    def prepared(self) -> dict[str, Any]:
        """Check sources and tables before anything is written; returns the progress recorded last time."""
        check_sources(self.config)
        other = ARCHIVE if self._job == INGEST else INGEST
        if self.tables.progress(other):
            raise TablesError(
                path=self.tables.root,
                reason=f"it is the folder of `qmq pipeline {other}`",
                remedy="Give it a separate folder: an archive has only verified segments",
            )
        return self.before()

    def before(self) -> dict[str, Any]:
        """The progress recorded last time, for tables that still exist."""
        noted = self.tables.progress(self._job)
        for log, table in _TABLE_OF.items():
            if not self.tables.exists(table):
                noted.pop(log, None)
                noted.get("parts", {}).pop(log, None)
        self.ends = {**noted, **self.ends}
        return noted

    def run(self, name: str, *, is_sealed: bool = False) -> None:
        """Let one stream read all available data."""
        for _ in self.batches(name, is_sealed=is_sealed):
            pass

    def batches(
        self, name: str, *, skip_expired: bool = False, is_sealed: bool = False
    ) -> Iterator[int]:
        """The same; yields the numbers of finished batches, from the second one on."""
        if name != OUTBOX.name:
            self.ends.setdefault("read_at_ms", 0)
            if name == COMMIT_LOG:
                self.ends["read_at_ms"] = SYSTEM_CLOCK.now_ms()
        query = self._start(name, {"availableNow": True}, skip_expired, is_sealed)
        first: int | None = None
        reported = 1
        while not query.awaitTermination(_LOOK_S):
            if (last := query.lastProgress) is None:
                continue
            first = last.batchId if first is None else first
            if last.batchId - first + 1 > reported:
                reported = last.batchId - first + 1
                yield reported
        self._note(name, query)

    @contextmanager
    def running(self, every_s: float) -> Iterator[None]:
        """Run all streams during the block."""
        try:
            for name in self.names():
                self._queries[name] = self._start(name, self._every(every_s))
            self._every_s = every_s
            yield
        finally:
            for query in self._queries.values():
                query.stop()

    def _every(self, every_s: float) -> dict[str, Any]:
        return {"processingTime": f"{round(every_s * 1000)} milliseconds"}

    def came_in(self) -> bool:
        """Whether any stream has finished a batch with rows since; a stream that lost its broker is restarted."""
        is_new = False
        for name, query in self._queries.items():
            if not query.isActive:
                error = query.exception()
                told = None if error is None else explain(error, "")
                if error is not None and not isinstance(told, UnreachableError):
                    raise error
                self._queries[name] = self._start(name, self._every(self._every_s))
                continue
            last = query.lastProgress
            if last is None or last.batchId == self._seen.get(name):
                continue
            self._note(name, query)
            if name == COMMIT_LOG:
                self.ends["read_at_ms"] = SYSTEM_CLOCK.now_ms() - round(2_000 * self._every_s)
            self._seen[name] = last.batchId
            is_new |= bool(last.numInputRows)
        return is_new

    def _start(
        self,
        name: str,
        trigger: dict[str, Any],
        skip_expired: bool = False,  # private
        is_sealed: bool = False,
    ) -> StreamingQuery:
        table = _TABLE_OF.get(name, OUTBOX)
        reader = self.spark.readStream
        if table is OUTBOX:
            reader = reader.format("qmq_outbox").options(**self.outbox_options())
        else:
            reader = reader.format("qmq").options(**self.log_options(table))
            reader = reader.option("expired", "pass" if skip_expired else "fail")
            reader = reader.option("sealed", "on" if is_sealed else "off")
        write = BatchWriter(self.config, table)
        writer = reader.load().writeStream.foreachBatch(write).queryName(f"qmq {table.name}")
        writer = writer.option("checkpointLocation", self.tables.checkpoint(table))
        return writer.trigger(**trigger).start()

    def log_options(self, table: Table) -> dict[str, str]:
        """Options of the source `qmq` for one table."""
        assert self.config.place is not None
        return {
            **place_options(with_token(self.config.place, os.environ)),
            "table": table.name,
            "whole_parts": "on",
            "quarantined": "pass",
            "part_bytes": str(self.config.part_bytes),
            "max_bytes_per_trigger": str(max(BATCH_BYTES, self.config.part_bytes)),
        }

    def outbox_options(self) -> dict[str, str]:
        """Options of the source `qmq_outbox`."""
        sections = json.dumps([section_values(one) for one in self.config.databases])
        safety_s = str(round(self.config.outbox_safety_s))
        return {"sections_with_token": sections, "safety_s": safety_s}

    def _note(self, name: str, query: StreamingQuery) -> None:
        """Record the position of a stream, and that its table has new rows."""
        self.tables.look_again(_TABLE_OF.get(name, OUTBOX))
        last = query.lastProgress
        sources = json.loads(last.json)["sources"] if last is not None else []
        end = (
            sources[0]["endOffset"] if sources else None
        )  # `SourceProgress` has no JSON before Spark 4.2
        if not end:
            return
        if isinstance(end, str):  # Spark Connect gives it as text
            end = json.loads(end)
        if name == OUTBOX.name:
            scans = {database: int(one["scanned_at_ms"]) for database, one in end.items()}
            self.ends["scans"] = {**self.ends.get("scans", {}), **scans}
        else:
            self.positions[name] = end
            self.ends[name] = int(end["offset"])
            self.ends["store_id"] = end["store_id"]

    def done(self, before: Mapping[str, Any]) -> Ingested:
        """The rows added since `before`; records the extent of the tables."""
        new = {log: is_new(log, before) for log in _TABLE_OF}
        log = self.tables.read(LOG).where(new[COMMIT_LOG]).select("kind", "part")
        actions = self.tables.read(ACTIONS).where(new[ACTION_LOG])
        every = log.unionByName(actions.selectExpr("'actions' AS kind", "part"))
        rows, parts = dict[str, int](), {**dict.fromkeys(_TABLE_OF, 0), **before.get("parts", {})}
        for row in every.groupBy("kind").agg({"*": "count", "part": "max"}).collect():
            rows[_NOUNS.get(row["kind"], row["kind"])] = row["count(1)"]
            of_log = ACTION_LOG if row["kind"] == "actions" else COMMIT_LOG
            parts[of_log] = max(parts[of_log], row["max(part)"])
        scans = self.ends.get("scans", {})
        fresh = {one: at for one, at in scans.items() if at != before.get("scans", {}).get(one)}
        self.tables.note_progress(self._job, {**self.ends, "parts": parts})
        return Ingested(
            rows=rows,
            outbox=scanned_rows(self.tables, fresh),
            next_offsets={log: self.ends[log] for log in _TABLE_OF if log in self.ends},
            quarantined=lost_sequences(self.tables, new[COMMIT_LOG]) if "lost" in rows else {},
        )


def is_new(log: str, before: Mapping[str, Any]) -> str:
    """The SQL condition that a row of this log's table is new."""
    first, part = before.get(log, 0), before.get("parts", {}).get(log, 0)
    return f"part >= {part} AND {_PLACE_OF[_TABLE_OF[log]]} >= {first}"


def lost_sequences(tables: Tables, condition: str = "TRUE") -> Runs:
    """Subject → runs that the broker has in quarantine; the first ones if there are very many."""
    rows = (
        tables.read(LOG)
        .where(f"kind = 'lost' AND {condition}")
        .select("subject", "sequence", "count")
        .distinct()
        .orderBy("subject", "sequence")
        .limit(_LOST_MAX)
        .collect()
    )
    found: dict[str, list[tuple[int, int]]] = {}
    for row in rows:
        first, after = int(row["sequence"]), int(row["sequence"]) + int(row["count"])
        runs = found.setdefault(row["subject"], [])
        if runs and runs[-1][1] == first:
            runs[-1] = (runs[-1][0], after)
        else:
            runs.append((first, after))
    return found


def scanned_rows(tables: Tables, scans: Mapping[str, int]) -> dict[str, int]:
    """Database → number of rows of its scan at that time."""
    if not scans:
        return {}
    is_new = " OR ".join(
        f"(database = '{name}' AND unix_millis(scanned_at) = {at})" for name, at in scans.items()
    )
    day = min(scans.values()) // 86_400_000
    rows = tables.read(OUTBOX).where(f"day >= DATE_FROM_UNIX_DATE({day}) AND ({is_new})")
    counts = {
        row["database"]: int(row["count"]) for row in rows.groupBy("database").count().collect()
    }
    return {name: counts.get(name, 0) for name in scans}


def place_options(place: Place) -> dict[str, str]:
    """A place as options of the source `qmq`."""
    found = {"path": place.path or "", "broker_url": place.broker_url or ""}
    found |= {name: getattr(place, name) for name in BROKER_OPTIONS}
    return {name: value for name, value in found.items() if value} | (
        {"wait_s": str(round(place.wait_s))} if place.broker_url else {}
    )


def section_values(section: Any) -> dict[str, Any]:
    """A database's configuration as JSON values."""
    import msgspec

    values: dict[str, Any] = msgspec.to_builtins(section)
    return values
