"""P1 to P3 under faults: tasks that are killed, quarantined ranges, files that a disk has damaged."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from qmq_broker.storage.files.disk import OsDisk
from qmq_broker.storage.upkeep.quarantine import quarantine_damage
from qmq_client.clock import SYSTEM_CLOCK
from qmq_client.wire.message_id import MessageIds
from qmq_pipeline.jobs.audit import judged_window
from qmq_pipeline.jobs.batches import BatchWriter
from qmq_pipeline.jobs.ingest import ingest
from qmq_pipeline.places.config import PipelineConfig
from qmq_pipeline.places.log import COMMIT_LOG
from qmq_pipeline.places.options import Place, parse_log_options
from qmq_pipeline.places.places import open_log
from qmq_pipeline.sources.log_stream import LogStreamReader
from qmq_pipeline.spark.explain import explain
from qmq_pipeline.tables.damage import damage_in_error
from qmq_pipeline.tables.schemas import LOG, MESSAGES
from qmq_pipeline.tables.store import Tables
from tests.pipeline.bronze import write_bronze
from tests.pipeline.rows import files_of, rows_of
from tests.pipeline.world import STORE, DataDirectory, messages

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

COUNT = 400


def config_of(directory: DataDirectory, tables: Path) -> PipelineConfig:
    return PipelineConfig(tables=str(tables), place=Place(path=str(directory.path)))


def damage(directory: DataDirectory, position: int, count: int = 16) -> range:
    """Overwrite some bytes of the first segment and have the broker give them up; what is lost of `orders`."""
    with (directory.path / "commitlog" / f"{0:020d}").open("r+b") as file:
        file.seek(position)
        file.write(b"\xff" * count)
    disk = OsDisk(str(directory.path))
    (report,) = quarantine_damage(disk, SYSTEM_CLOCK)
    disk.close()
    (run,) = report.lost
    assert run.subject == "orders"
    return range(run.first_sequence, run.first_sequence + run.count)


def test_F40_P2_tasks_that_were_killed_while_they_wrote_leave_nothing_behind(
    spark: SparkSession, tmp_path: Path
) -> None:
    directory = DataDirectory(tmp_path / "broker")
    directory.append(messages(MessageIds(1), COUNT), frame_records=50)
    config = config_of(directory, tmp_path / "tables")
    ingest(spark, config)
    directory.append(messages(MessageIds(2), COUNT), frame_records=50)
    before = files_of(config.tables, LOG)

    def die(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield next(batches)
        os.kill(os.getpid(), signal.SIGKILL)

    rows = spark.read.format("qmq").options(path=str(directory.path), table="log").load()
    with pytest.raises(Exception, match="worker exited unexpectedly"):
        BatchWriter(config, LOG)(rows.mapInArrow(die, LOG.ddl()), 0)
    assert files_of(config.tables, LOG) == before
    assert ingest(spark, config).rows["messages"] == COUNT
    found = sorted(row["sequence"] for row in rows_of(config.tables, MESSAGES))
    assert found == [*range(2 * COUNT)]
    directory.close()


@pytest.fixture
def quarantined(tmp_path: Path) -> tuple[DataDirectory, range]:
    """A log with messages in quarantine, and their sequences."""
    directory = DataDirectory(tmp_path / "broker", replace(STORE, segment_bytes=65_536))
    directory.append(messages(MessageIds(1), 1000, subjects=("orders",)), frame_records=50)
    directory.append(messages(MessageIds(2), 50, subjects=("refunds",)), frame_records=50)
    directory.close()
    return directory, damage(directory, 30_000)


def test_F40_P3_a_quarantined_range_is_named_and_what_is_behind_it_is_ingested(
    spark: SparkSession, quarantined: tuple[DataDirectory, range], tmp_path: Path
) -> None:
    directory, lost = quarantined
    config = config_of(directory, tmp_path / "tables")
    done = ingest(spark, config)
    assert done.quarantined == {"orders": [(lost.start, lost.stop)]}
    assert done.rows["messages"] == 1050 - len(lost)
    window = judged_window(Tables(spark, config.tables), config)
    assert window.quarantined == len(lost)
    text = f"orders {lost.start} to {lost.stop - 1} of the log"
    assert any(text in one for one in window.coverage)


def give_up_last(directory: DataDirectory, frames: int) -> None:
    """Damage the last frames of ten messages each, and have the broker give them up."""
    log = open_log(Place(path=str(directory.path)), COMMIT_LOG)
    last = log.bounds().last_frame
    log.close()
    assert last is not None
    directory.close()
    lost = damage(directory, last[0] + 200 - 900 * (frames - 1), 900)
    assert len(lost) == 10 * frames
    directory.open()


def test_F40_P2_what_was_ingested_before_it_was_damaged_and_given_up_stays_and_news_come(
    spark: SparkSession, directory: DataDirectory, config: PipelineConfig
) -> None:
    directory.append(messages(MessageIds(1), 100), frame_records=10)
    ingest(spark, config)
    give_up_last(directory, frames=2)
    directory.append(messages(MessageIds(2), 30), frame_records=10)
    assert ingest(spark, config).rows["messages"] == 30
    assert sorted(row["sequence"] for row in rows_of(config.tables, MESSAGES)) == [*range(130)]


@pytest.mark.parametrize("frames", [1, 2])
def test_F40_P2_a_log_whose_last_frame_was_given_up_is_still_the_same(
    directory: DataDirectory, frames: int
) -> None:
    """The frame that was read last tells whether the log is still the same one, and it is not there any more."""
    directory.append(messages(MessageIds(1), 100), frame_records=10)
    options = {"path": str(directory.path), "quarantined": "pass"}
    first = LogStreamReader(parse_log_options(options))
    end = first.latestOffset(first.initialOffset())
    give_up_last(directory, frames)
    directory.append(messages(MessageIds(2), 30), frame_records=10)
    later = LogStreamReader(parse_log_options(options))
    news = later.partitions(end, later.latestOffset(end))
    assert sum(batch.num_rows for part in news for batch in later.read(part)) == 30


def test_F40_P1_a_query_of_what_is_in_quarantine_fails_and_names_it(
    spark: SparkSession, quarantined: tuple[DataDirectory, range]
) -> None:
    directory, lost = quarantined

    def read(**options: str) -> DataFrame:
        return spark.read.format("qmq").options(path=str(directory.path), **options).load()

    named = rf"in quarantine \(orders {lost.start} to {lost.stop - 1}\).*quarantined=pass"
    for table in ("messages", "log"):
        with pytest.raises(Exception, match=named):
            read(table=table).count()
    unknown = r"in quarantine \(it is not known which delayed messages were lost\)"
    with pytest.raises(Exception, match=unknown):
        read(table="scheduled").count()
    passed = {row["sequence"] for row in read(quarantined="pass", subject="orders").collect()}
    assert not passed & set(lost)
    assert lost.stop in passed
    assert read(subject="refunds").count() == 50


def test_F40_files_of_an_older_version_of_a_table_are_read_with_nulls(
    spark: SparkSession, directory: DataDirectory, config: PipelineConfig
) -> None:
    directory.append(messages(MessageIds(1), 20))
    write_bronze(config)
    (path,) = files_of(config.tables, LOG)
    older = pq.read_table(path, partitioning=None).drop_columns(["expires_at", "record_crc"])
    path.with_name(f".{path.name}.crc").unlink(missing_ok=True)
    pq.write_table(older, path)
    rows = Tables(spark, config.tables).read(LOG).collect()
    assert {row["record_crc"] for row in rows} == {None}
    assert rows[0].asDict().keys() == set(LOG.names)


def test_a_bit_that_a_disk_has_turned_in_a_table_is_reported_with_the_file_and_what_helps(
    spark: SparkSession, directory: DataDirectory, config: PipelineConfig
) -> None:
    directory.append(messages(MessageIds(1), 200))
    rows = spark.read.format("qmq").options(path=str(directory.path), table="log").load()
    BatchWriter(config, LOG)(rows, 0)
    (path,) = files_of(config.tables, LOG)
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)
    for crc in path.parent.glob(".*.crc"):
        crc.unlink()  # Hadoop's own, which would find it first
    with pytest.raises(Exception, match=r"FAILED_READ_FILE|checksum|CRC") as raised:
        Tables(spark, config.tables).read(LOG).toArrow()
    told = str(explain(raised.value, "jvm.log"))
    assert str(path) in told
    assert f"Remove the folder {config.tables}/bronze/log" in told


def test_what_spark_says_of_a_file_names_it_wherever_the_tables_are() -> None:
    missing = (
        "[FAILED_READ_FILE.FILE_NOT_EXIST] Encountered error while reading file "
        "file:///a%20b/silver/lifecycle/part=1/x.parquet. File does not exist."
    )
    told = damage_in_error(missing, "jvm.log")
    assert told is not None
    assert told.path == "/a b/silver/lifecycle/part=1/x.parquet"
    assert "Run this again" in told.remedy
    assert damage_in_error("something else", "jvm.log") is None
