"""F40: the pipeline under faults: killed tasks, quarantined ranges, tables of an older version."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest

from qmq_broker.clock import SYSTEM_CLOCK
from qmq_broker.storage.files.disk import OsDisk
from qmq_broker.storage.upkeep.quarantine import quarantine_damage
from qmq_client.signal_flag import SignalFlag
from qmq_client.wire.message_id import MessageIds
from qmq_pipeline.jobs.archive import archive
from qmq_pipeline.jobs.audit_window import judged_window
from qmq_pipeline.jobs.follow import follow
from qmq_pipeline.jobs.ingest import ingest
from qmq_pipeline.places.config import PipelineConfig
from qmq_pipeline.places.options import Place
from qmq_pipeline.tables.lake import Lake
from qmq_pipeline.tables.schemas import MESSAGES
from qmq_pipeline.work.workers import LocalWorkers
from tests.kit.waiting import wait_for
from tests.pipeline.rows import rows_of
from tests.pipeline.world import STORE, DataDirectory, messages

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

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


@pytest.fixture
def quarantined(tmp_path: Path) -> tuple[DataDirectory, range]:
    """A log with messages in quarantine, and their sequences."""
    directory = DataDirectory(tmp_path / "broker", replace(STORE, segment_bytes=65_536))
    directory.append(messages(MessageIds(1), 1000, subjects=("orders",)), frame_records=50)
    directory.append(messages(MessageIds(2), 50, subjects=("refunds",)), frame_records=50)
    directory.close()
    with (directory.path / "commitlog" / f"{0:020d}").open("r+b") as file:
        file.seek(30_000)
        file.write(b"\xff" * 16)
    disk = OsDisk(str(directory.path))
    (report,) = quarantine_damage(disk, SYSTEM_CLOCK)
    disk.close()
    (run,) = report.lost
    assert run.subject == "orders"
    return directory, range(run.first_sequence, run.first_sequence + run.count)


def test_F40_P3_a_quarantined_range_is_named_and_what_is_behind_it_is_ingested(
    quarantined: tuple[DataDirectory, range], tmp_path: Path
) -> None:
    directory, lost = quarantined
    tables = tmp_path / "tables"
    with LocalWorkers(1) as workers:
        done = ingest(workers, config_of(directory, tables))
        again = ingest(workers, config_of(directory, tables))
    assert done.quarantined == {"orders": [(lost.start, lost.stop)]}
    assert again.quarantined == {}
    assert done.rows["messages"] == 1050 - len(lost)
    window = judged_window(Lake(str(tables)), config_of(directory, tables))
    assert window.quarantined == len(lost)
    assert any(
        f"orders {lost.start} to {lost.stop - 1} of the log" in one for one in window.coverage
    )


def test_F40_P3_follow_and_archive_name_what_is_in_quarantine(
    quarantined: tuple[DataDirectory, range], tmp_path: Path
) -> None:
    directory, lost = quarantined
    stop = SignalFlag()
    with LocalWorkers(1) as workers:
        archived = archive(workers, config_of(directory, tmp_path / "archive"))
        followed = follow(
            workers,
            config_of(directory, tmp_path / "tables"),
            stop,
            every_s=0.1,
            on_batch=lambda _: stop.set(),
        )
    runs = {"orders": [(lost.start, lost.stop)]}
    assert (archived.quarantined, followed.quarantined) == (runs, runs)


@pytest.mark.parametrize("frames", [1, 2])
def test_F40_P2_what_was_ingested_before_it_was_damaged_and_given_up_stays_and_news_come(
    directory: DataDirectory, config: PipelineConfig, frames: int
) -> None:
    """The frame that was read last tells whether the log is still the same one, and it is not there any more."""
    directory.append(messages(MessageIds(1), 100), frame_records=10)
    with LocalWorkers(1) as workers:
        ingest(workers, config)
        offset, _ = Lake(config.tables).ranges(MESSAGES)[-1].notes["last_frame"]
        directory.close()
        with (directory.path / "commitlog" / f"{0:020d}").open("r+b") as file:
            file.seek(offset + 200 - 900 * (frames - 1))
            file.write(b"\xff" * 900)
        disk = OsDisk(str(directory.path))
        (report,) = quarantine_damage(disk, SYSTEM_CLOCK)
        disk.close()
        assert report.lost[0].count == 10 * frames
        directory.open()
        directory.append(messages(MessageIds(2), 30), frame_records=10)
        assert ingest(workers, config).rows["messages"] == 30
    assert sorted(row["sequence"] for row in rows_of(config.tables, MESSAGES)) == list(range(130))


@pytest.mark.parametrize("kind", ["log", "archive"])
def test_F40_P1_a_query_of_what_is_in_quarantine_fails_and_names_it(
    spark: SparkSession, quarantined: tuple[DataDirectory, range], tmp_path: Path, kind: str
) -> None:
    directory, lost = quarantined
    path = directory.path
    if kind == "archive":
        path = tmp_path / "archive"
        with LocalWorkers(1) as workers:
            archive(workers, config_of(directory, path))

    def read(**options: str) -> DataFrame:
        return spark.read.format("qmq").options(path=str(path), **options).load()

    named = rf"in quarantine \(orders {lost.start} to {lost.stop - 1}\).*quarantined=pass"
    with pytest.raises(Exception, match=named):
        read().count()
    with pytest.raises(
        Exception, match=r"in quarantine \(it is not known which delayed messages were lost\)"
    ):
        read(table="scheduled").count()
    passed = {row["sequence"] for row in read(quarantined="pass", subject="orders").collect()}
    assert not passed & set(lost)
    assert lost.stop in passed
    assert read(subject="refunds").count() == (50 if kind == "log" else 0)


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
