"""`qmq pipeline audit`: compares committed, stored, delivered and settled, and so proves that nothing was lost (P4).

It judges messages committed before `as_of`: the time of the last ingest, less the grace period. Kinds of finding:

- *lost*: a message was sent, or its row is gone, and it is not in the log; or its long retry has
  lost its copy, or the copy was released and not delivered to the group;
- *ghost*: a message is in the log, and its producer's database never had a row for it;
- *duplicate*: one id is in the log more than once;
- *late*: a message was stored long after its commit or due time, or has waited in the outbox that long;
- *altered*: a message was stored with a checksum that differs from its row's or from that of its bytes, or twice with
  different checksums;
- *skipped*: a group's cursor is beyond a message that is for it, and the group never got it.

Each finding is a row of a query in `audit_sql.py`: all rows of a message in bronze are joined by
its id. The audit never guesses: `coverage` of the run names what it cannot judge.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from qmq_client.clock import SYSTEM_CLOCK
from qmq_pipeline.jobs import audit_sql
from qmq_pipeline.jobs.batches import tables_of
from qmq_pipeline.jobs.deliveries import groups
from qmq_pipeline.jobs.ingest import lost_sequences
from qmq_pipeline.jobs.lifecycle import JOB as LIFECYCLE_JOB
from qmq_pipeline.jobs.lifecycle import bronze_progress
from qmq_pipeline.jobs.progress import OnProgress, Progress, no_progress
from qmq_pipeline.places.config import AuditOptions, PipelineConfig
from qmq_pipeline.places.log import ACTION_LOG, COMMIT_LOG
from qmq_pipeline.spark.frames import arrow_frame
from qmq_pipeline.tables.schemas import (
    ACTIONS,
    AUDIT_FINDINGS,
    AUDIT_RUN,
    DELIVERIES,
    LOG,
    OUTBOX,
)
from qmq_pipeline.tables.sequences import count_in, named
from qmq_pipeline.tables.store import Tables

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


#: Tolerated difference between the clocks of a database and the broker.
CLOCKS_MS: Final = 3_600_000
#: If the action log is not folded to its end; contains no "; ", which separates reasons.
_NOT_FOLDED: Final = (
    "`lifecycle` has not folded all actions, or the log does not have their messages yet: deliveries are counted "
    "up to there, and long retries and skipped messages are not judged"
)
#: For a folder that only `archive` has written to, which records no time; no "; " here either.
_NOT_READ: Final = "the log was archived and not ingested, so nothing is judged: the end of the known log is unknown"
#: For tables without data of a log; no "; " here either.
_NO_LOG: Final = (
    "no log was ingested, so nothing is judged: name it with --path or --broker, or configure the "
    "broker's address"
)
#: For messages that the broker has in quarantine; no "; " here either.
_QUARANTINED: Final = "of the log were damaged, and the broker has them in quarantine: messages that an outbox knows count as lost, others are not judged"
#: For a database without `keep_sent_s`; no "; " here either.
_ROWS_GO: Final = (
    "does not keep accepted rows: `committed` counts only rows that a scan has seen. Messages "
    "whose rows existed only between two scans are judged by the log alone (stored once, unaltered, in time if "
    "delayed, and delivered), but not for losses and ghosts. Set keep_sent_s of the database longer "
    "than the time between two scans"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The range that can be judged, and the reasons for gaps."""

    #: Commits between these times are judged; ms since 1970.
    first_ms: int
    next_ms: int
    #: Times of the log that retention deleted before they were ingested.
    gaps: tuple[tuple[int, int], ...]
    #: Whether the log was ever ingested: otherwise nothing can be judged, and the verdict is not "clean".
    is_log_known: bool
    #: Whether the action log was folded to its end, so that the outcomes of all groups are known.
    is_folded: bool
    #: Databases that keep accepted rows, so that a message without a row is a ghost.
    kept: tuple[str, ...]
    coverage: tuple[str, ...]
    #: Number of sequences that the broker has in quarantine.
    quarantined: int = 0


