"""`qmq pipeline marts`: from silver, the small tables that people look at, by subject, group and minute.

The parts of `lifecycle` rebuilt since the last run tell which days changed. Those days are counted
again from the parts that have messages of them; all other days stay. The lag of a group runs on
over all days, so it is summed up from counts by the minute that each part of `lifecycle` adds: the
cost grows with minutes, not messages. Latencies are stored as KLL sketches, so minutes can be
rolled up to hours or days with correct quantiles.

A run that is killed leaves each table in its old or its new state, and the next run does the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from qmq_client.clock import SYSTEM_CLOCK
from qmq_pipeline.errors import LakeError
from qmq_pipeline.jobs.marts_sql import BY_DAY, BY_WINDOW, DAYS, SUMMED, of_days
from qmq_pipeline.jobs.progress import OnProgress, Progress, nobody
from qmq_pipeline.places.config import PipelineConfig
from qmq_pipeline.spark.session import session_of
from qmq_pipeline.tables.commits import RangeFacts
from qmq_pipeline.tables.lake import PART, Lake
from qmq_pipeline.tables.schemas import FLOW_MINUTE, GROUP_SPANS, LIFECYCLE, PRODUCER_PARTS
from qmq_pipeline.tables.table import Table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from qmq_pipeline.spark.session import Spark

#: In the order they are made; the notes of `flow_minute`, the last, say what all of them are based on.
_MADE: Final = (*BY_WINDOW, *SUMMED, *BY_DAY)
MARTS: Final = tuple(table for table in _MADE if table.layer == "gold")


@dataclass(frozen=True, slots=True, kw_only=True)
class Marts:
    """The result of one run."""

    #: Table → rows.
    rows: dict[str, int]
    #: Days that were counted again.
    days_made: int
    #: Whether nothing was made because nothing had changed since the last run.
    is_unchanged: bool


def marts(
    spark: Spark,
    config: PipelineConfig,
    *,
    is_full: bool = False,
    on_progress: OnProgress = nobody,
) -> Marts:
    """Bring the gold tables up to date with silver; `is_full` rebuilds all of them.

    `spark`: a session, or a function that gives one; it is not called if silver has not changed.
    Raises `LakeError` if there is no silver.
    """
    lake = Lake(config.tables)
    lake.require()
    lived = lake.newest(LIFECYCLE)
    if lived is None:
        raise LakeError(
            path=config.tables,
            reason="the table lifecycle is not there yet",
            remedy="Run `qmq pipeline lifecycle` first, or `qmq pipeline run` for all in order",
        )
    before = lake.newest(FLOW_MINUTE)
    # A table that is gone was removed to have it made anew.
    is_whole = all(lake.commit_names(table) for table in _MADE)
    seen = None if before is None or is_full or not is_whole else before.notes.get("parts")
    if seen is not None and before is not None and before.notes["lifecycle"] == lived.name:
        rows = {table.name: sum(one.rows for one in lake.ranges(table)) for table in MARTS}
        return Marts(rows=rows, days_made=0, is_unchanged=True)
    session = session_of(spark)
    with lake.writing():
        return _Run(session, lake, lived.name, seen, on_progress).go(lived.ranges)


class _Run:
    """One run; `seen` is part of `lifecycle` → what the last run knew of it; None to rebuild all."""

    def __init__(
        self,
        spark: SparkSession,
        lake: Lake,
        lived: str,
        seen: Mapping[str, Any] | None,
        on_progress: OnProgress,
    ) -> None:
        self._spark = spark
        self._lake = lake
        self._lived = lived
        self._seen = seen
        self._on_progress = on_progress
        self._name = f"{SYSTEM_CLOCK.now_ms():020d}"
        self._rows: dict[str, int] = {}

    def go(self, parts: Iterable[RangeFacts]) -> Marts:
        now = {one.source: one for one in parts}
        seen = self._seen or {}
        changed = {
            name
            for name in now.keys() | seen.keys()
            if name not in now or name not in seen or now[name].notes["run"] != seen[name]["run"]
        }
        fresh = [one for name, one in now.items() if name in changed]
        days = self._days(fresh)
        known = {
            name: {
                "run": one.notes["run"],
                "days": days.get(name, []) if name in changed else seen[name]["days"],
            }
            for name, one in now.items()
        }
        made = {day for name in changed & seen.keys() for day in seen[name]["days"]}
        made |= {day for name in days for day in days[name]}
        is_whole = self._seen is None
        self._view(fresh)
        for table, query in BY_WINDOW.items():
            self._write(table, query, None if is_whole else changed)
        for table in (GROUP_SPANS, PRODUCER_PARTS):
            self._lake.read(self._spark, table).createOrReplaceTempView(f"qmq_{table.name}")
        for table, query in SUMMED.items():
            self._write(table, query, None)
        self._view([one for name, one in now.items() if made.intersection(known[name]["days"])])
        for table, query in BY_DAY.items():
            chosen = None if is_whole else sorted(made)
            self._write(table, of_days(query, chosen), chosen, {"parts": known})
        rows = {table.name: self._rows[table.name] for table in MARTS}
        return Marts(rows=rows, days_made=len(made), is_unchanged=False)

    def _days(self, parts: Iterable[RangeFacts]) -> dict[str, list[str]]:
        """Part → the days on which something happened to its messages."""
        frame = self._lake.read_parts(self._spark, LIFECYCLE, parts)
        columns = [f"CAST(CAST({name} AS DATE) AS STRING) AS {name}" for name in DAYS]
        found: dict[str, set[str]] = {}
        for row in frame.selectExpr(PART, *columns).distinct().collect():
            found.setdefault(row[PART], set()).update(day for day in row[1:] if day is not None)
        return {name: sorted(some) for name, some in found.items()}

    def _view(self, parts: Iterable[RangeFacts]) -> None:
        rows = self._lake.read_parts(self._spark, LIFECYCLE, parts)
        rows.createOrReplaceTempView("qmq_lifecycle")

    def _write(
        self,
        table: Table,
        query: str,
        made: Iterable[str] | None,
        notes: Mapping[str, Any] | None = None,
    ) -> None:
        last = {**(notes or {}), "lifecycle": self._lived}
        done = self._lake.write_parts(
            self._spark.sql(query),
            table,
            self._name,
            made=None if made is None else set(made),
            notes=last if table is FLOW_MINUTE else None,
        )
        self._rows[table.name] = sum(one.rows for one in done.ranges)
        self._on_progress(
            Progress(
                stage=f"marts {table.name}",
                done=len(self._rows),
                total=len(_MADE),
                rows=sum(self._rows.values()),
            )
        )
