"""What the queries of the gold tables count, by hand: copies, delayed messages, redeliveries, spans over a minute."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from qmq_pipeline.jobs.marts_sql import BY_DAY, BY_PART, SUMMED
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
    from pyspark.sql import DataFrame, Row, SparkSession


def at(second: int) -> datetime:
    return datetime.fromtimestamp(FIRST_MS / 1000 + second, UTC)


class Lives:
    """Rows of `lifecycle`, and queries of them."""

    def __init__(self, spark: SparkSession, rows: DataFrame) -> None:
        self.spark = spark
        self._rows = rows

    def sql(self, query: str) -> DataFrame:
        return self.spark.sql(query, lifecycle=self._rows)


@pytest.fixture
def lives(spark: SparkSession) -> Lives:
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
    every = [
        {**dict.fromkeys(LIFECYCLE.names), "subject": "orders", "part": 0, **row} for row in rows
    ]
    table = pa.Table.from_pylist(every, schema=LIFECYCLE.arrow())
    return Lives(spark, arrow_frame(spark, table))


def minutes(rows: list[Row], *names: str) -> dict[int, tuple[Any, ...]]:
    """Minute → values."""
    return {
        round((row["minute"].astimezone(UTC) - at(0)).total_seconds()) // 60: tuple(
            row[name] for name in names
        )
        for row in rows
    }


def test_messages_and_copies_are_counted_once_whatever_the_groups_and_each_delivery_is(
    lives: Lives,
) -> None:
    flow = minutes(
        lives.sql(BY_DAY[FLOW_MINUTE]).collect(),
        *("committed", "stored", "delivered", "settled", "bytes", "copies"),
    )
    assert flow == {0: (1, 3, 4, 0, 25, 1), 1: (0, 0, 0, 1, 0, 0)}
    (row,) = lives.sql(BY_PART[PRODUCER_PARTS]).collect()
    assert (row["messages"], row["bytes"], row["copies"]) == (3, 25, 1)


def test_how_late_a_delayed_message_is_is_no_latency_of_storing_and_a_copy_has_none(
    lives: Lives,
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
    lives: Lives,
) -> None:
    """What is settled in the next minute is open in the first one alone; an attempt is no redelivery."""
    lag_of = lives.spark.sql(SUMMED[GROUP_LAG], group_spans=lives.sql(BY_PART[GROUP_SPANS]))
    rows = [row for row in lag_of.collect() if row["consumer_group"] == "billing"]
    lag = minutes(rows, "stored", "settled", "lag", "lag_s", "redeliveries")
    assert lag == {0: (2, 0, 2, 59.0, 2), 1: (2, 1, 1, 113.0, 0)}
