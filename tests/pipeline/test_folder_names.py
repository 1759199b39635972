"""Folders of tables by whatever name."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from qmq_client.wire.message_id import MessageIds
from qmq_pipeline.jobs.ingest import ingest
from qmq_pipeline.tables.lake import PART, Lake
from qmq_pipeline.tables.schemas import MESSAGES
from tests.pipeline.world import DataDirectory, messages

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from qmq_pipeline.places.config import PipelineConfig
    from qmq_pipeline.work.workers import LocalWorkers


@pytest.mark.parametrize("name", ["t[1]", "t{1,2}", "t?", "*", r"t\1", "ä b%20"])
def test_spark_reads_the_folder_that_is_named_and_none_that_its_name_would_match(
    spark: SparkSession,
    directory: DataDirectory,
    config: PipelineConfig,
    workers: LocalWorkers,
    tmp_path: Path,
    name: str,
) -> None:
    """The other folder has files of the same names: they are named by what they hold of a log."""
    directory.append(messages(MessageIds(1), 20))
    for one in ("t1", name):
        ingest(workers, replace(config, tables=str(tmp_path / one)))
    lake = Lake(str(tmp_path / name))
    ranges = lake.ranges(MESSAGES)
    frame = lake.read(spark, MESSAGES).selectExpr("_metadata.file_path AS path", "sequence")
    rows = frame.collect()
    assert sorted(row["sequence"] for row in rows) == [*range(20)]
    assert not any("/t1/" in row["path"] for row in rows)
    assert lake.read_parts(spark, MESSAGES, ranges).select(PART, "sequence").count() == 20
