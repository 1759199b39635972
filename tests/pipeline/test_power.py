"""A power cut of the machine that has the tables: whatever was committed is whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from qmq_client.wire.message_id import MessageIds
from qmq_pipeline.jobs import deliveries
from qmq_pipeline.jobs.audit import audit
from qmq_pipeline.jobs.ingest import ingest
from qmq_pipeline.jobs.ingest_outbox import ingest_outbox
from qmq_pipeline.jobs.lifecycle import lifecycle
from qmq_pipeline.jobs.marts import marts
from qmq_pipeline.places.config import PipelineConfig
from qmq_pipeline.tables.commits import Commit
from qmq_pipeline.tables.lake import Lake
from qmq_pipeline.tables.lake_files import LakeFiles
from qmq_pipeline.tables.schemas import (
    AUDIT_FINDINGS,
    DELIVERIES,
    LIFECYCLE,
    MESSAGES,
    OUTBOX,
    TABLES,
)
from tests.pipeline.gold import pulled
from tests.pipeline.power import Here, Synced
from tests.pipeline.world import START_MS, DataDirectory, OutboxDatabase, messages

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_P2_nothing_is_committed_before_it_survives_a_power_cut_and_then_the_commit_does(
    spark: SparkSession,
    directory: DataDirectory,
    database: OutboxDatabase,
    config: PipelineConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = replace(config, databases=(database.section,), outbox_safety_s=0.0, merge_commits=2)
    synced, root = Synced(monkeypatch), Path(config.tables)
    committed: dict[str, str] = {}
    write_text = LakeFiles.write_text

    def watched(files: LakeFiles, path: str, text: str) -> None:
        """What the last commits were is there, and what this one will name."""
        if "/_commits/" in path and not path.endswith("_state.json"):
            synced.left(root, left := tmp_path / "left" / str(len(committed)))
            for other, content in committed.items():
                is_swept = not (root / other).exists()
                assert is_swept or (left / other).read_text() == content, other
            folder = path.partition("/_commits/")[0]
            for facts in Commit.from_json(text).ranges:
                for file in facts.files:
                    assert (left / folder / file.path).stat().st_size == file.bytes, file.path
            committed[path] = text
        write_text(files, path, text)

    monkeypatch.setattr(LakeFiles, "write_text", watched)
    monkeypatch.setattr(
        deliveries, "run_tasks", lambda _, function, pieces: Here(1).run(function, pieces)
    )
    ids = MessageIds(1)
    for number in range(3):
        some = messages(ids, 20)
        database.insert(some, created_at_ms=START_MS)
        ingest_outbox(Here(1), config)
        directory.append(some[:-1])  # the last one is lost, and so there is a finding
        directory.act([pulled(number * 5, 5, directory.clock.now_ms())])
        ingest(Here(1), config)
        if number:  # made, and then made by part
            lifecycle(spark, config)
            marts(spark, config)
    audit(spark, config)
    lake = Lake(config.tables)
    tables = {table.name for table in TABLES.values() if lake.commits(table)}
    assert tables >= {one.name for one in (MESSAGES, OUTBOX, DELIVERIES, LIFECYCLE, AUDIT_FINDINGS)}
    assert any(one.replaces for one in lake.commits(MESSAGES)), "merged ones, too"
