"""`qmq pipeline marts`: the gold tables, small tables by subject, group and minute, from silver.

The parts of `lifecycle` that were written since the last run give the days that changed. Those days
are counted again from the parts with messages of them; all other days stay. The lag of a group
continues over all days, so it is summed up from counts by the minute of each part. Latencies are
stored as KLL sketches, so minutes can be rolled up to hours or days with correct quantiles.

A killed run records no progress, and the next one writes the same tables again.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from qmq_pipeline.errors import OptionError, TablesError
from qmq_pipeline.jobs.batches import tables_of
from qmq_pipeline.jobs.lifecycle import JOB as LIFECYCLE_JOB
from qmq_pipeline.jobs.marts_sql import BY_DAY, BY_PART, DAYS, SUMMED, of_days
from qmq_pipeline.jobs.progress import OnProgress, Progress, no_progress
from qmq_pipeline.places.config import PipelineConfig
from qmq_pipeline.tables.schemas import GROUP_SPANS, LIFECYCLE, PART_DAYS, PRODUCER_PARTS
from qmq_pipeline.tables.store import Tables
from qmq_pipeline.tables.table import Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

JOB: Final = "marts"
#: The first version of Spark that can create and merge KLL sketches in a query.
_SKETCHES_IN: Final = (4, 1, 2)
_MADE: Final = (*BY_PART, *SUMMED, *BY_DAY, PART_DAYS)
MARTS: Final = tuple(table for table in _MADE if table.layer == "gold")


@dataclass(frozen=True, slots=True, kw_only=True)
class Marts:
    """The result of one run."""

    #: Table → rows that were written.
    rows: dict[str, int]
    #: Days that were counted again; None for all.
    days_made: int | None
    #: Whether nothing was written because there was no change since the last run.
    is_unchanged: bool


def marts(
    spark: SparkSession,
    config: PipelineConfig,
    *,
    is_full: bool = False,
    on_progress: OnProgress = no_progress,
) -> Marts:
    """Bring the gold tables up to date with silver; `is_full` rebuilds all of them.

    Raises `TablesError` if there is no silver, and `OptionError` if Spark is too old.
    """
    require_sketches(spark.version)
    tables = tables_of(spark, config)
    tables.require()
    lived = tables.progress(LIFECYCLE_JOB)
    if not lived:
        raise TablesError(
            path=config.tables,
            reason="the table lifecycle does not exist yet",
            remedy="Run `qmq pipeline lifecycle` first, or `qmq pipeline run` for all in order",
        )
    versions = [table.version for table in _MADE]
    seen = {} if is_full else tables.progress(JOB)
    # A missing table was removed so that it is rebuilt.
    if seen.get("versions") != versions or not all(tables.exists(table) for table in _MADE):
        seen = {}
    if seen.get("lifecycle") == lived["run"]:
        return Marts(rows={}, days_made=0, is_unchanged=True)
    with tables.writing("gold"):
        run = _Run(tables, lived["changed"] if seen else None, on_progress)
        made = run.go()
        tables.note_progress(JOB, {"lifecycle": lived["run"], "versions": versions})
    return made


def require_sketches(version: str) -> None:
    """Raise `OptionError` if this version of Spark lacks the functions for quantiles."""
    if tuple(map(int, re.findall(r"\d+", version)[:3])) < _SKETCHES_IN:
        raise OptionError(
            option="pyspark",
            value=version,
            allowed="4.1.2 and newer, for marts, report and run",
            remedy="Install a newer one.",
        )


class _Run:
    """One run; `parts` are those of `lifecycle` that were written since the last run, None for all."""

    def __init__(
        self, tables: Tables, parts: Collection[int] | None, on_progress: OnProgress
    ) -> None:
        self._tables = tables
        self._parts = parts
        self._on_progress = on_progress
        self._rows: dict[str, int] = {}

    def go(self) -> Marts:
        tables, parts = self._tables, self._parts
        fresh = self._lifecycle(parts)
        for table, query in BY_PART.items():
            self._write(table, query, parts, lifecycle=fresh)
        for table, query in SUMMED.items():
            spans, producers = tables.read(GROUP_SPANS), tables.read(PRODUCER_PARTS)
            self._write(table, query, None, group_spans=spans, producer_parts=producers)
        part_days = tables.spark.sql(_part_days(), lifecycle=fresh)
        days: list[str] | None = None
        if parts is not None:
            days = self._days(part_days, parts)
        for table, query in BY_DAY.items():
            rows = self._lifecycle(None if days is None else self._parts_of(part_days, days))
            self._write(table, of_days(query, days), days, lifecycle=rows)
        # Last: after a crash before this, the next run still finds the days that only the old rows had.
        tables.replace(part_days, PART_DAYS, parts)
        return Marts(
            rows=self._rows, days_made=None if days is None else len(days), is_unchanged=False
        )

    def _lifecycle(self, parts: Collection[int] | None) -> DataFrame:
        rows = self._tables.read(LIFECYCLE)
        if parts is None:
            return rows
        return rows.where(f"part IN ({', '.join(map(str, sorted(parts))) or 'NULL'})")

    def _days(self, now: DataFrame, parts: Collection[int]) -> list[str]:
        """The days on which these parts have events, or had."""
        old = self._tables.read(PART_DAYS)
        old = old.where(f"part IN ({', '.join(map(str, sorted(parts))) or 'NULL'})")
        rows = now.select("day").unionByName(old.select("day")).distinct().collect()
        return sorted(row["day"] for row in rows)

    def _parts_of(self, now: DataFrame, days: Collection[str]) -> list[int]:
        """The parts with events on these days."""
        texts = ", ".join(f"'{day}'" for day in days) or "NULL"
        every = self._tables.read(PART_DAYS).unionByName(now).where(f"day IN ({texts})")
        return [int(row["part"]) for row in every.select("part").distinct().collect()]

    def _write(
        self, table: Table, query: str, made: Collection[int | str] | None, **frames: Any
    ) -> None:
        rows = self._tables.replace(self._tables.spark.sql(query, **frames), table, made)
        if table.layer == "gold":
            self._rows[table.name] = rows
        self._on_progress(
            Progress(
                stage=f"marts {table.name}",
                done=len(self._rows),
                total=len(MARTS),
                rows=sum(self._rows.values()),
            )
        )


def _part_days() -> str:
    times = ", ".join(f"CAST(CAST({name} AS DATE) AS STRING)" for name in DAYS)
    return (
        f"SELECT DISTINCT day, part FROM (SELECT part, EXPLODE(ARRAY({times})) AS day FROM {{lifecycle}}) "
        "WHERE day IS NOT NULL"
    )