def judged_window(tables: Tables, config: PipelineConfig) -> Window:
    """The window in which both sides are known."""
    options, known = config.audit, bronze_progress(tables)
    grace_ms = round(options.grace_s * 1000)
    scans: dict[str, int] = known.get("scans", {})
    quarantined = lost_sequences(tables)
    read_at_ms = int(known.get("read_at_ms", 0))
    has_log = COMMIT_LOG in known
    begun = _late_beginning(tables)
    first_ms = 0 if begun is None else begun[1] + grace_ms
    next_ms = min([read_at_ms, *scans.values()]) - grace_ms
    until_ms = next_ms if options.until_ms is None else options.until_ms
    kept = [one.name for one in config.databases if one.keep_sent_s > 0]
    kept = list(scans) if options.are_rows_kept else kept
    lived = tables.progress("lifecycle")
    is_folded = known.get(ACTION_LOG, 0) <= lived.get("actions", 0)
    expired = _expired(tables, next_ms, grace_ms)
    return Window(
        first_ms=max(first_ms, options.since_ms or 0),
        next_ms=max(0, min(next_ms, until_ms)),
        gaps=tuple(one.times_ms for one in expired),
        is_log_known=read_at_ms > 0,
        is_folded=is_folded,
        kept=tuple(kept),
        quarantined=count_in(quarantined),
        coverage=(
            *([] if has_log else [_NO_LOG]),
            *([] if read_at_ms or not has_log else [_NOT_READ]),
            *([] if scans else ["no outbox was scanned: losses and ghosts are unknown"]),
            *([] if is_folded else [_NOT_FOLDED]),
            *([_begun_text(begun, first_ms)] if begun is not None else []),
            *(
                f"offsets {one.first} to {one.next} of the log expired before they were read"
                for one in expired
            ),
            *([f"{named(quarantined)} {_QUARANTINED}"] if quarantined else []),
            *(f"database {name} {_ROWS_GO}" for name in sorted(set(scans) - set(kept))),
        ),
    )


def _late_beginning(tables: Tables) -> tuple[int, int] | None:
    """Offset and time of the first row, if the log was not read from its beginning."""
    log = tables.read(LOG).where("kind <> 'expired'")
    part = log.selectExpr("MIN(part)").collect()[0][0]
    if part is None or int(part) == 0:
        return None
    found = log.where(f"part = {part}").selectExpr(
        "MIN(physical_offset) AS first", "unix_millis(MIN(stored_at)) AS at_ms"
    )
    row = found.collect()[0]
    return int(row["first"]), int(row["at_ms"])


@dataclass(frozen=True, slots=True)
class _Expired:
    first: int
    next: int
    times_ms: tuple[int, int]


#: Ranges that expired, with the times of their neighbours.
_EXPIRED: Final = """
SELECT e.first, e.next, unix_millis(MAX(m.stored_at) FILTER (WHERE m.physical_offset < e.next)) AS before,
       unix_millis(MIN(m.stored_at) FILTER (WHERE m.physical_offset >= e.next)) AS after
FROM (SELECT physical_offset AS first, physical_offset + count AS next FROM {log} WHERE kind = 'expired') e
LEFT JOIN (SELECT physical_offset, stored_at FROM {log} WHERE kind = 'message') m
GROUP BY e.first, e.next ORDER BY e.first
"""


def _expired(tables: Tables, next_ms: int, grace_ms: int) -> list[_Expired]:
    """Ranges that retention deleted unread, and the times around each: from its neighbours, or to the end."""
    log = tables.read(LOG)
    if not log.where("kind = 'expired'").limit(1).collect():
        return []
    return [
        _Expired(
            int(row["first"]),
            int(row["next"]),
            (
                0 if row["before"] is None else int(row["before"]) - grace_ms,
                next_ms if row["after"] is None else int(row["after"]) + grace_ms,
            ),
        )
        for row in tables.spark.sql(_EXPIRED, log=log).collect()
    ]


def _begun_text(begun: tuple[int, int], first_ms: int) -> str:
    return f"the log was first read from offset {begun[0]} on, at {_iso(first_ms)}"


