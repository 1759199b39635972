"""The gold tables against a count in plain Python."""

from __future__ import annotations

from collections import Counter
from datetime import UTC
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.sql import Row
from pyspark.testing import assertDataFrameEqual

from qmq_pipeline.errors import OptionError, TablesError
from qmq_pipeline.jobs.lifecycle import lifecycle
from qmq_pipeline.jobs.marts import marts, require_sketches
from qmq_pipeline.tables.schemas import (
    DEAD_LETTERS,
    DELAY_LATENESS,
    FLOW_MINUTE,
    GROUP_LAG,
    LATENCY_MINUTE,
    PRODUCERS,
)
from qmq_pipeline.tables.store import Tables
from tests.pipeline.bronze import write_bronze
from tests.pipeline.gold import minute, shop
from tests.pipeline.rows import rows_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_gold_tables_are_what_a_plain_count_says(spark: SparkSession, tmp_path: Path) -> None:
    config = shop(tmp_path)
    write_bronze(config)
    with pytest.raises(TablesError, match="lifecycle` first"):
        marts(spark, config)
    lifecycle(spark, config)
    made = marts(spark, config)
    assert not made.is_unchanged
    flow = {row["minute"]: row for row in rows_of(config.tables, FLOW_MINUTE)}
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
    # The oldest open one was stored 1 s into its minute, and the next half a second into the third.
    columns = ["stored", "settled", "lag", "lag_s"]
    assertDataFrameEqual(
        Tables(spark, config.tables).read(GROUP_LAG).select(*columns),
        [
            Row(stored=103, settled=60, lag=43, lag_s=59.0),
            Row(stored=153, settled=103, lag=50, lag_s=59.5),
            Row(stored=163, settled=103, lag=60, lag_s=119.5),
        ],
    )
    dead = rows_of(config.tables, DEAD_LETTERS)
    assert [(row["sequence"], row["reason"], row["error"]) for row in dead] == [
        (59, "rejected", "no such customer")
    ]
    lateness = rows_of(config.tables, DELAY_LATENESS)
    assert [(row["count"], row["early"], row["p99_ms"]) for row in lateness] == [(10, 0, 40.0)]
    producers = rows_of(config.tables, PRODUCERS)
    assert [(row["producer"], row["messages"], row["copies"]) for row in producers] == [
        (77, 163, 3)
    ]
    stages = Counter[str]()
    for row in rows_of(config.tables, LATENCY_MINUTE):
        stages[row["stage"]] += row["count"]
        assert row["p50_ms"] <= row["p95_ms"] <= row["p99_ms"] <= row["max_ms"]
    assert stages == {"store": 153, "wait": 103, "work": 103, "total": 103}
    assert marts(spark, config).is_unchanged


def test_a_spark_without_sketches_is_refused_with_which_one_has_them() -> None:
    for version in ("4.1.2", "4.10.1", "5.0.0-preview1"):
        require_sketches(version)
    for version in ("4.0.5", "4.1.1"):
        with pytest.raises(OptionError, match=rf"{version}; allowed: 4\.1\.2 and newer"):
            require_sketches(version)
