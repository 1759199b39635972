"""What the query of `lifecycle` takes from rows that it replaces, and from when it counts."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from qmq_pipeline.fold.steps import GroupMark
from qmq_pipeline.jobs import lifecycle_sql
from qmq_pipeline.jobs.deliveries import groups
from qmq_pipeline.spark.frames import arrow_frame
from qmq_pipeline.tables.schemas import (
    DELIVERIES,
    LIFECYCLE,
    LOG,
    MESSAGES,
    OUTBOX,
)
from tests.pipeline.world import START_MS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from qmq_pipeline.tables.table import Table


def at(second: int) -> datetime:
    return datetime.fromtimestamp(START_MS / 1000 + second, UTC)


def test_P2_a_window_that_is_made_again_keeps_what_only_its_old_rows_know(
    spark: SparkSession,
) -> None:
    """The schedule and the copies' originals are elsewhere, and are not read again."""
    ids = {"producer": 1, "counter": 1, "message_id": "1", "subject": "orders"}
    others = {"producer": 1, "counter": 2, "message_id": "2", "subject": "orders"}
    moved = {"producer": 1, "counter": 3, "message_id": "3", "subject": "orders"}
    views: dict[str, tuple[Table, list[dict[str, Any]]]] = {
        "messages": (
            MESSAGES,
            [
                {**ids, "sequence": 0, "born_at": at(0), "stored_at": at(41), "due_at": at(20)},
                {**others, "sequence": 1, "born_at": at(0), "stored_at": at(41)},
                {**moved, "sequence": 2, "born_at": at(0), "stored_at": at(51), "due_at": at(20)},
            ],
        ),
        "old": (
            LIFECYCLE,
            [
                {**ids, "sequence": 0, "stored_at": at(41), "due_at": at(40), "copy": 0},
                {**others, "sequence": 1, "stored_at": at(41), "copy": 1},
                {**moved, "sequence": 2, "stored_at": at(51), "due_at": at(30), "copy": 0},
            ],
        ),
        "deliveries": (
            DELIVERIES,
            [
                {
                    "subject": "orders",
                    "sequence": 0,
                    "consumer_group": "billing",
                    "first_delivered_at": at(42),
                    "settled_at": at(45),
                    "outcome": "acked",
                }
            ],
        ),
        "outbox_new": (OUTBOX, []),
        "scheduled_new": (LOG, [{**moved, "physical_offset": 9, "now_due_at": at(50)}]),
        "cancelled_new": (LOG, []),
    }
    frames: dict[str, Any] = {}
    for name, (table, rows) in views.items():
        every = [dict.fromkeys(table.names) | row for row in rows]
        frame = arrow_frame(spark, pa.Table.from_pylist(every, schema=table.arrow()))
        if table is MESSAGES:
            frame = frame.drop("headers", "tags", "body").selectExpr("*", "0L AS part")
        frames[name] = frame
    mark = GroupMark(first=0, come_to=2, has_ended=True).to_json()
    frames["groups"] = groups(spark, {"orders\nbilling": mark})
    made = spark.sql(lifecycle_sql.LIFECYCLE, **frames)
    first, second, third = made.orderBy("sequence").collect()
    assert first["due_at"].astimezone(UTC) == at(40), "it was put off before it was stored"
    assert third["due_at"].astimezone(UTC) == at(50), "news go before old rows"
    assert (first["wait_ms"], first["work_ms"], first["total_ms"]) == (1_000, 3_000, 5_000)
    assert (first["outcome"], second["outcome"]) == ("acked", "waiting")
    assert (first["copy"], second["copy"]) == (0, 1)
