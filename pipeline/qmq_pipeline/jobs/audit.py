"""`qmq pipeline audit`: committed against stored against delivered; the proof that nothing was lost (P4).

Judged is what was committed before `as_of`: the last look at outboxes and log, less the grace. Kinds:

- *lost*: sent by its row, or the row is gone, and it is not in the log; or a group set it aside, and its copy is not
  there, or came back and the group did not get it;
- *ghost*: in the log, and no row of its producer's database ever was;
- *duplicate*: in the log more than once under one id;
- *late*: stored long after its commit or due time, or waiting in the outbox that long;
- *altered*: stored with another checksum than its row has, or than its bytes have, or twice with different ones.

Ids are a producer's instance and a dense counter, so who is missing is work on bitmaps: 32,768 ids are 4 KiB.
Checksums of so many are compared in one number, and times by the first commit and the last arrival. Rows are
joined one by one only where one of these is not as it should be. Ids made of dedupe keys are not
dense; those are always joined. `cross_check` finds the same by one join of everything, for the doubtful.

What cannot be judged is said, never guessed: see `coverage` of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from qmq_client.clock import SYSTEM_CLOCK
from qmq_pipeline.jobs import audit_sql
from qmq_pipeline.jobs.deliveries import actions_end, folded, groups
from qmq_pipeline.jobs.ingest_outbox import last_scans, outbox_now
from qmq_pipeline.jobs.progress import OnProgress, Progress, nobody
from qmq_pipeline.places.config import PipelineConfig
from qmq_pipeline.tables.commits import RangeFacts
from qmq_pipeline.tables.lake import Lake
from qmq_pipeline.tables.schemas import (
    ACTIONS,
    AUDIT_FINDINGS,
    AUDIT_RUN,
    CANCELLED,
    COPIES,
    DELIVERIES,
    MESSAGES,
    SCHEDULED,
)
from qmq_pipeline.work.ranges import ALTERED, ALTERED_COUNT

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

KINDS: Final = ("lost", "ghost", "duplicate", "late", "altered")
#: By which the clocks of a database and of the broker may differ.
_CLOCKS_MS: Final = 3_600_000
_FOR_EVER_MS: Final = 253_402_300_799_999
_FINDING_COLUMNS: Final = AUDIT_FINDINGS.names[1:]
#: What `ingest` notes of a record whose bytes do not have the checksum that they carry.
_SPOILT: Final = pa.schema(
    {
        "message_id": pa.string(),
        "subject": pa.string(),
        "sequence": pa.int64(),
        "stored_at": pa.timestamp("us", tz="UTC"),
        "record_crc": pa.int64(),
        "found_crc": pa.int64(),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What can be judged, and what cannot."""

    #: Judged is what was committed in here; ms since 1970.
    first_ms: int
    next_ms: int
    #: Times of the log that were not ingested before retention gave them up.
    gaps: tuple[tuple[int, int], ...]
    #: Whether the fates of messages at their groups are known up to the last action.
    is_folded: bool
    #: Databases whose accepted rows are kept, so that a message without one is a ghost.
    kept: tuple[str, ...]
    coverage: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditResult:
    """What one audit found."""

    run: str
    as_of: datetime
    committed: int
    stored: int
    foreign_messages: int
    expected: int
    delivered: int
    settled: int
    quarantined: int
    #: Kind → how many.
    findings: dict[str, int]
    coverage: tuple[str, ...]

    @property
    def is_clean(self) -> bool:
        """Nothing was found."""
        return not any(self.findings.values())


