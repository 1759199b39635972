"""Bronze: exactly once under re-runs, crashes and twins; complete, or the job fails."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pytest
import sqlalchemy as sa

from qmq_client.group.actions import Acked, Dead, GroupDefined, Nacked, Pulled
from qmq_client.outbox.table import DEFAULT_TABLES, LIVE, SENT
from qmq_client.wire.deliveries import DeliveryRun
from qmq_client.wire.frame import FrameKind
from qmq_client.wire.message_id import MessageIds
from qmq_pipeline.errors import IncompleteError, OptionError, TablesError, TablesInUseError
from qmq_pipeline.jobs.batches import BatchWriter
from qmq_pipeline.jobs.ingest import ingest
from qmq_pipeline.places.config import PipelineConfig
from qmq_pipeline.places.options import Place
from qmq_pipeline.spark.explain import explain
from qmq_pipeline.spark.frames import arrow_frame
from qmq_pipeline.tables.schemas import ACTIONS, LOG, MESSAGES, OUTBOX, SCHEDULED, SPANS, TABLES
from qmq_pipeline.tables.store import Tables
from tests.pipeline.bronze import write_bronze
from tests.pipeline.rows import files_of, rows_of
from tests.pipeline.world import (
    FAR_MS,
    FORGETFUL,
    HOUR_MS,
    START_MS,
    DataDirectory,
    OutboxDatabase,
    messages,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SUBJECTS = ("orders", "flight.departed")
PART = 16 * 1024


def config_of(directory: DataDirectory, tables: Path) -> PipelineConfig:
    return PipelineConfig(
        tables=str(tables), place=Place(path=str(directory.path)), part_bytes=PART
    )


def keys(tables: str | Path) -> list[tuple[str, int]]:
    return sorted((row["subject"], row["sequence"]) for row in rows_of(tables, MESSAGES))


def dense(count: int) -> list[tuple[str, int]]:
    return sorted((subject, number) for subject in SUBJECTS for number in range(count // 2))


def test_P2_batches_that_are_repeated_after_a_driver_died_add_nothing_and_each_part_is_one_file(
    spark: SparkSession, tmp_path: Path
) -> None:
    directory = DataDirectory(tmp_path / "broker")
    due = [
        msgspec.structs.replace(one, due_at_ms=FAR_MS)
        for one in messages(MessageIds(3), 30, subjects=SUBJECTS)
    ]
    directory.append(messages(MessageIds(1), 1000, subjects=SUBJECTS), frame_records=50)
    directory.append(due, kind=FrameKind.DELAYED)
    config = config_of(directory, tmp_path / "tables")
    done = ingest(spark, config)
    assert (done.rows["messages"], done.rows["scheduled"]) == (1000, 30)
    log = Path(config.tables) / "bronze" / "log"
    kept = tmp_path / "checkpoint"
    shutil.copytree(log / "_checkpoint", kept)
    directory.append(messages(MessageIds(2), 500, subjects=SUBJECTS), frame_records=50)
    assert ingest(spark, config).rows["messages"] == 500
    assert keys(config.tables) == dense(1500)
    # The driver died when everything was written, and before Spark noted that.
    shutil.rmtree(log / "_checkpoint")
    shutil.copytree(kept, log / "_checkpoint")
    ingest(spark, config)
    assert keys(config.tables) == dense(1500)
    assert len(rows_of(config.tables, SCHEDULED)) == 30
    parts = Counter(one.parent for one in files_of(config.tables, LOG))
    assert len(parts) > 4
    assert set(parts.values()) == {1}
    assert ingest(spark, config).rows == {}
    directory.close()


def test_a_table_that_somebody_deleted_is_read_again(spark: SparkSession, tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path / "broker")
    directory.append(messages(MessageIds(1), 100, subjects=SUBJECTS))
    config = config_of(directory, tmp_path / "tables")
    ingest(spark, config)
    shutil.rmtree(Path(config.tables) / "bronze")
    assert ingest(spark, config).rows["messages"] == 100
    assert keys(config.tables) == dense(100)
    directory.close()


def write_rows(spark: SparkSession, config: PipelineConfig, *rows: dict[str, Any]) -> None:
    """One batch of the stream of the log. No log has a hole, so these rows come from none."""
    every = [dict.fromkeys(LOG.names) | one for one in rows]
    table = pa.Table.from_pylist(every, schema=LOG.arrow())
    BatchWriter(config, LOG)(arrow_frame(spark, table), 0)


def orders(part: int, *sequences: int) -> list[dict[str, Any]]:
    kind = {"subject": "orders", "kind": "message", "part": part}
    return [{**kind, "sequence": one} for one in sequences]


def test_P3_a_hole_in_the_sequences_fails_and_names_it(spark: SparkSession, tmp_path: Path) -> None:
    config = PipelineConfig(tables=str(tmp_path / "tables"))
    write_rows(spark, config, *orders(0, 0, 1, 2))
    write_rows(spark, config, *orders(1, 3, 4))
    with pytest.raises(IncompleteError, match="orders: sequences 6 to 6 are missing"):
        write_rows(spark, config, *orders(1, 3, 4, 5, 7))
    write_rows(spark, config, *orders(1, 3, 4))
    with pytest.raises(IncompleteError, match="orders: sequences 5 to 6 are missing"):
        write_rows(spark, config, *orders(2, 7, 8))
    spans = {row["part"]: row["next_sequence"] for row in rows_of(config.tables, SPANS)}
    assert spans[0] == 3


def test_P3_what_expired_unread_is_no_hole_in_this_batch_or_the_next_and_others_behind_it_are(
    spark: SparkSession, tmp_path: Path
) -> None:
    config = PipelineConfig(tables=str(tmp_path / "tables"))
    write_rows(spark, config, *orders(0, 0, 1, 2))
    expired = {"kind": "expired", "part": 0, "physical_offset": 3, "count": 6}
    write_rows(spark, config, *orders(0, 0, 1, 2), expired, *orders(1, 9, 10))
    write_rows(spark, config, *orders(1, 9, 10, 11))
    with pytest.raises(IncompleteError, match="orders: sequences 12 to 12 are missing"):
        write_rows(spark, config, *orders(1, 9, 10, 11), *orders(2, 13))


def test_P3_retention_that_passed_the_reader_fails_loudly_and_may_be_skipped_by_name(
    spark: SparkSession, tmp_path: Path
) -> None:
    directory = DataDirectory(tmp_path / "broker", FORGETFUL)
    config = config_of(directory, tmp_path / "tables")
    directory.append(messages(MessageIds(1), 400, subjects=SUBJECTS))
    assert ingest(spark, config).rows["messages"] == 400
    directory.append(messages(MessageIds(2), 3000, subjects=SUBJECTS))
    first_offset = directory.forget(segments=3)
    with pytest.raises(Exception, match="retention") as raised:
        ingest(spark, config)
    told = explain(raised.value, "")
    assert type(told).__name__ == "ExpiredRangeError"
    assert str(first_offset) in str(told)
    assert keys(config.tables) == dense(400)
    done = ingest(spark, config, skip_expired=True)
    found = keys(config.tables)
    assert len(found) == 400 + done.rows["messages"]
    assert len(set(found)) == len(found)
    assert found[-1] == ("orders", 1699)
    (gap,) = rows_of(config.tables, LOG, kind="expired")
    assert gap["physical_offset"] + gap["count"] == first_offset
    directory.append(messages(MessageIds(4), 10, subjects=SUBJECTS))
    assert ingest(spark, config).rows["messages"] == 10
    assert rows_of(config.tables, LOG, kind="expired") == [gap], "it stays noted"
    directory.close()


def test_actions_are_rows_of_ranges(tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path / "broker")
    directory.append(messages(MessageIds(1), 10))
    at_ms = directory.clock.now_ms()
    runs = (DeliveryRun(0, 3, 1), DeliveryRun(5, 2, 2))
    directory.act(
        [
            GroupDefined(at_ms, "orders", "billing", 0, 5),
            Pulled(at_ms, "orders", "billing", "c1", 1, 0, runs, at_ms + 30_000),
            Acked(at_ms + 5, "orders", "billing", "c1", 0, 2),
            Nacked(at_ms + 6, "orders", "billing", "c1", 2, 3, at_ms + 1000, "no stock"),
            Dead(at_ms + 7, "orders", "billing", 5, 2, "attempts", "no stock"),
        ]
    )
    config = config_of(directory, tmp_path / "tables")
    assert write_bronze(config).rows["actions"] == 6
    rows = sorted(rows_of(config.tables, ACTIONS), key=lambda row: int(row["action_number"]))
    kinds = ["groupdefined", "pulled", "pulled", "acked", "nacked", "dead"]
    assert [row["action"] for row in rows] == kinds
    places = [(row["first_sequence"], row["next_sequence"], row["first_pull"]) for row in rows]
    assert places[1:3] == [(0, 3, 0), (5, 7, 3)]
    assert (rows[4]["error"], rows[5]["reason"]) == ("no stock", "attempts")
    directory.close()


def test_P4_a_row_of_an_outbox_comes_again_when_it_changes_and_one_that_is_gone_does_not(
    spark: SparkSession, tmp_path: Path
) -> None:
    database = OutboxDatabase(tmp_path / "orders.db")
    config = PipelineConfig(
        tables=str(tmp_path / "tables"), databases=(database.section,), outbox_safety_s=0
    )
    sent, live, gone = (messages(MessageIds(number), 2) for number in (1, 2, 3))
    database.insert(sent, created_at_ms=START_MS)
    for some in (live, gone):
        database.insert(some, created_at_ms=START_MS, state=LIVE)
    assert ingest(spark, config).outbox == {"orders": 6}
    outbox = DEFAULT_TABLES.outbox
    is_first = outbox.c.message_id == live[0].message_id
    kept_until_ms = FAR_MS
    database.execute(sa.update(outbox).where(is_first).values(state=SENT, due_at_ms=kept_until_ms))
    ids = [one.message_id for one in gone]
    database.execute(sa.delete(outbox).where(outbox.c.message_id.in_(ids)))
    assert ingest(spark, config).outbox == {"orders": 2}
    database.execute(sa.delete(outbox))
    database.insert(messages(MessageIds(4), 3), created_at_ms=START_MS + HOUR_MS)
    assert ingest(spark, config).outbox == {"orders": 3}, "their numbers were given out again"
    rows = Counter((row["message_id"], row["state"]) for row in rows_of(config.tables, OUTBOX))
    assert rows[live[0].message_id.hex(), "sent"] == 1
    assert rows[live[1].message_id.hex(), "live"] == 2
    assert {rows[one.message_id.hex(), "sent"] for one in sent} == {1}
    database.close()


@pytest.mark.parametrize("name", ["t[1]", "ä b%20"])
def test_spark_reads_the_folder_that_is_named_and_none_that_its_name_would_match(
    spark: SparkSession, directory: DataDirectory, tmp_path: Path, name: str
) -> None:
    directory.append(messages(MessageIds(1), 20))
    for one in ("t1", name):
        ingest(spark, config_of(directory, tmp_path / one))
    rows = Tables(spark, str(tmp_path / name)).read(LOG).where("kind = 'message'")
    assert sorted(row["sequence"] for row in rows.collect()) == [*range(20)]


def test_a_folder_with_other_things_in_it_is_refused_untouched(
    spark: SparkSession, tmp_path: Path
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("mine")
    tables = Tables(spark, f"{tmp_path}/not there/../full")
    with (
        pytest.raises(TablesError, match="holds files other than tables of qmq"),
        tables.writing("bronze"),
    ):
        pass
    assert [one.name for one in (tmp_path / "full").iterdir()] == ["letter.txt"]


def test_P2_a_second_run_on_the_same_tables_is_refused_at_once(
    spark: SparkSession, directory: DataDirectory, config: PipelineConfig
) -> None:
    with Tables(spark, config.tables).writing("bronze"):
        with pytest.raises(TablesInUseError, match="another run"):
            ingest(spark, config)
        with Tables(spark, config.tables).writing("silver"):
            pass
    with Tables(spark, config.tables).writing("bronze"):
        pass


def test_a_format_without_its_connector_is_a_wrong_call_with_what_to_do(
    spark: SparkSession, config: PipelineConfig
) -> None:
    delta = replace(config, table_format="delta")
    with pytest.raises(OptionError, match=r"no connector for it.*--packages"):
        ingest(spark, delta)
    with pytest.raises(OptionError, match="--namespace"):
        replace(config, table_format="iceberg")
    with pytest.raises(OptionError, match="parquet, delta, iceberg"):
        replace(config, table_format="orc")


def test_a_catalog_has_the_tables_that_it_is_told_of(
    spark: SparkSession, directory: DataDirectory, config: PipelineConfig
) -> None:
    directory.append(messages(MessageIds(1), 20))
    spark.sql("CREATE DATABASE IF NOT EXISTS shop")
    ingest(spark, replace(config, namespace="shop"))
    assert spark.sql("SELECT COUNT(*) FROM shop.log WHERE kind = 'message'").collect()[0][0] == 20
    spark.sql("DROP DATABASE shop CASCADE")


def test_every_table_says_each_column_once_and_its_key() -> None:
    for table in TABLES.values():
        assert len(set(table.names)) == len(table.names)
        assert set(table.key) <= set(table.names)
        assert table.names[len(table.names) - len(table.partitions) :] == table.partitions
        assert table.arrow().names == list(table.names)
