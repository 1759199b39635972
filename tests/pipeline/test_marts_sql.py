"""What the queries of the gold tables count, by hand: copies, delayed messages, redeliveries, spans over a minute."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from qmq_pipeline.jobs.marts_sql import BY_DAY, BY_WINDOW, SUMMED
from qmq_pipeline.spark.frames import arrow_frame
from qmq_pipeline.tables.schemas import (
    DELAY_LATENESS,
    FLOW_MINUTE,
    GROUP_LAG,
    GROUP_SPANS,
    LATENCY_MINUTE,
    LIFECYCLE,
    PRODUCER_PARTS,
)
from tests.pipeline.gold import FIRST_MS

if TYPE_CHECKING:
    from pyspark.sql import Row, SparkSession


def at(second: int) -> datetime:
    return datetime.fromtimestamp(FIRST_MS / 1000 + second, UTC)


@pytest.fixture
def lives(spark: SparkSession) -> SparkSession:
    """A message for two groups, its copy, and a delayed one that came before its time and was delivered three times."""
    first = {"message_id": "1", "producer": 1, "counter": 1, "committed_at": at(0)}
    first |= {"sequence": 0, "stored_at": at(1), "store_ms": 1e3, "copy": 0, "body_bytes": 10}
    done = {"first_delivered_at": at(2), "attempts": 1, "settled_at": at(65), "outcome": "acked"}
    copy = {**first, "sequence": 1, "stored_at": at(2), "store_ms": 2e3, "copy": 1}
    late = {"message_id": "2", "producer": 1, "counter": 2, "sequence": 2, "copy": 0}
    late |= {"stored_at": at(5), "due_at": at(7), "store_ms": 9e3, "body_bytes": 5}
    again = {"first_delivered_at": at(6), "attempts": 3, "outcome": "in flight"}
    rows: list[dict[str, Any]] = [
        {**first, **done, "consumer_group": "billing"},
        {**first, "attempts": 0, "consumer_group": "mail", "outcome": "waiting"},
        {**copy, "attempts": 0, "due_at": at(3)},
        {**late, **again, "consumer_group": "billing"},
    ]
    every = [{**dict.fromkeys(LIFECYCLE.names), "subject": "orders", **row} for row in rows]
    table = pa.Table.from_pylist(every, schema=LIFECYCLE.arrow())
    arrow_frame(spark, table).selectExpr("*", "'w0' AS part").createOrReplaceTempView(
        "qmq_lifecycle"
    )
    return spark


def minutes(rows: list[Row], *names: str) -> dict[int, tuple[Any, ...]]:
    """Minute → values."""
    return {
        round((row["minute"].astimezone(UTC) - at(0)).total_seconds()) // 60: tuple(
            row[name] for name in names
        )
        for row in rows
    }


def test_messages_and_copies_are_counted_once_whatever_the_groups_and_each_delivery_is(
    lives: SparkSession,
) -> None:
    flow = minutes(
        lives.sql(BY_DAY[FLOW_MINUTE]).collect(),
        *("committed", "stored", "delivered", "settled", "bytes", "copies"),
    )
    assert flow == {0: (1, 3, 4, 0, 25, 1), 1: (0, 0, 0, 1, 0, 0)}
    (row,) = lives.sql(BY_WINDOW[PRODUCER_PARTS]).collect()
    assert (row["messages"], row["bytes"], row["copies"]) == (3, 25, 1)


def test_how_late_a_delayed_message_is_is_no_latency_of_storing_and_a_copy_has_none(
    lives: SparkSession,
) -> None:
    stored = [
        (row["count"], row["max_ms"])
        for row in lives.sql(BY_DAY[LATENCY_MINUTE]).collect()
        if row["stage"] == "store"
    ]
    assert stored == [(1, 1e3)]
    late = minutes(lives.sql(BY_DAY[DELAY_LATENESS]).collect(), "count", "max_ms")
    assert late == {0: (1, -2e3)}


def test_what_is_open_at_the_end_of_a_minute_counts_from_when_it_could_be_delivered(
    lives: SparkSession,
) -> None:
    """What is settled in the next minute is open in the first one alone; an attempt is no redelivery."""
    lives.sql(BY_WINDOW[GROUP_SPANS]).createOrReplaceTempView("qmq_group_spans")
    rows = [
        row for row in lives.sql(SUMMED[GROUP_LAG]).collect() if row["consumer_group"] == "billing"
    ]
    lag = minutes(rows, "stored", "settled", "lag", "lag_s", "redeliveries")
    assert lag == {0: (2, 0, 2, 59.0, 2), 1: (2, 1, 1, 113.0, 0)}