def between(column: str, window: Window) -> str:
    """The SQL condition that a time is judged."""
    millis = f"unix_millis({column})"
    parts = [f"{millis} >= {window.first_ms}", f"{millis} < {window.next_ms}"]
    parts += [f"NOT ({millis} >= {first} AND {millis} < {after})" for first, after in window.gaps]
    return " AND ".join(parts)


def _iso(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat()


CLEAN, FINDINGS, NOT_JUDGED = "clean", "findings", "not judged"
KINDS: Final = ("lost", "ghost", "duplicate", "late", "altered", "skipped")
_COLUMNS: Final = AUDIT_FINDINGS.names[:-1]
#: The views leave out bodies and headers, which are not needed.
_STORED: Final = (
    "message_id",
    "producer",
    "counter",
    "subject",
    "sequence",
    "tags",
    "stored_at",
    "due_at",
    "record_crc",
    "found_crc",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditResult:
    """The result of one audit."""

    run: str
    as_of: datetime
    #: Whether there was a log to judge by.
    is_judged: bool
    committed: int
    stored: int
    #: Stored messages of producers that no outbox knows.
    foreign_messages: int
    expected: int
    delivered: int
    settled: int
    quarantined: int
    #: Kind → number of findings.
    findings: dict[str, int]
    coverage: tuple[str, ...]

    @property
    def is_clean(self) -> bool:
        """Whether it could judge and has no findings."""
        return self.verdict == CLEAN

    @property
    def verdict(self) -> str:
        """One of `clean`, `findings` and `not judged`."""
        if any(self.findings.values()):
            return FINDINGS
        return CLEAN if self.is_judged else NOT_JUDGED


def audit(
    spark: SparkSession, config: PipelineConfig, *, on_progress: OnProgress = no_progress
) -> AuditResult:
    """Judge all messages in bronze, write the run and its findings, and return the result."""
    tables = tables_of(spark, config)
    tables.require()
    window = judged_window(tables, config)
    run = datetime.fromtimestamp(SYSTEM_CLOCK.now_ms() / 1000, UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    kept = make_views(tables, window)
    try:
        found = findings(spark, config.audit, window)
        counts = write_findings(tables, run, found, config.audit.findings_max)
        on_progress(Progress(stage="audit", done=1, total=2, rows=sum(counts.values())))
        totals = spark.sql(audit_sql.TOTALS).collect()[0].asDict()
    finally:
        for frame in kept:
            frame.unpersist()
    result = AuditResult(
        run=run,
        as_of=datetime.fromtimestamp(window.next_ms / 1000, UTC),
        is_judged=window.is_log_known,
        findings=counts,
        quarantined=window.quarantined,
        coverage=window.coverage,
        **{name: int(value or 0) for name, value in totals.items()},
    )
    _write_run(tables, result, first_ms=window.first_ms, grace_s=config.audit.grace_s)
    on_progress(Progress(stage="audit", done=2, total=2, rows=result.committed + result.stored))
    return result


def make_views(tables: Tables, window: Window) -> list[DataFrame]:
    """Create the views that `audit_sql.py` reads; returns the cached data frames, to be freed at the end.

    Findings and totals both read them: each is computed once and cached in memory, or on the executors' disks.
    """
    from pyspark.sql import functions as fn

    spark = tables.spark
    outbox = outbox_now(tables).persist()
    outbox.createOrReplaceTempView("qmq_outbox_all")
    views = {
        "qmq_committed": f"SELECT * FROM qmq_outbox_all WHERE {between('created_at', window)}",
        "qmq_stored": f"SELECT * FROM qmq_stored_all WHERE {between('stored_at', window)}",
        "qmq_kept": audit_sql.KEPT,
    }
    log = tables.read(LOG)
    stored = log.where("kind = 'message'")
    if window.first_ms:  # messages stored before the first judged commit are irrelevant
        stored = stored.where(f"unix_millis(stored_at) >= {window.first_ms - CLOCKS_MS}")
    stored = stored.select(*_STORED).persist()
    stored.createOrReplaceTempView("qmq_stored_all")
    kinds = ("scheduled", "cancelled", "copy")
    others = log.where(fn.col("kind").isin(*kinds)).drop("body", "headers").persist()
    for kind in kinds:
        others.where(f"kind = '{kind}'").createOrReplaceTempView(f"qmq_{kind}_all")
    tables.view(ACTIONS)
    tables.view(DELIVERIES)
    groups(spark, tables.progress(LIFECYCLE_JOB).get("marks", {})).createOrReplaceTempView(
        "qmq_groups"
    )
    _names(spark, window.kept).createOrReplaceTempView("qmq_kept_databases")
    for name, query in views.items():
        spark.sql(query).createOrReplaceTempView(name)
    return [outbox, stored, others]


def outbox_now(tables: Tables) -> DataFrame:
    """Each message's newest row, with `is_gone`: it was open once and is no longer in the database."""
    import pyarrow as pa

    scans = bronze_progress(tables).get("scans", {})
    columns = {
        "database": pa.array(scans.keys(), pa.string()),
        "last_scan_ms": pa.array(scans.values(), pa.int64()),
    }
    last = arrow_frame(tables.spark, pa.table(columns))
    return tables.spark.sql(audit_sql.OUTBOX_NOW, outbox=tables.read(OUTBOX), scans=last)


def _names(spark: SparkSession, names: tuple[str, ...]) -> DataFrame:
    import pyarrow as pa

    return arrow_frame(spark, pa.table({"database": pa.array(names, pa.string())}))


def findings(spark: SparkSession, options: AuditOptions, window: Window) -> DataFrame:
    """Findings of all kinds, one row each. Requires: the views."""
    is_ghost = audit_sql.IS_MISSED if window.kept else "FALSE"
    values = {
        "late_us": round(options.late_s * 1_000_000),
        "next_us": window.next_ms * 1000,
        "is_ghost": "TRUE" if options.is_closed_world else is_ghost,
        "created_is_judged": between("created_at", window),
        "stored_is_judged": between("stored_at", window),
        "due_is_judged": between("d.due_at", window),
        "retry_is_judged": between("d.long_retry_at", window),
    }
    queries = [audit_sql.OF_MESSAGES, *(audit_sql.OF_GROUPS if window.is_folded else ())]
    columns = ", ".join(_COLUMNS)
    # As one text: Spark would analyse each union of data frames from the beginning.
    parts = [f"(SELECT {columns} FROM ({query.format(**values)}))" for query in queries]
    every = spark.sql(" UNION ALL ".join(parts))
    return every.dropDuplicates(["kind", "message_id", "subject", "consumer_group"])


def write_findings(tables: Tables, run: str, found: DataFrame, findings_max: int) -> dict[str, int]:
    """Write findings, up to the limit of each kind; returns the count of each kind."""
    from pyspark.sql import Window as Over
    from pyspark.sql import functions as fn

    # Counted from the cache: Spark drops an observation together with a plan that turns out to be empty.
    found = found.persist()
    try:
        counts = [fn.count_if(fn.col("kind") == kind).alias(kind) for kind in KINDS]
        (counted,) = found.agg(*counts).collect()
        order = Over.partitionBy("kind").orderBy("at", "message_id")
        numbered = found.withColumn("place", fn.row_number().over(order))
        some = numbered.where(f"place <= {findings_max}").withColumn("run", fn.lit(run))
        tables.overwrite(some.coalesce(1), AUDIT_FINDINGS)
    finally:
        found.unpersist()
    return {kind: int(counted[kind]) for kind in KINDS}


def _write_run(tables: Tables, result: AuditResult, *, first_ms: int, grace_s: float) -> None:
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
        "verdict": result.verdict,
        "coverage": "; ".join(result.coverage),
    }
    row = [tuple(values[name] for name in AUDIT_RUN.names)]
    tables.append(tables.spark.createDataFrame(row, AUDIT_RUN.ddl()).coalesce(1), AUDIT_RUN)
