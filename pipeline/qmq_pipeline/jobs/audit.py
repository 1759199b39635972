"""`qmq pipeline audit`: compares committed, stored, delivered and settled, and so proves that nothing was lost (P4).

It judges what was committed before `as_of`: the last look at outboxes and log, less the grace. Kinds of finding:

- *lost*: a message was sent, or its row is gone, and it is not in the log; or a group set it aside, and the copy is
  missing, or came back and was not given to the group;
- *ghost*: a message is in the log, and its producer's database never had a row for it;
- *duplicate*: one id is in the log more than once;
- *late*: a message was stored long after its commit or due time, or has waited in the outbox that long;
- *altered*: a message was stored with a checksum that differs from its row's or from that of its bytes, or twice with
  different checksums;
- *skipped*: a group came past a message that is for it, and never got it.

Each finding is a row of a query in `audit_sql.py`, which Spark answers by joins over the bronze tables. The audit never
guesses: what it cannot judge, it names in `coverage` of the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from qmq_client.clock import SYSTEM_CLOCK
from qmq_pipeline.jobs import audit_sql
from qmq_pipeline.jobs.audit_window import CLOCKS_MS, Window, between, judged_window
from qmq_pipeline.jobs.batches import tables_of
from qmq_pipeline.jobs.deliveries import groups
from qmq_pipeline.jobs.lifecycle import JOB as LIFECYCLE_JOB
from qmq_pipeline.jobs.lifecycle import bronze_progress
from qmq_pipeline.jobs.progress import OnProgress, Progress, nobody
from qmq_pipeline.places.config import AuditOptions, PipelineConfig
from qmq_pipeline.spark.frames import arrow_frame
from qmq_pipeline.tables.schemas import (
    ACTIONS,
    AUDIT_FINDINGS,
    AUDIT_RUN,
    DELIVERIES,
    LOG,
    OUTBOX,
)
from qmq_pipeline.tables.store import Tables

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

CLEAN, FINDINGS, NOT_JUDGED = "clean", "findings", "not judged"
KINDS: Final = ("lost", "ghost", "duplicate", "late", "altered", "skipped")
_COLUMNS: Final = AUDIT_FINDINGS.names[:-1]
#: Views with bodies or headers would be read for nothing.
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
    """What one audit found."""

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
        """Whether it could judge, and found nothing."""
        return self.verdict == CLEAN

    @property
    def verdict(self) -> str:
        """One of `clean`, `findings` and `not judged`."""
        if any(self.findings.values()):
            return FINDINGS
        return CLEAN if self.is_judged else NOT_JUDGED


def audit(
    spark: SparkSession, config: PipelineConfig, *, on_progress: OnProgress = nobody
) -> AuditResult:
    """Judge everything in bronze, write the run and its findings, and return what was found."""
    tables = tables_of(spark, config)
    tables.require()
    window = judged_window(tables, config)
    run = datetime.fromtimestamp(SYSTEM_CLOCK.now_ms() / 1000, UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    kept = make_views(tables, window)
    found = findings(spark, config.audit, window).persist()
    try:
        counts = {row["kind"]: row["count"] for row in found.groupBy("kind").count().collect()}
        _write_findings(tables, run, found, counts, config.audit.findings_max)
        on_progress(Progress(stage="audit", done=1, total=2, rows=sum(counts.values())))
        totals = spark.sql(audit_sql.TOTALS).collect()[0].asDict()
    finally:
        for frame in (found, *kept):
            frame.unpersist()
    result = AuditResult(
        run=run,
        as_of=datetime.fromtimestamp(window.next_ms / 1000, UTC),
        is_judged=window.is_log_known,
        findings={kind: int(counts.get(kind, 0)) for kind in KINDS},
        quarantined=window.quarantined,
        coverage=window.coverage,
        **{name: int(value or 0) for name, value in totals.items()},
    )
    _write_run(tables, result, first_ms=window.first_ms, grace_s=config.audit.grace_s)
    on_progress(Progress(stage="audit", done=2, total=2, rows=result.committed + result.stored))
    return result


def make_views(tables: Tables, window: Window) -> list[DataFrame]:
    """Create the views that `audit_sql.py` names; returns what is kept for them, to be given back in the end.

    Most queries read both sides: each is made once and kept in memory, or on the executors' disks.
    """
    from pyspark.sql import functions as fn

    spark = tables.spark
    outbox = outbox_now(tables).persist()
    outbox.createOrReplaceTempView("qmq_outbox_all")
    views = {
        "qmq_committed": f"SELECT * FROM qmq_outbox_all WHERE {between('created_at', window)}",
        "qmq_stored": f"SELECT * FROM qmq_stored_all WHERE {between('stored_at', window)}",
        "qmq_scheduled": audit_sql.SCHEDULED,
        "qmq_kept": audit_sql.KEPT,
    }
    log = tables.read(LOG)
    stored = log.where("kind = 'message'")
    if window.first_ms:  # what was stored before anything judged was committed tells nothing of it
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
    kept = "TRUE" if options.is_closed_world else audit_sql.KEPT_PRODUCER
    values = {
        "late_us": round(options.late_s * 1_000_000),
        "next_us": window.next_ms * 1000,
        "producers": kept,
        "stored_is_judged": between("stored_at", window),
        "due_is_judged": between("d.due_at", window),
        "aside_is_judged": between("d.set_aside_at", window),
    }
    queries = list(audit_sql.QUERIES)
    if options.is_closed_world or window.kept:
        queries.append(audit_sql.GHOST)
    if window.is_folded:
        queries += audit_sql.OF_GROUPS
    columns = ", ".join(_COLUMNS)
    # As one text: Spark would analyse each union of data frames from the beginning.
    parts = [f"(SELECT {columns} FROM ({query.format(**values)}))" for query in queries]
    every = spark.sql(" UNION ALL ".join(parts))
    return every.dropDuplicates(["kind", "message_id", "subject", "consumer_group"])


def _write_findings(
    tables: Tables, run: str, found: DataFrame, counts: dict[str, int], findings_max: int
) -> None:
    """Write findings, of each kind up to the limit."""
    if not counts and tables.exists(AUDIT_FINDINGS):
        return
    from pyspark.sql import Window as Over
    from pyspark.sql import functions as fn

    if any(count > findings_max for count in counts.values()):
        order = Over.partitionBy("kind").orderBy("at", "message_id")
        numbered = found.withColumn("place", fn.row_number().over(order))
        found = numbered.where(f"place <= {findings_max}").drop("place")
    tables.overwrite(found.withColumn("run", fn.lit(run)).coalesce(1), AUDIT_FINDINGS)


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
