"""`qmq pipeline run`: all jobs in order, for a scheduler or a person who wants everything.

Each job commits what it has done, so after an interrupted run the next one continues with the first
unfinished job. Outboxes are scanned before the log is read: what they show as sent is then in the
log.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qmq_client.clock import SYSTEM_CLOCK
from qmq_pipeline.jobs.audit import AuditResult, audit
from qmq_pipeline.jobs.expose import Exposed, expose
from qmq_pipeline.jobs.ingest import Ingested
from qmq_pipeline.jobs.ingest_both import ingest_both
from qmq_pipeline.jobs.lifecycle import Lived, lifecycle
from qmq_pipeline.jobs.marts import Marts, marts
from qmq_pipeline.jobs.progress import OnProgress, nobody
from qmq_pipeline.jobs.report import Reported, report
from qmq_pipeline.places.config import PipelineConfig
from qmq_pipeline.spark.session import session_of

if TYPE_CHECKING:
    from qmq_pipeline.sources.tasks import Workers
    from qmq_pipeline.spark.session import Spark


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The result of each job of one run."""

    #: Database → outbox rows read.
    outbox: dict[str, int]
    ingested: Ingested
    lifecycle: Lived
    marts: Marts
    audit: AuditResult
    #: The page; None if none was asked for.
    report: Reported | None
    #: What other programs find; None if the tables are not exposed.
    exposed: Exposed | None
    #: Job → how long it took.
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
    spark: Spark,
    config: PipelineConfig,
    *,
    workers: Workers | None = None,
    skip_expired: bool = False,
    is_full: bool = False,
    report_path: str | None = None,
    on_progress: OnProgress = nobody,
) -> RunResult:
    """Ingest, make the tables, audit, write the report to `report_path` if given, and expose the
    tables if `config` says so.

    Raises what its jobs raise; what was done stays. `is_full`: rebuild the derived tables as a
    whole.

    `spark`: a session, or a function that gives one; it is called only when a table must be made,
    so a run that finds nothing new starts no Spark. `workers`: who ingests; None for Spark's
    executors.

    Without a place, `config` brings in outboxes alone; without databases, logs alone.
    """
    watch = _Watch()
    hands = session_of(spark) if workers is None else workers
    outbox, ingested = ingest_both(
        hands, config, skip_expired=skip_expired, on_progress=on_progress
    )
    watch.lap("ingest")
    lived = lifecycle(spark, config, is_full=is_full, on_progress=on_progress)
    watch.lap("lifecycle")
    made = marts(spark, config, is_full=is_full, on_progress=on_progress)
    watch.lap("marts")
    judged = audit(spark, config, on_progress=on_progress)
    watch.lap("audit")
    page = exposed = None
    if report_path is not None:
        page = report(spark, config, report_path, on_progress=on_progress)
        watch.lap("report")
    if config.expose is not None:
        exposed = expose(config, config.expose, on_progress=on_progress)
        watch.lap("expose")
    return RunResult(
        outbox=outbox,
        ingested=ingested,
        lifecycle=lived,
        marts=made,
        audit=judged,
        report=page,
        exposed=exposed,
        seconds=watch.seconds,
    )
