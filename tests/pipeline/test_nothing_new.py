"""`qmq pipeline run` where nothing is new: no Spark, and the page that is shown is the one that queries would make."""

from __future__ import annotations

from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from qmq_broker.storage.logs.actions import Acked, Dead, GroupDefined, Pulled
from qmq_client.wire.deliveries import DeliveryRun
from qmq_client.wire.message_id import MessageIds
from qmq_pipeline.jobs.report import collect
from qmq_pipeline.jobs.report_gold import gold_facts
from qmq_pipeline.jobs.run import run
from qmq_pipeline.places.config import AuditOptions, PipelineConfig
from qmq_pipeline.places.options import Place
from qmq_pipeline.report.facts import GoldFacts
from qmq_pipeline.tables.lake import Lake
from qmq_pipeline.work.workers import LocalWorkers
from tests.pipeline.world import START_MS, DataDirectory, OutboxDatabase, messages

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def nobody() -> SparkSession:
    raise AssertionError("nothing is new, and Spark was asked for")


def test_a_run_that_finds_nothing_new_needs_no_spark_and_shows_the_same_page(
    spark: SparkSession, directory: DataDirectory, database: OutboxDatabase, tmp_path: Path
) -> None:
    ids = MessageIds(5)
    every = messages(ids, 60)
    database.insert(every, created_at_ms=START_MS)
    directory.append(every, at_ms=START_MS + 100)
    directory.act(
        [
            GroupDefined(START_MS, "orders", "billing", 0, 0),
            Pulled(START_MS, "orders", "billing", "c", 1, 0, (DeliveryRun(0, 9, 1),), START_MS),
            Acked(START_MS + 200, "orders", "billing", "c", 0, 8),
            Dead(START_MS + 300, "orders", "billing", 8, 1, "rejected", "no such flight"),
        ]
    )
    config = PipelineConfig(
        tables=str(tmp_path / "tables"),
        place=Place(path=str(directory.path)),
        databases=(database.section,),
        audit=AuditOptions(are_rows_kept=True),
    )
    page = str(tmp_path / "report.html")
    with LocalWorkers() as workers:
        first = run(spark, config, workers=workers, report_path=page)
        shown = collect(nobody, config)
        again = run(nobody, config, workers=workers, report_path=page)
        assert not first.marts.is_unchanged
        assert again.lifecycle.is_unchanged
        assert again.marts.is_unchanged
        assert (first.audit.is_clean, again.audit.is_clean) == (True, True)
        (lost,) = messages(ids, 1)
        database.insert([lost], created_at_ms=START_MS)
        with pytest.raises(AssertionError, match="Spark was asked for"):
            run(nobody, config, workers=workers, report_path=page)
        run(spark, config, workers=workers, report_path=page)
    (grid,) = collect(nobody, config).findings.values()
    assert [row[2] for row in grid.rows] == [lost.message_id.hex()]
    # What was kept is what the queries say, in each value and its type.
    lake = Lake(config.tables)
    now = gold_facts(spark, lake)
    assert collect(spark, config).totals == now.totals != shown.totals
    # A dead letter is settled, which the audit on the same page counts, and not acked.
    assert (
        {one.name: one.values[-1] for one in now.flow.series}["acked"] == now.totals["acked"] == 8
    )
    kept = collect(nobody, config)
    assert now == GoldFacts(**{one.name: getattr(kept, one.name) for one in fields(GoldFacts)})
    assert now.dead.rows[0][0] == datetime.fromtimestamp(START_MS / 1000 + 0.3, UTC)
