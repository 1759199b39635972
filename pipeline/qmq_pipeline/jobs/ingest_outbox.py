"""The outbox tables into bronze: each run scans new and open rows, see `rows/outbox.py`.

A message may have one row for each scan; `outbox_now` gives the newest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa

from qmq_client.clock import SYSTEM_CLOCK
from qmq_client.settings.sections import DatabaseSection
from qmq_pipeline.jobs.merge_scans import merge_scans
from qmq_pipeline.jobs.progress import OnProgress, Progress, nobody
from qmq_pipeline.places.config import PipelineConfig
from qmq_pipeline.rows.outbox import (
    OPEN_IDS_MAX,
    ScanPlan,
    Witness,
    id_ranges,
    plan_scan,
    require_outbox,
)
from qmq_pipeline.sources.tasks import run_tasks
from qmq_pipeline.spark.frames import arrow_frame
from qmq_pipeline.tables.commits import SCANNED_AT, RangeFacts, range_facts
from qmq_pipeline.tables.lake import Lake
from qmq_pipeline.tables.schemas import OUTBOX

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from qmq_pipeline.sources.tasks import Workers

_WORK: Final = "qmq_pipeline.work.outbox.scan_piece"


def ingest_outbox(
    workers: Workers, config: PipelineConfig, *, on_progress: OnProgress = nobody
) -> dict[str, int]:
    """Scan every configured database; name → number of rows that are new, changed or open.

    `workers`: a session, or `LocalWorkers`.
    """
    lake = Lake(config.tables)
    rows: dict[str, int] = {}
    if not config.databases:
        return rows
    for section in config.databases:
        require_outbox(section)  # before a folder is made
    lake.prepare()
    with lake.writing():
        kept_ms = round(config.merged_kept_s * 1000)
        lake.sweep(OUTBOX, merged_before_ms=SYSTEM_CLOCK.now_ms() - kept_ms)
        for number, section in enumerate(config.databases, start=1):
            rows[section.name] = _scan(workers, config, lake, section)
            on_progress(
                Progress(
                    stage="ingest outbox",
                    done=number,
                    total=len(config.databases),
                    rows=sum(rows.values()),
                    added={OUTBOX.name: rows[section.name]},
                )
            )
    return rows


def _scan(workers: Workers, config: PipelineConfig, lake: Lake, section: DatabaseSection) -> int:
    before = _last(lake, section.name)
    mark = int(before.notes["next_mark"]) if before else 0
    plan = plan_scan(
        section,
        mark=mark,
        witness=_witness(before),
        known_open=before.notes["open_ids"] if before else (),
        safety_ms=round(config.outbox_safety_s * 1000),
    )
    # If numbers were reused, or too many rows are open, reading from the mark is not enough.
    known = _known(lake, section.name) if plan.first_id >= mark else []
    answers = run_tasks(workers, _WORK, _pieces(config, section, plan, known))
    facts = [range_facts(one) for one in answers]
    open_ids = sorted({number for one in facts for number in one.notes["open_ids"]})
    is_too_many = len(open_ids) > OPEN_IDS_MAX
    next_mark = open_ids[0] if is_too_many else plan.next_mark
    notes = {
        SCANNED_AT: plan.scanned_at_ms,
        "next_mark": next_mark,
        "witness": None if is_too_many else plan.next_witness,
        "open_ids": [one for one in open_ids if one < next_mark],
    }
    written = [replace(one, notes={}) for one in facts if one.rows]
    scan = RangeFacts(
        source=section.name, first=plan.first_id, next=plan.next_id, rows=0, files=(), notes=notes
    )
    lake.commit(OUTBOX, [*written, scan], name=f"{section.name}-{plan.scanned_at_ms:020d}")
    merge_scans(workers, config, lake, section.name, mark=next_mark)
    return sum(one.rows for one in written)


def _pieces(
    config: PipelineConfig, section: DatabaseSection, plan: ScanPlan, known: Sequence[RangeFacts]
) -> list[dict[str, Any]]:
    shared = {
        "section": msgspec.to_builtins(section),
        "tables": config.tables,
        "scanned_at_ms": plan.scanned_at_ms,
    }
    pieces: list[dict[str, Any]] = [
        {
            **shared,
            "first": first,
            "after": after,
            "ids": [],
            "known": [
                file.path
                for one in known
                if one.first < after and first < one.next
                for file in one.files
            ],
        }
        for first, after in id_ranges(plan.first_id, plan.next_id)
    ]
    if plan.open_ids:
        open_rows = {"first": 0, "after": 0, "ids": list(plan.open_ids), "known": []}
        pieces.append({**shared, **open_rows})
    return pieces


def _known(lake: Lake, database: str) -> list[RangeFacts]:
    """Ranges of the database that were read, in order of their scans."""
    return [
        one
        for commit in lake.commits(OUTBOX)
        for one in commit.ranges
        if one.source == database and one.files
    ]


def _witness(scan: RangeFacts | None) -> Witness | None:
    """The row right below the mark of a scan."""
    found = scan.notes.get("witness") if scan else None
    return (str(found[0]), int(found[1])) if found else None


def _last(lake: Lake, database: str) -> RangeFacts | None:
    """The notes of the last scan of this database."""
    scans = [
        one for one in lake.ranges(OUTBOX) if one.source == database and SCANNED_AT in one.notes
    ]
    return max(scans, key=lambda one: int(one.notes[SCANNED_AT]), default=None)


def last_scans(lake: Lake) -> dict[str, int]:
    """Database → time of its last scan, ms since 1970 by its own clock."""
    found: dict[str, int] = {}
    for one in lake.ranges(OUTBOX):
        if SCANNED_AT in one.notes:
            time_ms = int(one.notes[SCANNED_AT])
            found[one.source] = max(found.get(one.source, 0), time_ms)
    return found


def outbox_now(spark: SparkSession, lake: Lake, rows: DataFrame) -> DataFrame:
    """Each message's newest row, with `is_gone`: it was open once and is no longer in the database.

    `rows`: the table `outbox`, or all rows of some messages.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as fn

    newest = Window.partitionBy("database", "message_id").orderBy(fn.col("scanned_at").desc())
    numbered = rows.withColumn("_place", fn.row_number().over(newest))
    rows = numbered.where("_place = 1").drop("_place")
    scans = last_scans(lake)
    columns = {
        "database": pa.array(scans.keys(), pa.string()),
        "last_scan_ms": pa.array(scans.values(), pa.int64()),
    }
    last = arrow_frame(spark, pa.table(columns))
    is_gone = fn.expr("state <> 'sent' AND unix_millis(scanned_at) < last_scan_ms")
    return (
        rows.join(fn.broadcast(last), "database", "left")
        .withColumn("is_gone", fn.coalesce(is_gone, fn.lit(False)))
        .select(*OUTBOX.names, "is_gone")
    )
