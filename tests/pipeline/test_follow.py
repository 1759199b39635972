"""`ingest --follow`: what comes is in the tables, once, until somebody stops it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from qmq_client.signal_flag import SignalFlag
from qmq_client.wire.message_id import MessageIds
from qmq_pipeline.jobs.ingest import Ingested, follow, ingest
from qmq_pipeline.places.config import PipelineConfig
from qmq_pipeline.tables.schemas import MESSAGES
from tests.pipeline.rows import rows_of
from tests.pipeline.world import DataDirectory, messages

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.mark.timeout(300)
def test_P2_a_followed_log_is_in_the_tables_once_until_it_is_stopped(
    spark: SparkSession, directory: DataDirectory, config: PipelineConfig
) -> None:
    directory.append(messages(MessageIds(1), 5))
    stop = SignalFlag()
    told: list[int] = []

    def on_batch(done: Ingested) -> None:
        told.append(done.rows.get("messages", 0))
        if len(told) == 1:
            directory.append(messages(MessageIds(2), 7))
        elif sum(told) == 12:
            stop.set()

    assert follow(spark, config, stop, every_s=0.5, on_batch=on_batch) == len(told)
    assert (told[0], sum(told)) == (5, 12)
    assert len({row["message_id"] for row in rows_of(config.tables, MESSAGES)}) == 12
    directory.append(messages(MessageIds(3), 2))
    assert ingest(spark, config).rows["messages"] == 2, "a run continues where it was stopped"
    assert len(rows_of(config.tables, MESSAGES)) == 14
