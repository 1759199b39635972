"""`qmq pipeline audit`: compares committed, stored and delivered, and so proves that nothing was lost (P4).

It judges what was committed before `as_of`: the last look at outboxes and log, less the grace.
Kinds of finding:

- *lost*: a message was sent, or its row is gone, and it is not in the log; or a group set it aside,
  and the copy is missing, or came back and was not given to the group;
- *ghost*: a message is in the log, and its producer's database never had a row for it;
- *duplicate*: one id is in the log more than once;
- *late*: a message was stored long after its commit or due time, or has waited in the outbox that
  long;
- *altered*: a message was stored with a checksum that differs from its row's or from that of its
  bytes, or twice with different checksums.

Every bronze file has a tally of its ids, checksums and times (`tables/tallies.py`), so both sides
are compared without reading rows. Where tallies leave a doubt, only the rows of those ids are
joined. An audit without a doubt does not need Spark. `cross_check` finds the same by one join of
all rows, as a check on the tallies.

The audit never guesses: what it cannot judge, it names in `coverage` of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from qmq_client.clock import SYSTEM_CLOCK
from qmq_pipeline.jobs import audit_sql
from qmq_pipeline.jobs.audit_rows import (
    ASIDE,
    SPOILT,
    DoubtfulRows,
    findings,
    has_altered,
    has_aside,
)
from qmq_pipeline.jobs.audit_tallies import Tallies, WordSet
from qmq_pipeline.jobs.audit_window import Window, judged_window
from qmq_pipeline.jobs.audit_words import REASONS, Kept
from qmq_pipeline.jobs.deliveries import folded
from qmq_pipeline.jobs.progress import OnProgress, Progress, nobody
from qmq_pipeline.places.config import AuditOptions, PipelineConfig
from qmq_pipeline.spark.session import session_of
from qmq_pipeline.tables.columns import Numbers
from qmq_pipeline.tables.commits import RangeFacts
from qmq_pipeline.tables.lake import Lake
from qmq_pipeline.tables.schemas import AUDIT_FINDINGS, AUDIT_RUN, DELIVERIES, MESSAGES

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from qmq_pipeline.spark.session import Spark

CLEAN, FINDINGS, NOT_JUDGED = "clean", "findings", "not judged"
KINDS: Final = ("lost", "ghost", "duplicate", "late", "altered")


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditResult:
    """What one audit found."""

    run: str
    as_of: datetime
    #: Whether there was a log to judge by.
    is_judged: bool
    committed: int
    stored: int
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
    spark: Spark,
    config: PipelineConfig,
    *,
    cross_check: bool = False,
    on_progress: OnProgress = nobody,
) -> AuditResult:
    """Judge everything in bronze, write the run and its findings, and return what was found.

    `spark`: a session, or a function that gives one. It is called only when rows must be read, so
    an audit without a doubt starts no Spark.
    """
    get_spark = partial(session_of, spark)
    lake = Lake(config.tables)
    lake.require()
    window = judged_window(lake, config)
    run = datetime.fromtimestamp(SYSTEM_CLOCK.now_ms() / 1000, UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    judged = _by_joins if cross_check else _by_tallies
    with lake.adding_runs(AUDIT_FINDINGS, AUDIT_RUN):
        counts, totals = judged(get_spark, lake, config.audit, window, run)
        on_progress(Progress(stage="audit", done=1, total=2, rows=sum(counts.values())))
        result = AuditResult(
            run=run,
            as_of=datetime.fromtimestamp(window.next_ms / 1000, UTC),
            is_judged=window.is_log_known,
            findings=counts,
            quarantined=window.quarantined,
            coverage=window.coverage,
            **totals,
        )
        _write_run(lake, result, first_ms=window.first_ms, grace_s=config.audit.grace_s)
    on_progress(Progress(stage="audit", done=2, total=2, rows=result.committed + result.stored))
    return result


def _by_tallies(
    get_spark: Callable[[], SparkSession],
    lake: Lake,
    options: AuditOptions,
    window: Window,
    run: str,
) -> tuple[dict[str, int], dict[str, int]]:
    """Write findings of each kind, count them, and compute totals. Reads rows only where tallies leave a doubt."""
    tallies = Tallies.read(get_spark, lake, window)
    words = tallies.words
    doubts = words.suspects(
        _kept(tallies, options, window),
        late_us=round(options.late_s * 1_000_000),
        can_ghosts_be_told=options.is_closed_world or bool(window.kept),
    )
    reasons = {reason for reason, is_suspect in doubts.items() if is_suspect.any()}
    is_suspect = np.logical_or.reduce(list(doubts.values()))
    suspects = WordSet(words.producer[is_suspect], words.word[is_suspect])
    reasons |= _other_reasons(lake, window)
    found, rows = None, None
    if reasons:
        spark = get_spark()
        rows = DoubtfulRows(spark, lake, window, (tallies, suspects))
        rows.make_views()
        found = findings(spark, options, window, reasons)
    counts = _write_findings(lake, run, found, options.findings_max)
    if rows is not None:
        rows.forget()
    return counts, _tallied_totals(lake, tallies)


def _by_joins(
    get_spark: Callable[[], SparkSession],
    lake: Lake,
    options: AuditOptions,
    window: Window,
    run: str,
) -> tuple[dict[str, int], dict[str, int]]:
    """The same by joins of all rows, without tallies."""
    spark = get_spark()
    rows = DoubtfulRows(spark, lake, window, None)
    rows.make_views()
    reasons = {*REASONS, SPOILT}
    if window.is_folded:
        reasons.add(ASIDE)
    if not options.is_closed_world and not window.kept:
        reasons.remove("ghost")
    found = findings(spark, options, window, reasons)
    counts = _write_findings(lake, run, found, options.findings_max)
    row = spark.sql(audit_sql.TOTALS).collect()[0]
    rows.forget()
    return counts, {name: int(value or 0) for name, value in row.asDict().items()}


def _kept(tallies: Tallies, options: AuditOptions, window: Window) -> Kept:
    producers, first_us = tallies.producers(window.kept)
    return Kept(is_closed_world=options.is_closed_world, producers=producers, first_us=first_us)


def _other_reasons(lake: Lake, window: Window) -> set[str]:
    """Reasons to read rows that tallies do not show."""
    reasons = {SPOILT} if has_altered(lake) else set()
    return reasons | ({ASIDE} if has_aside(lake, window) else set())


def _tallied_totals(lake: Lake, tallies: Tallies) -> dict[str, int]:
    """The totals of `audit_sql.TOTALS`; rows are counted only for words that the window cuts in two."""
    known, _ = tallies.producers()
    committed, is_cut = tallies.words.committed()
    committed += tallies.count_committed(lake, _words(tallies, is_cut))
    stored, foreign, is_cut = tallies.words.stored(known)
    more_stored, more_foreign = tallies.count_stored(lake, _words(tallies, is_cut), known)
    files = [file for one in lake.ranges(DELIVERIES) for file in one.files]
    fates = lake.count_values(DELIVERIES, files, ["first_delivered_at", "settled_at"])
    groups = folded(lake)
    return {
        "committed": committed,
        "stored": stored + more_stored,
        "foreign_messages": foreign + more_foreign,
        "expected": _expected(lake.ranges(MESSAGES), groups.groups if groups else {}),
        "delivered": fates["first_delivered_at"],
        "settled": fates["settled_at"],
    }


def _words(tallies: Tallies, is_wanted: Numbers) -> WordSet:
    return WordSet(tallies.words.producer[is_wanted], tallies.words.word[is_wanted])


def _expected(ranges: Iterable[RangeFacts], groups: Mapping[str, tuple[int, int]]) -> int:
    """Number of pairs of a message and a group that should get it, by the sequences named in commits."""
    runs: dict[str, list[Sequence[int]]] = {}
    for one in ranges:
        for subject, some in one.sequences.items():
            runs.setdefault(subject, []).extend(some)
    pairs = 0
    for name, (first, after) in groups.items():
        of_subject = runs.get(name.partition("\n")[0], ())
        pairs += sum(max(0, min(after, end) - max(first, begin)) for begin, end in of_subject)
    return pairs


def _write_findings(
    lake: Lake, run: str, found: DataFrame | None, findings_max: int
) -> dict[str, int]:
    """Write findings of each kind up to the limit; the number of each kind."""
    counts = dict.fromkeys(KINDS, 0)
    if found is None:
        lake.append(AUDIT_FINDINGS, run, ())
        return counts
    from pyspark.sql import functions as fn

    found = found.withColumn("run", fn.lit(run))
    files = lake.write_frame(found, AUDIT_FINDINGS, run)
    for file in files:
        for batch in lake.read_file(AUDIT_FINDINGS, file.path, ["kind"]):
            for one in batch["kind"].value_counts().to_pylist():
                counts[one["values"]] += one["counts"]
    beyond = [kind for kind, count in counts.items() if count > findings_max]
    # If a whole store is lost the work is done twice; otherwise once.
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
        "verdict": result.verdict,
        "coverage": "; ".join(result.coverage),
    }
    row = pa.RecordBatch.from_pylist([values], schema=AUDIT_RUN.arrow())
    lake.append(AUDIT_RUN, result.run, [lake.write(AUDIT_RUN, f"{result.run}.parquet", [row])])
