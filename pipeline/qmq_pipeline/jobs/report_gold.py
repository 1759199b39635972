"""The queries of the report over the gold tables.

Minutes are rolled up to at most some hundred buckets by merging sketches. A span of a few minutes is shown by the
second: the same queries read `lifecycle` then. Every list is bounded and says how many rows there are in all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from qmq_pipeline.jobs.marts import MARTS
from qmq_pipeline.jobs.marts_sql import BY_DAY, BY_PART, SUMMED, by_second
from qmq_pipeline.report.buckets import Buckets, buckets_of, held, length_text
from qmq_pipeline.report.facts import Bar, GoldFacts, Grid, Series, TimeChart, known
from qmq_pipeline.tables.schemas import GROUP_LAG, GROUP_SPANS, LIFECYCLE
from qmq_pipeline.tables.store import Tables

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

#: Rows of each table on the page, and lines of a chart.
ROWS_MAX: Final = 50
_LINES_MAX: Final = 8
#: A span shorter than this is shown by the second.
_SHORT: Final = timedelta(minutes=10)
_SHARES: Final = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


def gold_facts(tables: Tables) -> GoldFacts:
    """The facts of the page except the audit. Requires: the tables exist."""
    spark = tables.spark
    for table in MARTS:
        tables.view(table)
    first, last = _span(spark)
    if first is None or last is None or last - first >= _SHORT:
        return _collected(spark, first, last, least_s=60)
    kept = _view_by_second(tables)
    try:
        return _collected(spark, *_span(spark), least_s=1)
    finally:
        for frame in kept:
            frame.unpersist()


def _collected(
    spark: SparkSession, first: datetime | None, last: datetime | None, *, least_s: int
) -> GoldFacts:
    buckets = buckets_of(first, last, least_s=least_s)
    collector = _Collector(spark, buckets)
    flow, subjects, totals = collector.flow()
    latency, stages = collector.latency()
    lag, redeliveries, groups, group_count = collector.lag()
    bars, dead = collector.dead()
    lateness, delays = collector.lateness()
    return GoldFacts(
        first_at=utc(first),
        last_at=utc(last),
        bucket_s=buckets.length_s,
        totals={**totals, "dead letters": dead.total or 0, "groups": group_count},
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
    )


def _span(spark: SparkSession) -> tuple[datetime | None, datetime | None]:
    row = spark.sql("SELECT MIN(minute), MAX(minute) FROM qmq_flow_minute").collect()[0]
    return row[0], row[1]


def _view_by_second(tables: Tables) -> list[DataFrame]:
    """Replace the views of the gold tables by the minute with views by the second; returns the cached data frames."""
    spark, lifecycle = tables.spark, tables.read(LIFECYCLE)
    frames = {
        table: spark.sql(by_second(query), lifecycle=lifecycle) for table, query in BY_DAY.items()
    }
    spans = spark.sql(by_second(BY_PART[GROUP_SPANS]), lifecycle=lifecycle)
    frames[GROUP_LAG] = spark.sql(by_second(SUMMED[GROUP_LAG]), group_spans=spans)
    for table, frame in frames.items():
        frame.persist().createOrReplaceTempView(f"qmq_{table.name}")
    return list(frames.values())


class _Collector:
    """The queries of one page. Requires: the views of `gold_facts`."""

    def __init__(self, spark: SparkSession, buckets: Buckets) -> None:
        self._spark = spark
        self._buckets = buckets

    def flow(self) -> tuple[TimeChart, Grid, dict[str, int | str]]:
        """Messages over time, by subject and in total."""
        sums = (
            "SUM(committed) AS committed, SUM(stored) AS stored, SUM(settled) AS acked, "
            "SUM(delivered) AS delivered"
        )
        rows = self._rows(
            f"SELECT {self._buckets.sql('minute')} AS bucket, {sums} FROM qmq_flow_minute "
            "GROUP BY bucket"
        )
        names = ("committed", "stored", "acked")
        unit = "per " + length_text(self._buckets.length_s)
        nothing = 0.0 if rows else None
        chart = self._chart("Messages", unit, rows, names, nothing=nothing)
        committed, stored, _ = (one.values for one in chart.series)
        is_out = tuple(bool(a) and not b for a, b in zip(committed, stored, strict=True))
        chart = replace(chart, outages=is_out)
        more = f"{sums}, SUM(copies) AS copies, SUM(bytes) AS bytes"
        grid = self._grid(
            "Subjects",
            f"SELECT subject, {more} FROM qmq_flow_minute GROUP BY subject ORDER BY stored DESC, subject",
            {
                "subject": "subject",
                "committed": "committed",
                "stored": "stored",
                "delivered": "deliveries",
                "acked": "acked",
                "copies": "stored twice",
                "bytes": "bytes",
            },
        )
        named = {"deliveries": "delivered"}
        totals: dict[str, int | str] = {
            name: sum(row[named.get(name, name)] or 0 for row in rows)
            for name in ("committed", "stored", "deliveries", "acked")
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
        stages = ("store", "wait", "work", "total")
        folded = ", ".join(
            f"MAX(IF(stage = '{stage}', {name}, NULL)) AS {stage}_{name}"
            for stage in stages
            for name in ("p50", "p99")
        )
        grid = self._grid(
            "Stages by subject and group",
            f"SELECT subject, consumer_group, MAX(count) AS count, {folded} FROM ("
            f"SELECT subject, consumer_group, stage, count, {_quantiles('sketch')} FROM ("
            "SELECT subject, consumer_group, stage, SUM(count) AS count, "
            "kll_merge_agg_double(sketch) AS sketch FROM qmq_latency_minute "
            "GROUP BY subject, consumer_group, stage)) GROUP BY subject, consumer_group "
            "ORDER BY count DESC, subject, consumer_group NULLS FIRST",
            {
                "subject": "subject",
                "consumer_group": "group",
                "count": "messages",
                **{
                    f"{stage}_{name}": f"{stage} {name}, ms"
                    for stage in stages
                    for name in ("p50", "p99")
                },
            },
        )
        return chart, grid

    def lag(self) -> tuple[TimeChart, TimeChart, Grid, int]:
        """The lag of groups, their redeliveries, their current state, and their number.

        A group on two subjects counts once.
        """
        grid = self._grid(
            "Groups",
            "SELECT subject, consumer_group, MAX_BY(lag, minute) AS lag, "
            "MAX_BY(lag_s, minute) AS lag_s, MAX(lag) AS most, SUM(redeliveries) AS again, "
            "MAX(minute) AS at FROM qmq_group_lag GROUP BY subject, consumer_group "
            "ORDER BY most DESC, lag DESC, subject, consumer_group",
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
        rows = self._rows(
            f"SELECT CONCAT(subject, ' · ', consumer_group) AS name, {self._buckets.sql('minute')} AS bucket, "
            "MAX(lag) AS lag, SUM(redeliveries) AS redeliveries, MAX(consumer_group) AS consumer_group "
            "FROM qmq_group_lag GROUP BY name, bucket"
        )
        of_name: dict[str, list[Row]] = {}
        for row in rows:
            of_name.setdefault(row["name"], []).append(row)
        lines = {name: held(self._buckets.spread(some, "lag")) for name, some in of_name.items()}
        series = largest(lines, _LINES_MAX)
        title = "Messages that wait for a group"
        lag = TimeChart(title=title, unit="messages", times=self._buckets.times, series=series)
        sums: dict[int, int] = {}
        for row in rows:
            sums[row["bucket"]] = sums.get(row["bucket"], 0) + row["redeliveries"]
        again = [{"bucket": at, "redeliveries": sum_} for at, sum_ in sums.items() if sum_]
        unit = "per " + length_text(self._buckets.length_s)
        nothing = 0.0 if again else None
        chart = self._chart("Redeliveries", unit, again, ("redeliveries",), nothing=nothing)
        return lag, chart, grid, len({row["consumer_group"] for row in rows})

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
        """The time from the due time of delayed messages until they could be pulled."""
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
        rows = frame.limit(ROWS_MAX + 1).collect()
        total = frame.count() if len(rows) > ROWS_MAX else len(rows)
        return as_grid(title, rows[:ROWS_MAX], columns, total)

    def _chart(
        self,
        title: str,
        unit: str,
        rows: Sequence[Row | Mapping[str, Any]],
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


def largest(lines: Mapping[str, tuple[float | None, ...]], count: int) -> tuple[Series, ...]:
    """The lines with the highest values, and the sum of all others as one line."""
    order = sorted(lines, key=lambda name: (-max(known(lines[name]), default=0.0), name))
    shown = order if len(order) <= count else order[: count - 1]
    series = [Series(name=name, values=lines[name]) for name in shown]
    others = [lines[name] for name in order[len(shown) :]]
    if others:
        sums = tuple(
            sum(known(values)) if known(values) else None for values in zip(*others, strict=True)
        )
        series.append(Series(name=f"{len(others)} others", values=sums))
    return tuple(series)


def as_grid(
    title: str, rows: Sequence[Row | Mapping[str, Any]], columns: dict[str, str], total: int
) -> Grid:
    """Rows as a table; `columns` maps their names to its headings."""
    return Grid(
        title=title,
        columns=tuple(columns.values()),
        rows=tuple(tuple(_value(row[name]) for name in columns) for row in rows),
        total=total,
    )


def _value(found: Any) -> object:
    return utc(found) if isinstance(found, datetime) else found


def utc(at: datetime | None) -> datetime | None:
    """Convert Spark's local times without a zone to UTC."""
    return None if at is None else at.astimezone(UTC)


def _quantiles(sketch: str) -> str:
    return ", ".join(
        f"kll_sketch_get_quantile_double({sketch}, {share}D) AS {name}"
        for name, share in _SHARES.items()
    )
