"""`qmq pipeline report`: the gold tables and the newest audit as one HTML page."""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from qmq_client.clock import SYSTEM_CLOCK
from qmq_pipeline.errors import OptionError, TablesError
from qmq_pipeline.jobs.audit import KINDS
from qmq_pipeline.jobs.batches import tables_of
from qmq_pipeline.jobs.marts import JOB as MARTS_JOB
from qmq_pipeline.jobs.progress import OnProgress, Progress, no_progress
from qmq_pipeline.jobs.report_gold import ROWS_MAX, as_grid, gold_facts, utc
from qmq_pipeline.places.config import PipelineConfig
from qmq_pipeline.report.facts import Grid, ReportFacts, Verdict
from qmq_pipeline.report.page import render
from qmq_pipeline.tables.schemas import AUDIT_FINDINGS, AUDIT_RUN
from qmq_pipeline.tables.store import Tables

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_STEPS: Final = 2
_FINDING_COLUMNS: Final = {
    "at": "at",
    "subject": "subject",
    "message_id": "message",
    "database": "database",
    "sequence": "sequence",
    "evidence": "evidence",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """The result of a report."""

    path: str
    bytes: int
    #: Findings of the newest audit; None if there was none.
    findings: int | None


def report(
    spark: SparkSession, config: PipelineConfig, path: str, *, on_progress: OnProgress = no_progress
) -> Reported:
    """Write the page to `path`, completely or not at all. Raises `TablesError` if there are no marts."""
    facts = collect(spark, config, on_progress=on_progress)
    page = render(facts).encode()
    target = Path(path)
    draft = target.with_name(f".{target.name}.draft")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(page)
        draft.replace(target)
    except OSError as error:
        raise OptionError(
            option="--out",
            value=f"{path}: {error.strerror or error}",
            allowed="a writable file",
            remedy="Give another file.",
        ) from error
    findings = None if facts.verdict is None else facts.verdict.findings
    return Reported(path=str(target.absolute()), bytes=len(page), findings=findings)


def collect(
    spark: SparkSession, config: PipelineConfig, *, on_progress: OnProgress = no_progress
) -> ReportFacts:
    """Collect the facts of the page."""
    tables = tables_of(spark, config)
    tables.require()
    if not tables.progress(MARTS_JOB):
        raise TablesError(
            path=config.tables,
            reason="there are no marts yet",
            remedy="Run `qmq pipeline marts` first, or `qmq pipeline run` for all in order",
        )
    gold = gold_facts(tables)
    on_progress(Progress(stage="report", done=1, total=_STEPS, rows=0))
    verdict, findings = _audited(tables)
    on_progress(Progress(stage="report", done=_STEPS, total=_STEPS, rows=0))
    return ReportFacts(
        **{one.name: getattr(gold, one.name) for one in fields(gold)},
        made_at=datetime.fromtimestamp(SYSTEM_CLOCK.now_ms() / 1000, UTC),
        tables=tables.root,
        verdict=verdict,
        findings=findings,
    )


def _audited(tables: Tables) -> tuple[Verdict | None, dict[str, Grid]]:
    """The newest audit, and the first findings of each kind."""
    run = tables.read(AUDIT_RUN).orderBy("run", ascending=False).limit(1).collect()
    if not run:
        return None, {}
    (row,) = run
    as_of = utc(row["as_of"])
    assert as_of is not None
    verdict = Verdict(
        run=row["run"],
        as_of=as_of,
        counts={kind: int(row[kind] or 0) for kind in KINDS},
        judged={
            name: int(row[name])
            for name in ("committed", "stored", "expected", "delivered", "settled", "quarantined")
        },
        coverage=tuple(part for part in row["coverage"].split("; ") if part),
    )
    place = "ROW_NUMBER() OVER (PARTITION BY kind ORDER BY at, message_id) AS place"
    every = tables.read(AUDIT_FINDINGS).where(f"run = '{verdict.run}'").selectExpr("*", place)
    rows = every.where(f"place <= {ROWS_MAX}").orderBy("kind", "place").collect()
    found = {
        kind: as_grid("", [row for row in rows if row["kind"] == kind], _FINDING_COLUMNS, count)
        for kind, count in verdict.counts.items()
        if count
    }
    return verdict, found