def audit(
    spark: SparkSession,
    config: PipelineConfig,
    *,
    cross_check: bool = False,
    on_progress: OnProgress = nobody,
) -> AuditResult:
    """Judge everything in bronze, write the run and its findings, and say what was found."""
    lake = Lake(config.tables)
    lake.require()
    window = judged_window(lake, config)
    outbox = outbox_now(spark, lake).cache()
    _views(spark, lake, window, outbox)
    run = datetime.fromtimestamp(SYSTEM_CLOCK.now_ms() / 1000, UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    found = findings(spark, config, window, cross_check=cross_check)
    counts = _write_findings(lake, run, found, config.audit.findings_max)
    on_progress(Progress(stage="audit", done=1, total=2, rows=sum(counts.values())))
    result = AuditResult(
        run=run,
        as_of=datetime.fromtimestamp(window.next_ms / 1000, UTC),
        findings=counts,
        quarantined=_quarantined(lake),
        coverage=window.coverage,
        **_totals(spark),
    )
    _write_run(lake, result, first_ms=window.first_ms, grace_s=config.audit.grace_s)
    outbox.unpersist()
    spark.catalog.uncacheTable("qmq_suspects")
    on_progress(Progress(stage="audit", done=2, total=2, rows=result.committed + result.stored))
    return result


def judged_window(lake: Lake, config: PipelineConfig) -> Window:
    """What of the tables both sides are known of."""
    options = config.audit
    grace_ms = round(options.grace_s * 1000)
    coverage: list[str] = []
    ranges = lake.ranges(MESSAGES)
    read_at_ms = int(lake.read_state(MESSAGES).get("read_at_ms", 0))
    scans = last_scans(lake)
    if not ranges:
        coverage.append("no log was ingested: nothing is stored")
    if not scans:
        coverage.append("no outbox was scanned: losses and ghosts cannot be told")
    known = folded(lake)
    is_folded = actions_end(lake) <= (known.actions if known else 0)
    if not is_folded:
        coverage.append(
            "actions came in since `lifecycle` was run: deliveries are counted up to there, and what groups "
            "set aside is not judged"
        )
    unnamed = sum(
        one.notes.get(ALTERED_COUNT, 0) - len(one.notes.get(ALTERED, ())) for one in ranges
    )
    if unnamed:
        coverage.append(f"{unnamed} more messages are altered than are named")
    next_ms = min([read_at_ms, *scans.values()]) - grace_ms
    first_ms = 0
    if ranges and ranges[0].first > 0:
        first_ms = ranges[0].first_at_ms + grace_ms
        coverage.append(
            f"the log was first read from offset {ranges[0].first} on, at {_iso(first_ms)}"
        )
    gaps = []
    for number, one in enumerate(ranges):
        if one.notes.get("is_expired"):
            before = ranges[number - 1].last_at_ms - grace_ms if number else 0
            after = (
                ranges[number + 1].first_at_ms + grace_ms if number + 1 < len(ranges) else next_ms
            )
            gaps.append((before, after))
            coverage.append(
                f"offsets {one.first} to {one.next} of the log expired before they were read"
            )
    kept = tuple(
        one.name for one in config.databases if one.keep_sent_s > 0 or options.are_rows_kept
    )
    kept = tuple(scans) if options.are_rows_kept else kept
    for name in sorted(set(scans) - set(kept)):
        coverage.append(
            f"database {name} does not keep rows that were accepted (keep_sent_s): what was sent "
            "between two scans is known from the log alone, and ghosts cannot be told"
        )
    return Window(
        first_ms=max(first_ms, options.since_ms or 0),
        next_ms=max(0, min(next_ms, options.until_ms or _FOR_EVER_MS)),
        gaps=tuple(gaps),
        is_folded=is_folded,
        kept=kept,
        coverage=tuple(coverage),
    )


def findings(
    spark: SparkSession, config: PipelineConfig, window: Window, *, cross_check: bool = False
) -> DataFrame:
    """All findings, one row each. Requires: the views of `audit`."""
    options = config.audit
    late_us, next_us = round(options.late_s * 1_000_000), window.next_ms * 1000
    bitmaps = audit_sql.SUSPECTS.format(late_us=late_us)
    suspects = audit_sql.ALL_SUSPECTS if cross_check else bitmaps
    # A few rows, asked for by most of the queries: Spark would else make bitmaps of everything for each.
    spark.sql(suspects).cache().createOrReplaceTempView("qmq_suspects")
    spark.sql(audit_sql.OUTBOX_SUSPECTS).createOrReplaceTempView("qmq_outbox_suspects")
    spark.sql(audit_sql.STORED_SUSPECTS).createOrReplaceTempView("qmq_stored_suspects")
    parts = [
        audit_sql.LOST,
        audit_sql.DUPLICATE,
        audit_sql.LATE.format(late_us=late_us),
        audit_sql.WAITING.format(late_us=late_us, next_us=next_us),
        audit_sql.OVERDUE.format(
            late_us=late_us, next_us=next_us, judged=_between("d.due_at", window)
        ),
        audit_sql.CANCELLED_AND_STORED,
        audit_sql.ALTERED,
        audit_sql.ALTERED_SCHEDULED,
        audit_sql.ALTERED_RELEASE,
        audit_sql.ALTERED_COPY,
        audit_sql.ALTERED_CONTENT.format(judged=_between("stored_at", window)),
    ]
    if window.is_folded:
        aside = audit_sql.ASIDE.format(judged=_between("d.set_aside_at", window))
        spark.sql(aside).createOrReplaceTempView("qmq_aside")
        parts.append(audit_sql.ASIDE_LOST.format(next_us=next_us))
        parts.append(audit_sql.ASIDE_OVERDUE.format(next_us=next_us, late_us=late_us))
    if options.is_closed_world:
        parts.append(audit_sql.GHOST.format(producers="TRUE"))
    elif window.kept:
        parts.append(audit_sql.GHOST.format(producers=audit_sql.KNOWN_PRODUCER))
    columns = ", ".join(_FINDING_COLUMNS)
    # One text: Spark would think through each union of frames from the beginning.
    text = " UNION ALL ".join(f"(SELECT {columns} FROM ({part}))" for part in parts)
    return spark.sql(text).dropDuplicates(["kind", "message_id", "subject", "consumer_group"])


def judged_ranges(ranges: Sequence[RangeFacts], window: Window) -> list[RangeFacts]:
    """What of the log is compared: not what was stored before anything that is judged was committed."""
    first_ms = window.first_ms - _CLOCKS_MS
    return [one for one in ranges if one.last_at_ms >= first_ms]


def _views(spark: SparkSession, lake: Lake, window: Window, outbox: DataFrame) -> None:
    judged = _between("created_at", window)
    outbox.where(judged).createOrReplaceTempView("qmq_committed")
    outbox.createOrReplaceTempView("qmq_outbox_all")
    columns = [
        "message_id",
        "producer",
        "counter",
        "subject",
        "sequence",
        "stored_at",
        "due_at",
        "record_crc",
    ]
    stored = lake.read(spark, MESSAGES, judged_ranges(lake.ranges(MESSAGES), window)).select(
        *columns
    )
    stored.createOrReplaceTempView("qmq_stored_all")
    stored.where(_between("stored_at", window)).createOrReplaceTempView("qmq_stored")
    scheduled = lake.read(spark, SCHEDULED)
    scheduled.createOrReplaceTempView("qmq_scheduled_all")
    spark.sql(audit_sql.SCHEDULED).createOrReplaceTempView("qmq_scheduled")
    lake.read(spark, CANCELLED).createOrReplaceTempView("qmq_cancelled")
    placed = lake.read(spark, MESSAGES).select("message_id", "subject", "sequence")
    placed.createOrReplaceTempView("qmq_placed")
    lake.read(spark, COPIES).createOrReplaceTempView("qmq_copies")
    lake.read(spark, ACTIONS).createOrReplaceTempView("qmq_actions")
    lake.read(spark, DELIVERIES).createOrReplaceTempView("qmq_deliveries")
    known = folded(lake)
    groups(spark, known.groups if known else {}).createOrReplaceTempView("qmq_groups")
    kept = pa.table({"database": pa.array(window.kept, pa.string())})
    spark.createDataFrame(kept).createOrReplaceTempView("qmq_kept")
    spark.createDataFrame(_spoilt(lake)).createOrReplaceTempView("qmq_spoilt")


def _spoilt(lake: Lake) -> pa.Table:
    """Records that `ingest` found to be other than their producers made them."""
    rows = [one for facts in lake.ranges(MESSAGES) for one in facts.notes.get(ALTERED, ())]
    return pa.Table.from_pylist(
        [{**row, "stored_at": row["stored_at_ms"] * 1000} for row in rows], schema=_SPOILT
    )


def _between(column: str, window: Window) -> str:
    """The condition that a time is judged."""
    millis = f"unix_millis({column})"
    parts = [f"{millis} >= {window.first_ms}", f"{millis} < {window.next_ms}"]
    parts += [f"NOT ({millis} >= {first} AND {millis} < {after})" for first, after in window.gaps]
    return " AND ".join(parts)


def _totals(spark: SparkSession) -> dict[str, int]:
    row = spark.sql(audit_sql.TOTALS).collect()[0]
    return {name: int(value or 0) for name, value in row.asDict().items()}


def _quarantined(lake: Lake) -> int:
    return sum(
        int(after) - int(first)
        for one in lake.ranges(MESSAGES)
        for runs in one.lost.values()
        for first, after in runs
    )


def _write_findings(lake: Lake, run: str, found: DataFrame, findings_max: int) -> dict[str, int]:
    """Write at most so many findings of each kind; how many there are of each."""
    from pyspark.sql import functions as fn

    found = found.withColumn("run", fn.lit(run))
    files = lake.write_frame(found, AUDIT_FINDINGS, run)
    counts = dict.fromkeys(KINDS, 0)
    for file in files:
        for batch in lake.read_file(AUDIT_FINDINGS, file.path, ["kind"]):
            for one in batch["kind"].value_counts().to_pylist():
                counts[one["values"]] += one["counts"]
    beyond = [kind for kind, count in counts.items() if count > findings_max]
    # Where a store is lost as a whole the work is done twice, and everywhere else once.
    for kind in beyond:
        some = found.where(fn.col("kind") == kind).limit(findings_max)
        found = found.where(fn.col("kind") != kind).unionByName(some)
    if beyond:
        files = lake.write_frame(found, AUDIT_FINDINGS, run)
    lake.append(AUDIT_FINDINGS, run, files)
    return counts


def _write_run(lake: Lake, result: AuditResult, *, first_ms: int, grace_s: float) -> None:
    values: dict[str, Any] = {
        "run": result.run,
        "as_of": result.as_of,
        "first_at": datetime.fromtimestamp(first_ms / 1000, UTC),
        "grace_s": grace_s,
        "committed": result.committed,
        "stored": result.stored,
        "foreign_messages": result.foreign_messages,
        "expected": result.expected,
        "delivered": result.delivered,
        "settled": result.settled,
        **result.findings,
        "quarantined": result.quarantined,
        "verdict": "clean" if result.is_clean else "findings",
        "coverage": "; ".join(result.coverage),
    }
    row = pa.RecordBatch.from_pylist([values], schema=AUDIT_RUN.arrow())
    lake.append(AUDIT_RUN, result.run, [lake.write(AUDIT_RUN, f"{result.run}.parquet", [row])])


def _iso(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat()
