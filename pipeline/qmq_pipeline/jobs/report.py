"""`qmq pipeline report`: the gold tables and the newest audit as one page of HTML.

Minutes are rolled up to at most some hundred buckets by merging sketches; every list is bounded, and says
of how many it shows the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from qmq_client.clock import SYSTEM_CLOCK
from qmq_pipeline.errors import LakeError, OptionError
from qmq_pipeline.jobs.audit import KINDS
from qmq_pipeline.jobs.marts import MARTS
from qmq_pipeline.jobs.progress import OnProgress, Progress, nobody
from qmq_pipeline.places.config import PipelineConfig
from qmq_pipeline.report.buckets import Buckets, buckets_of, held, length_text
from qmq_pipeline.report.facts import Bar, Grid, ReportFacts, Series, TimeChart, Verdict
from qmq_pipeline.report.page import render
from qmq_pipeline.tables.lake import Lake
from qmq_pipeline.tables.schemas import AUDIT_FINDINGS, AUDIT_RUN, FLOW_MINUTE

if TYPE_CHECKING:
    from pyspark.sql import Row, SparkSession

#: Rows of each table on the page, and lines of a chart.
_ROWS_MAX: Final = 50
_LINES_MAX: Final = 8
_SHARES: Final = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
_STEPS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """What was written."""

    path: str
    bytes: int
    #: Findings of the newest audit; None when there was none.
    findings: int | None


def report(
    spark: SparkSession, config: PipelineConfig, path: str, *, on_progress: OnProgress = nobody
) -> Reported:
    """Write the page to `path`, whole or not at all. Raises `LakeError` where there are no marts."""
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
            allowed="a file that can be written",
            remedy="Name another file.",
        ) from error
    findings = None if facts.verdict is None else facts.verdict.findings
    return Reported(path=str(target.absolute()), bytes=len(page), findings=findings)


def collect(
    spark: SparkSession, config: PipelineConfig, *, on_progress: OnProgress = nobody
) -> ReportFacts:
    """Everything on the page, in a few small queries over gold and audit."""
    lake = Lake(config.tables)
    lake.require()
    if not lake.commits(FLOW_MINUTE):
        raise LakeError(
            path=config.tables,
            reason="there are no marts yet",
            remedy="Run `qmq pipeline marts` first, or `qmq pipeline run` for all in order",
        )
    for table in MARTS:
        lake.read(spark, table).createOrReplaceTempView(f"qmq_{table.name}")
    span = spark.sql("SELECT MIN(minute) AS first, MAX(minute) AS last FROM qmq_flow_minute").head()
    assert span is not None
    buckets = buckets_of(span["first"], span["last"])
    collector = _Collector(spark, buckets)
    on_progress(Progress(stage="report", done=1, total=_STEPS, rows=0))
    flow, subjects, totals = collector.flow()
    latency, stages = collector.latency()
    on_progress(Progress(stage="report", done=2, total=_STEPS, rows=0))
    lag, redeliveries, groups = collector.lag()
    bars, dead = collector.dead()
    lateness, delays = collector.lateness()
    on_progress(Progress(stage="report", done=3, total=_STEPS, rows=0))
    verdict, findings = _audited(spark, lake)
    on_progress(Progress(stage="report", done=_STEPS, total=_STEPS, rows=0))
    return ReportFacts(
        made_at=datetime.fromtimestamp(SYSTEM_CLOCK.now_ms() / 1000, UTC),
        tables=config.tables,
        first_at=_utc(span["first"]),
        last_at=_utc(span["last"]),
        bucket_s=buckets.length_s,
        totals={**totals, "dead letters": dead.total or 0, "groups": collector.groups()},
        verdict=verdict,
        flow=flow,
        latency=latency,
        lag=lag,
        redeliveries=redeliveries,
        lateness=lateness,
        dead_by_reason=bars,
        subjects=subjects,
        stages=stages,
        groups=groups,
        dead=dead,
        delays=delays,
        findings=findings,
    )


class _Collector:
    """The queries of one page. Requires: the views of `collect`."""

    def __init__(self, spark: SparkSession, buckets: Buckets) -> None:
        self._spark = spark
        self._buckets = buckets

    def flow(self) -> tuple[TimeChart, Grid, dict[str, int | str]]:
        """Messages over time, by subject, and altogether."""
        sums = "SUM(committed) AS committed, SUM(stored) AS stored, SUM(settled) AS settled"
        rows = self._rows(
            f"SELECT {self._buckets.sql('minute')} AS bucket, {sums} FROM qmq_flow_minute "
            "GROUP BY bucket"
        )
        names = ("committed", "stored", "settled")
        unit = "per " + length_text(self._buckets.length_s)
        nothing = 0.0 if rows else None
        chart = self._chart("Messages", unit, rows, names, nothing=nothing)
        more = f"{sums}, SUM(delivered) AS delivered, SUM(copies) AS copies, SUM(bytes) AS bytes"
        grid = self._grid(
            "Subjects",
            f"SELECT subject, {more} FROM qmq_flow_minute GROUP BY subject ORDER BY stored DESC, subject",
            {
                "subject": "subject",
                "committed": "committed",
                "stored": "stored",
                "delivered": "deliveries",
                "settled": "acked",
                "copies": "stored twice",
                "bytes": "bytes",
            },
        )
        one = self._rows(f"SELECT {more} FROM qmq_flow_minute")[0]
        totals: dict[str, int | str] = {
            "committed": int(one["committed"] or 0),
            "stored": int(one["stored"] or 0),
            "deliveries": int(one["delivered"] or 0),
            "acked": int(one["settled"] or 0),
        }
        return chart, grid, totals

    def latency(self) -> tuple[TimeChart, Grid]:
        """From commit to ack over time, and each stage by subject and group."""
        rows = self._rows(
            f"SELECT bucket, {_quantiles('sketch')} FROM ("
            f"SELECT {self._buckets.sql('minute')} AS bucket, kll_merge_agg_double(sketch) AS sketch "
            "FROM qmq_latency_minute WHERE stage = 'total' GROUP BY bucket)"
        )
        chart = self._chart("From commit to ack", "ms", rows, tuple(_SHARES), is_logarithmic=True)
        grid = self._grid(
            "Stages by subject and group",
            f"SELECT subject, consumer_group, stage, count, {_quantiles('sketch')}, max_ms FROM ("
            "SELECT subject, consumer_group, stage, SUM(count) AS count, MAX(max_ms) AS max_ms, "
            "kll_merge_agg_double(sketch) AS sketch FROM qmq_latency_minute "
            "GROUP BY subject, consumer_group, stage) ORDER BY count DESC, subject, "
            "consumer_group NULLS FIRST, stage",
            {
                "subject": "subject",
                "consumer_group": "group",
                "stage": "stage",
                "count": "messages",
                "p50": "p50 ms",
                "p95": "p95 ms",
                "p99": "p99 ms",
                "max_ms": "max ms",
            },
        )
        return chart, grid

    def groups(self) -> int:
        """How many groups there are; one that consumes two subjects is one."""
        return int(self._rows("SELECT COUNT(DISTINCT consumer_group) FROM qmq_group_lag")[0][0])

    def lag(self) -> tuple[TimeChart, TimeChart, Grid]:
        """What groups are behind, what they got again, and where they stand now."""
        grid = self._grid(
            "Groups",
            "SELECT subject, consumer_group, MAX_BY(lag, minute) AS lag, "
            "MAX_BY(lag_s, minute) AS lag_s, MAX(lag) AS most, SUM(redeliveries) AS again, "
            "MAX(minute) AS at FROM qmq_group_lag GROUP BY subject, consumer_group "
            "ORDER BY lag DESC, most DESC, subject, consumer_group",
            {
                "subject": "subject",
                "consumer_group": "group",
                "lag": "lag",
                "lag_s": "oldest, s",
                "most": "most at a time",
                "again": "redeliveries",
                "at": "last change",
            },
        )
        shown = [(row[0], row[1]) for row in grid.rows[:_LINES_MAX]]
        rows = self._rows(
            f"SELECT subject, consumer_group, {self._buckets.sql('minute')} AS bucket, "
            "MAX_BY(lag, minute) AS lag FROM qmq_group_lag GROUP BY subject, consumer_group, bucket"
        )
        series = [
            Series(
                name=f"{subject} · {group}",
                values=held(
                    self._buckets.spread(
                        [one for one in rows if (one[0], one[1]) == (subject, group)], "lag"
                    )
                ),
            )
            for subject, group in shown
        ]
        title = "Messages that wait for a group"
        lag = TimeChart(
            title=title, unit="messages", times=self._buckets.times, series=tuple(series)
        )
        again = self._rows(
            f"SELECT {self._buckets.sql('minute')} AS bucket, SUM(redeliveries) AS redeliveries "
            "FROM qmq_group_lag GROUP BY bucket HAVING SUM(redeliveries) > 0"
        )
        unit = "per " + length_text(self._buckets.length_s)
        nothing = 0.0 if again else None
        chart = self._chart("Redeliveries", unit, again, ("redeliveries",), nothing=nothing)
        return lag, chart, grid

    def dead(self) -> tuple[tuple[Bar, ...], Grid]:
        """Dead letters by reason, and the newest of them."""
        rows = self._rows(
            "SELECT COALESCE(reason, 'unknown') AS reason, COUNT(*) AS count FROM qmq_dead_letters "
            f"GROUP BY ALL ORDER BY count DESC LIMIT {_LINES_MAX}"
        )
        grid = self._grid(
            "Dead letters",
            "SELECT dead_at, subject, consumer_group, sequence, message_id, attempts, reason, error "
            "FROM qmq_dead_letters ORDER BY dead_at DESC, subject, sequence",
            {
                "dead_at": "at",
                "subject": "subject",
                "consumer_group": "group",
                "message_id": "message",
                "attempts": "attempts",
                "reason": "reason",
                "error": "last error",
            },
        )
        return tuple(Bar(name=row["reason"], value=row["count"]) for row in rows), grid

    def lateness(self) -> tuple[TimeChart, Grid]:
        """How long after their due time delayed messages could be pulled."""
        rows = self._rows(
            f"SELECT bucket, {_quantiles('sketch')} FROM ("
            f"SELECT {self._buckets.sql('minute')} AS bucket, kll_merge_agg_double(sketch) AS sketch "
            "FROM qmq_delay_lateness GROUP BY bucket)"
        )
        grid = self._grid(
            "Delayed messages",
            f"SELECT subject, count, early, {_quantiles('sketch')}, max_ms FROM ("
            "SELECT subject, SUM(count) AS count, SUM(early) AS early, MAX(max_ms) AS max_ms, "
            "kll_merge_agg_double(sketch) AS sketch FROM qmq_delay_lateness GROUP BY subject) "
            "ORDER BY count DESC, subject",
            {
                "subject": "subject",
                "count": "released",
                "early": "too early",
                "p50": "p50 ms",
                "p95": "p95 ms",
                "p99": "p99 ms",
                "max_ms": "max ms",
            },
        )
        return self._chart("Lateness", "ms", rows, tuple(_SHARES)), grid

    def _rows(self, query: str) -> list[Row]:
        return self._spark.sql(query).collect()

    def _grid(self, title: str, query: str, columns: dict[str, str]) -> Grid:
        frame = self._spark.sql(query)
        rows = frame.limit(_ROWS_MAX + 1).collect()
        total = frame.count() if len(rows) > _ROWS_MAX else len(rows)
        return _as_grid(title, rows[:_ROWS_MAX], columns, total)

    def _chart(
        self,
        title: str,
        unit: str,
        rows: Sequence[Row],
        names: Sequence[str],
        *,
        is_logarithmic: bool = False,
        nothing: float | None = None,
    ) -> TimeChart:
        return TimeChart(
            title=title,
            unit=unit,
            times=self._buckets.times,
            series=tuple(
                Series(name=name, values=self._buckets.spread(rows, name, nothing=nothing))
                for name in names
            ),
            is_logarithmic=is_logarithmic,
        )


def _audited(spark: SparkSession, lake: Lake) -> tuple[Verdict | None, dict[str, Grid]]:
    runs = lake.read(spark, AUDIT_RUN).orderBy("run", ascending=False).limit(1).collect()
    if not runs:
        return None, {}
    run = runs[0]
    verdict = Verdict(
        run=run["run"],
        as_of=_utc(run["as_of"]) or datetime.fromtimestamp(0, UTC),
        counts={kind: int(run[kind]) for kind in KINDS},
        judged={
            name: int(run[name])
            for name in ("committed", "stored", "expected", "delivered", "settled", "quarantined")
        },
        coverage=tuple(part for part in run["coverage"].split("; ") if part),
    )
    found: dict[str, Grid] = {}
    every = lake.read(spark, AUDIT_FINDINGS).where(f"run = '{run['run']}'")
    columns = {
        "at": "at",
        "subject": "subject",
        "message_id": "message",
        "database": "database",
        "sequence": "sequence",
        "evidence": "evidence",
    }
    for kind, count in verdict.counts.items():
        if count:
            some = every.where(f"kind = '{kind}'").orderBy("at", "message_id").limit(_ROWS_MAX)
            found[kind] = _as_grid("", some.collect(), columns, count)
    return verdict, found


def _as_grid(title: str, rows: Sequence[Row], columns: dict[str, str], total: int) -> Grid:
    return Grid(
        title=title,
        columns=tuple(columns.values()),
        rows=tuple(tuple(_value(row[name]) for name in columns) for row in rows),
        total=total,
    )


def _value(found: Any) -> object:
    return _utc(found) if isinstance(found, datetime) else found


def _utc(at: datetime | None) -> datetime | None:
    """Spark gives local times without a zone."""
    return None if at is None else at.astimezone(UTC)


def _quantiles(sketch: str) -> str:
    return ", ".join(
        f"kll_sketch_get_quantile_double({sketch}, {share}D) AS {name}"
        for name, share in _SHARES.items()
    )
