"""Findings: the queries of `audit_sql.py`, over rows that tallies leave in doubt, or over all rows
for the cross-check.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from qmq_pipeline.jobs import audit_sql
from qmq_pipeline.jobs.audit_tallies import Tallies, WordSet
from qmq_pipeline.jobs.audit_window import Window, between, judged_ranges
from qmq_pipeline.jobs.deliveries import folded, groups
from qmq_pipeline.jobs.ingest_outbox import outbox_now
from qmq_pipeline.places.config import AuditOptions
from qmq_pipeline.spark.frames import arrow_frame
from qmq_pipeline.tables.commits import ALTERED, RangeFacts
from qmq_pipeline.tables.lake import Lake
from qmq_pipeline.tables.schemas import (
    ACTIONS,
    AUDIT_FINDINGS,
    CANCELLED,
    COPIES,
    DELIVERIES,
    MESSAGES,
    OUTBOX,
    SCHEDULED,
)
from qmq_pipeline.tables.table import Table
from qmq_pipeline.tables.tallies import WORD_BITS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: Besides those of `audit_words.REASONS`: records that `ingest` found altered, and messages that a
#: group has set aside.
SPOILT: Final = "spoilt"
ASIDE: Final = "aside"
_FINDING_COLUMNS: Final = AUDIT_FINDINGS.names[1:]
_STORED_COLUMNS: Final = (
    "message_id",
    "producer",
    "counter",
    "subject",
    "sequence",
    "stored_at",
    "due_at",
    "record_crc",
)
#: The note of `ingest` on records whose bytes do not have the checksum they carry.
_SPOILT: Final = pa.schema(
    {
        "message_id": pa.string(),
        "subject": pa.string(),
        "sequence": pa.int64(),
        "stored_at": pa.timestamp("us", tz="UTC"),
        "record_crc": pa.int64(),
        "found_crc": pa.int64(),
    }
)


class DoubtfulRows:
    """The rows of some id words, or all rows, as views for the queries."""

    def __init__(
        self,
        spark: SparkSession,
        lake: Lake,
        window: Window,
        some: tuple[Tallies, WordSet] | None,
    ) -> None:
        """`some`: the words to read, and the files that have them; None for everything."""
        self._spark = spark
        self._lake = lake
        self._window = window
        self._some = some
        self._outbox = outbox_now(spark, lake, self._read(OUTBOX, lake.ranges(OUTBOX))).cache()

    def make_views(self) -> None:
        """Create the views named in `audit_sql.py`."""
        spark, lake, window = self._spark, self._lake, self._window
        self._outbox.where(between("created_at", window)).createOrReplaceTempView("qmq_committed")
        self._outbox.createOrReplaceTempView("qmq_outbox_all")
        stored = self._read(MESSAGES, judged_ranges(lake.ranges(MESSAGES), window))
        stored = stored.select(*_STORED_COLUMNS)
        stored.createOrReplaceTempView("qmq_stored_all")
        stored.where(between("stored_at", window)).createOrReplaceTempView("qmq_stored")
        scheduled = self._read(SCHEDULED, lake.ranges(SCHEDULED))
        scheduled.createOrReplaceTempView("qmq_scheduled_all")
        spark.sql(audit_sql.SCHEDULED).createOrReplaceTempView("qmq_scheduled")
        cancelled = self._read(CANCELLED, lake.ranges(CANCELLED))
        cancelled.createOrReplaceTempView("qmq_cancelled")
        placed = lake.read(spark, MESSAGES).select("message_id", "subject", "sequence")
        placed.createOrReplaceTempView("qmq_placed")
        lake.read(spark, COPIES).createOrReplaceTempView("qmq_copies")
        lake.read(spark, ACTIONS).createOrReplaceTempView("qmq_actions")
        lake.read(spark, DELIVERIES).createOrReplaceTempView("qmq_deliveries")
        known = folded(lake)
        groups(spark, known.groups if known else {}).createOrReplaceTempView("qmq_groups")
        arrow_frame(spark, _spoilt(lake)).createOrReplaceTempView("qmq_spoilt")
        self._kept_producers().createOrReplaceTempView("qmq_kept")

    def forget(self) -> None:
        """Release what the views hold."""
        self._outbox.unpersist()

    def _read(self, table: Table, ranges: Sequence[RangeFacts]) -> DataFrame:
        if self._some is None:
            return self._lake.read(self._spark, table, ranges)
        tallies, words = self._some
        paths = tallies.files_with(table, words)
        held = [
            replace(one, files=tuple(file for file in one.files if file.path in paths))
            for one in ranges
        ]
        found = pa.table({"of_producer": words.producers, "word": words.words})
        of_words = f"producer = of_producer AND SHIFTRIGHT(counter, {WORD_BITS}) = word"
        from pyspark.sql import functions as fn

        rows = self._lake.read(self._spark, table, held)
        return rows.join(arrow_frame(self._spark, found), fn.expr(of_words), "left_semi")

    def _kept_producers(self) -> DataFrame:
        """Producers whose outboxes keep their rows, with the time of the oldest of these rows."""
        kept = self._window.kept
        if self._some is None:
            names = pa.table({"database": pa.array(kept, pa.string())})
            arrow_frame(self._spark, names).createOrReplaceTempView("qmq_kept_databases")
            return self._spark.sql(audit_sql.KEPT)
        producers, first_us = self._some[0].producers(kept)
        some = pa.table({"producer": pa.array(producers, pa.int64())})
        first_at = f"TIMESTAMP_MICROS({first_us}) AS first_at"
        return arrow_frame(self._spark, some).selectExpr("producer", first_at)


def findings(
    spark: SparkSession, options: AuditOptions, window: Window, reasons: Collection[str]
) -> DataFrame | None:
    """Findings for these reasons, one row each; None if there is nothing to read. Requires: the views."""
    late_us, next_us = round(options.late_s * 1_000_000), window.next_ms * 1000
    if ASIDE in reasons:
        aside = audit_sql.ASIDE.format(judged=between("d.set_aside_at", window))
        spark.sql(aside).createOrReplaceTempView("qmq_aside")
    kept = audit_sql.KEPT_PRODUCER if not options.is_closed_world else "TRUE"
    queries = {
        "unstored": (audit_sql.LOST, audit_sql.WAITING),
        "unlike": (audit_sql.ALTERED, audit_sql.ALTERED_SCHEDULED),
        "late": (audit_sql.LATE,),
        "ghost": (audit_sql.GHOST.format(producers=kept),),
        "copied": (audit_sql.DUPLICATE, audit_sql.ALTERED_COPY),
        "released otherwise": (audit_sql.ALTERED_RELEASE,),
        "overdue": (audit_sql.OVERDUE,),
        "revived": (audit_sql.CANCELLED_AND_STORED,),
        SPOILT: (audit_sql.ALTERED_CONTENT,),
        ASIDE: (audit_sql.ASIDE_LOST, audit_sql.ASIDE_OVERDUE),
    }
    times = {
        SPOILT: between("stored_at", window),
        "overdue": between("d.due_at", window),
    }
    parts = [
        query.format(late_us=late_us, next_us=next_us, judged=times.get(reason, ""))
        for reason, some in queries.items()
        if reason in reasons
        for query in some
    ]
    if not parts:
        return None
    columns = ", ".join(_FINDING_COLUMNS)
    # As one text: Spark would analyse each union of data frames from the beginning.
    text = " UNION ALL ".join(f"(SELECT {columns} FROM ({part}))" for part in parts)
    return spark.sql(text).dropDuplicates(["kind", "message_id", "subject", "consumer_group"])


def has_altered(lake: Lake) -> bool:
    """Whether `ingest` has found altered records."""
    return any(one.notes.get(ALTERED) for one in lake.ranges(MESSAGES))


def has_aside(lake: Lake, window: Window) -> bool:
    """Whether there are messages that groups set aside, and they can be judged."""
    files = [file for one in lake.ranges(DELIVERIES) for file in one.files]
    counts = lake.count_values(DELIVERIES, files, ["set_aside_at"]) if window.is_folded else {}
    return counts.get("set_aside_at", 0) > 0


def _spoilt(lake: Lake) -> pa.Table:
    rows = [one for facts in lake.ranges(MESSAGES) for one in facts.notes.get(ALTERED, ())]
    return pa.Table.from_pylist(
        [{**row, "stored_at": row["stored_at_ms"] * 1000} for row in rows], schema=_SPOILT
    )
