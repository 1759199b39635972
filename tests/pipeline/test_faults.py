"""F40: the pipeline under faults: killed tasks, quarantined ranges, tables of an older version."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq

from qmq_broker.clock import SYSTEM_CLOCK
from qmq_broker.storage.files.disk import OsDisk
from qmq_broker.storage.upkeep.quarantine import quarantine_damage
from qmq_client.wire.message_id import MessageIds
from qmq_pipeline.jobs.ingest import ingest
from qmq_pipeline.places.config import PipelineConfig
from qmq_pipeline.places.options import Place
from qmq_pipeline.tables.lake import Lake
from qmq_pipeline.tables.schemas import MESSAGES
from tests.kit.waiting import wait_for
from tests.pipeline.world import DataDirectory, messages

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COUNT = 6000
WORKER = """
import sys
from qmq_broker.storage.logs.frame_seek import LogRange
from qmq_pipeline.places.options import Place
from qmq_pipeline.work.ranges import ingest_range
path, tables, after = sys.argv[1:]
while True:
    ingest_range(Place(path=path), tables, "commitlog", LogRange(0, int(after)))
"""


def config_of(directory: DataDirectory, tables: Path) -> PipelineConfig:
    return PipelineConfig(tables=str(tables), place=Place(path=str(directory.path)))


def sequences(spark: SparkSession, tables: Path) -> list[int]:
    rows = Lake(str(tables)).read(spark, MESSAGES).select("sequence").collect()
    return sorted(row["sequence"] for row in rows)


def test_F40_P2_tasks_that_were_killed_while_they_wrote_leave_nothing_behind(
    spark: SparkSession, tmp_path: Path
) -> None:
    directory = DataDirectory(tmp_path / "broker")
    directory.append(messages(MessageIds(1), COUNT), frame_records=500)
    tables = tmp_path / "tables"
    Lake(str(tables)).prepare()
    folder = tables / "bronze" / "messages"
    for _ in range(3):
        worker = subprocess.Popen(
            [
                sys.executable,
                "-c",
                WORKER,
                directory.path,
                tables,
                str(directory.store.durable_offset),
            ],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        wait_for(lambda: list(folder.rglob(".draft-*")) or list(folder.rglob("*.parquet")))
        worker.send_signal(signal.SIGKILL)
        worker.wait()
    assert sequences(spark, tables) == []
    assert ingest(spark, config_of(directory, tables)).rows["messages"] == COUNT
    assert sequences(spark, tables) == list(range(COUNT))
    assert not list(folder.rglob(".draft-*"))
    assert len(list(folder.rglob("*.parquet"))) == 2, "the rows, and their tally"
    directory.close()


def test_F40_P3_a_quarantined_range_is_counted_and_what_is_behind_it_is_read(
    spark: SparkSession, tmp_path: Path
) -> None:
    directory = DataDirectory(tmp_path / "broker")
    directory.append(messages(MessageIds(1), 1000), frame_records=50)
    directory.close()
    with (directory.path / "commitlog" / f"{0:020d}").open("r+b") as file:
        file.seek(30_000)
        file.write(b"\xff" * 16)
    disk = OsDisk(str(directory.path))
    reports = quarantine_damage(disk, SYSTEM_CLOCK)
    disk.close()
    lost = {
        number
        for report in reports
        for run in report.lost
        for number in range(run.first_sequence, run.first_sequence + run.count)
    }
    assert lost
    done = ingest(spark, config_of(directory, tmp_path / "tables"))
    assert done.quarantined == len(lost)
    assert sequences(spark, tmp_path / "tables") == sorted(set(range(1000)) - lost)


def test_F40_files_of_an_older_version_of_a_table_are_read_with_nulls(
    spark: SparkSession, tmp_path: Path
) -> None:
    directory = DataDirectory(tmp_path / "broker")
    directory.append(messages(MessageIds(1), 20))
    ingest(spark, config_of(directory, tmp_path / "tables"))
    (path,) = (tmp_path / "tables" / "bronze" / "messages").glob("day=*/*.parquet")
    older = pq.read_table(path, partitioning=None).drop_columns(["expires_at", "record_crc"])
    pq.write_table(older, path)
    directory.append(messages(MessageIds(2), 20))
    ingest(spark, config_of(directory, tmp_path / "tables"))
    rows = Lake(str(tmp_path / "tables")).read(spark, MESSAGES).orderBy("sequence").collect()
    assert [row["record_crc"] is None for row in rows] == [True] * 20 + [False] * 20
    assert rows[0].asDict().keys() == set(MESSAGES.names)
    directory.close()
