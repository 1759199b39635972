"""The gold tables against a count in plain Python."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from qmq_broker.storage.actions import Acked, Action, Dead, Pulled
from qmq_client.wire.deliveries import DeliveryRun
from qmq_client.wire.message_id import MessageIds
from qmq_pipeline.config import PipelineConfig
from qmq_pipeline.errors import LakeError
from qmq_pipeline.jobs.ingest import ingest
from qmq_pipeline.jobs.ingest_outbox import ingest_outbox
from qmq_pipeline.jobs.lifecycle import lifecycle
from qmq_pipeline.jobs.marts import marts
from qmq_pipeline.lake import Lake
from qmq_pipeline.options import Place
from qmq_pipeline.schemas import (
    DEAD_LETTERS,
    DELAY_LATENESS,
    FLOW_MINUTE,
    GROUP_LAG,
    LATENCY_MINUTE,
    PRODUCERS,
    Table,
)
from tests.pipeline.world import START_MS, DataDirectory, OutboxDatabase, messages

if TYPE_CHECKING:
    from pyspark.sql import Row, SparkSession

MINUTE_MS = 60_000
FIRST_MS = START_MS - START_MS % MINUTE_MS
GROUP = "billing"


def minute(number: int) -> datetime:
    return datetime.fromtimestamp((FIRST_MS + number * MINUTE_MS) / 1000, UTC)


def pulled(first: int, count: int, at_ms: int) -> Pulled:
    return Pulled(
        at_ms=at_ms,
        subject="orders",
        group=GROUP,
        consumer="one",
        token=1,
        first_pull_sequence=first,
        runs=(DeliveryRun(first_sequence=first, count=count, attempt=1),),
        lease_until_ms=at_ms + 30_000,
    )


def acked(first: int, after: int, at_ms: int) -> Acked:
    return Acked(
        at_ms=at_ms, subject="orders", group=GROUP, consumer="one", first=first, next=after
    )


def rows_of(spark: SparkSession, config: PipelineConfig, table: Table) -> list[Row]:
    return Lake(config.tables).read(spark, table).collect()


@pytest.fixture
def config(tmp_path: Path) -> PipelineConfig:
    database = OutboxDatabase(tmp_path / "orders.db")
    directory = DataDirectory(tmp_path / "broker")
    ids = MessageIds(77)
    first = messages(ids, 100, born_at_ms=FIRST_MS)
    second = messages(ids, 50, born_at_ms=FIRST_MS + 2 * MINUTE_MS)
    late = [
        msgspec.structs.replace(one, due_at_ms=FIRST_MS + 3 * MINUTE_MS)
        for one in messages(ids, 10, born_at_ms=FIRST_MS)
    ]
    database.insert(first, created_at_ms=FIRST_MS)
    database.insert(second, created_at_ms=FIRST_MS + 2 * MINUTE_MS)
    directory.append(first, at_ms=FIRST_MS + 1_000)
    directory.append(first[:3], at_ms=FIRST_MS + 4_000)
    directory.append(second, at_ms=FIRST_MS + 2 * MINUTE_MS + 500)
    directory.append(late, at_ms=FIRST_MS + 3 * MINUTE_MS + 40)
    actions: list[Action] = [
        pulled(0, 60, FIRST_MS + 5_000),
        acked(0, 59, FIRST_MS + 6_000),
        Dead(
            at_ms=FIRST_MS + 7_000,
            subject="orders",
            group=GROUP,
            sequence=59,
            attempts=1,
            reason="rejected",
            error="no such customer",
        ),
        pulled(60, 43, FIRST_MS + 2 * MINUTE_MS + 1_000),
        acked(60, 103, FIRST_MS + 2 * MINUTE_MS + 2_000),
    ]
    directory.act(actions)
    directory.close()
    database.close()
    return PipelineConfig(
        tables=str(tmp_path / "tables"),
        place=Place(path=str(directory.path)),
        databases=(database.section,),
    )


def test_gold_tables_are_what_a_plain_count_says(
    spark: SparkSession, config: PipelineConfig
) -> None:
    with pytest.raises(LakeError, match="lifecycle` first"):
        marts(spark, config)
    ingest_outbox(spark, config)
    ingest(spark, config)
    lifecycle(spark, config)
    made = marts(spark, config)
    assert not made.is_unchanged
    flow = {row["minute"]: row for row in rows_of(spark, config, FLOW_MINUTE)}
    told = {at: (row["committed"], row["stored"], row["copies"]) for at, row in flow.items()}
    assert {at.replace(tzinfo=UTC): numbers for at, numbers in told.items()} == {
        minute(0): (100, 103, 3),
        minute(2): (50, 50, 0),
        minute(3): (0, 10, 0),
    }
    assert [row["settled"] for row in sorted(flow.values(), key=lambda row: row["minute"])] == [
        59,
        43,
        0,
    ]
    lag = sorted(rows_of(spark, config, GROUP_LAG), key=lambda row: row["minute"])
    assert [(row["stored"], row["settled"], row["lag"]) for row in lag] == [
        (103, 60, 43),
        (153, 103, 50),
        (163, 103, 60),
    ]
    # The oldest open one was stored 1 s into its minute, and the next half a second into the third.
    assert [row["lag_s"] for row in lag] == [59.0, 59.5, 119.5]
    dead = rows_of(spark, config, DEAD_LETTERS)
    assert [(row["sequence"], row["reason"], row["error"]) for row in dead] == [
        (59, "rejected", "no such customer")
    ]
    lateness = rows_of(spark, config, DELAY_LATENESS)
    assert [(row["count"], row["early"], row["p99_ms"]) for row in lateness] == [(10, 0, 40.0)]
    producers = rows_of(spark, config, PRODUCERS)
    assert [(row["producer"], row["messages"], row["copies"]) for row in producers] == [
        (77, 163, 3)
    ]
    stages = Counter[str]()
    for row in rows_of(spark, config, LATENCY_MINUTE):
        stages[row["stage"]] += row["count"]
        assert row["p50_ms"] <= row["p95_ms"] <= row["p99_ms"] <= row["max_ms"]
    assert stages == {"store": 163, "wait": 103, "work": 103, "total": 103}
    assert marts(spark, config).is_unchanged
