"""`qmq pipeline run`: all jobs in order.

Each job records its progress, so after an interrupted run the next one continues with the first unfinished job.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qmq_client.clock import SYSTEM_CLOCK
from qmq_pipeline.jobs.audit import AuditResult, audit
from qmq_pipeline.jobs.ingest import Ingested, ingest
from qmq_pipeline.jobs.lifecycle import Lived, lifecycle
from qmq_pipeline.jobs.marts import Marts, marts, require_sketches
from qmq_pipeline.jobs.progress import OnProgress, no_progress
from qmq_pipeline.jobs.report import Reported, report
from qmq_pipeline.places.config import PipelineConfig

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The result of each job of one run."""

    ingested: Ingested
    lifecycle: Lived
    marts: Marts
    audit: AuditResult
    #: The report page; None if none was requested.
    report: Reported | None
    #: Job → its duration.
    seconds: dict[str, float]


class _Watch:
    """Measures how long each job takes."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._began_s = SYSTEM_CLOCK.monotonic_s()

    def lap(self, job: str) -> None:
        now_s = SYSTEM_CLOCK.monotonic_s()
        self.seconds[job] = round(now_s - self._began_s, 3)
        self._began_s = now_s


def run(
    spark: SparkSession,
    config: PipelineConfig,
    *,
    skip_expired: bool = False,
    is_full: bool = False,
    report_path: str | None = None,
    on_progress: OnProgress = no_progress,
) -> RunResult:
    """Ingest, make the tables, audit, and write the report to `report_path` if given.

    Raises the errors of its jobs; finished work stays. `is_full`: rebuild the derived tables
    completely. Without a place, `config` ingests only outboxes; without databases, only logs.
    """
    require_sketches(spark.version)  # checked before hours of work that could not be finished
    watch = _Watch()
    ingested = ingest(spark, config, skip_expired=skip_expired, on_progress=on_progress)
    watch.lap("ingest")
    lived = lifecycle(spark, config, is_full=is_full, on_progress=on_progress)
    watch.lap("lifecycle")
    made = marts(spark, config, is_full=is_full, on_progress=on_progress)
    watch.lap("marts")
    judged = audit(spark, config, on_progress=on_progress)
    watch.lap("audit")
    page = None
    if report_path is not None:
        page = report(spark, config, report_path, on_progress=on_progress)
        watch.lap("report")
    return RunResult(
        ingested=ingested,
        lifecycle=lived,
        marts=made,
        audit=judged,
        report=page,
        seconds=watch.seconds,
    )
