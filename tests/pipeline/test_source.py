"""The formats `qmq` and `qmq_outbox` in Spark: rows, partitions, filters, streams."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from qmq_client.outbox.table import LIVE, SENT
from qmq_client.wire.message_id import MessageIds
from qmq_client.wire.record import Record, encode_record, record_crc
from qmq_pipeline.tables.schemas import MESSAGES
from tests.pipeline.streams import take_what_is_there
from tests.pipeline.world import START_MS, DataDirectory, OutboxDatabase, messages

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SUBJECTS = ("orders", "flight.departed", "flight.delayed")
COUNT = 2_000
#: Far smaller than anybody would choose, so that few messages make several partitions.
PARTITION_BYTES = 64 * 1024


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Record]]:
    """A data directory with messages of three subjects, and what they are."""
    directory = DataDirectory(tmp_path_factory.mktemp("source") / "broker")
    records = messages(MessageIds(5), COUNT, subjects=SUBJECTS)
    directory.append(records[: COUNT // 2], frame_records=30)
    directory.append(records[COUNT // 2 :], at_ms=START_MS + 60_000, frame_records=30)
    directory.close()
    return directory.path, records


def load(spark: SparkSession, path: Path, **options: str | int) -> DataFrame:
    reader = spark.read.format("qmq").option("path", str(path))
    for name, value in {"partition_bytes": PARTITION_BYTES, **options}.items():
        reader = reader.option(name, str(value))
    return reader.load()


def test_P1_every_message_is_one_row_and_a_second_reading_gives_the_same(
    spark: SparkSession, stored: tuple[Path, list[Record]]
) -> None:
    path, records = stored
    frame = load(spark, path)
    assert frame.columns == list(MESSAGES.names)
    assert frame.rdd.getNumPartitions() > 2
    rows = {(row["subject"], row["sequence"]): row for row in frame.collect()}
    assert len(rows) == COUNT
    seen: Counter[str] = Counter()
    for record in records:
        row = rows[record.subject, seen[record.subject]]
        seen[record.subject] += 1
        assert row["message_id"] == record.message_id.hex()
        assert (row["key"], row["tags"]) == (record.key, list(record.tags))
        assert (row["headers"], bytes(row["body"])) == (dict(record.headers), record.body)
    again = {(row["subject"], row["sequence"]): row for row in load(spark, path).collect()}
    assert again == rows


def test_columns_subject_and_times_are_chosen_by_options(
    spark: SparkSession, stored: tuple[Path, list[Record]]
) -> None:
    path, records = stored
    frame = load(
        spark,
        path,
        columns="message_id,subject",
        subject="orders,flight.delayed",
        since=START_MS + 60_000,
    )
    late = [one for one in records[COUNT // 2 :] if one.subject != "flight.departed"]
    assert frame.columns == ["message_id", "subject"]
    assert {row["message_id"] for row in frame.collect()} == {one.message_id.hex() for one in late}


def test_conditions_of_a_query_narrow_what_is_read_and_never_the_answer(
    spark: SparkSession, stored: tuple[Path, list[Record]]
) -> None:
    path, _ = stored
    everything = load(spark, path).collect()
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    frame = load(spark, path, pushdown="on")
    middle = everything[len(everything) // 2]["stored_at"]
    offset = everything[len(everything) // 2]["physical_offset"]
    try:
        found = frame.where("subject = 'orders' AND sequence < 100").count()
        assert found == 100
        assert frame.where("subject IN ('orders', 'nobody')").count() == sum(
            row["subject"] == "orders" for row in everything
        )
        assert frame.where(frame.stored_at >= middle).count() == sum(
            row["stored_at"] >= middle for row in everything
        )
        assert frame.where(f"physical_offset <= {offset}").count() == sum(
            row["physical_offset"] <= offset for row in everything
        )
    finally:
        spark.conf.set("spark.sql.python.filterPushdown.enabled", "false")


def test_a_wrong_option_is_said_by_name_before_anything_is_read(
    spark: SparkSession, stored: tuple[Path, list[Record]]
) -> None:
    from qmq_pipeline.spark.explain import explain

    with pytest.raises(Exception, match="Did you mean columns") as failed:
        load(spark, stored[0], colums="subject").collect()
    told = explain(failed.value, "jvm.log")
    assert type(told).__name__ == "OptionError"
    assert "\n" not in str(told)
    assert str(told).startswith("option of the source: colums")


def test_an_empty_log_is_an_empty_table(spark: SparkSession, tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path / "broker")
    directory.close()
    assert load(spark, directory.path).count() == 0
    assert load(spark, directory.path, table="actions").count() == 0


def test_the_outboxes_of_several_databases_are_one_table(
    spark: SparkSession, tmp_path: Path
) -> None:
    ids = MessageIds(3)
    rows = {}
    urls = []
    for name, state, count in [("orders", SENT, 50), ("payments", LIVE, 30)]:
        database = OutboxDatabase(tmp_path / f"{name}.db", name)
        rows[name] = messages(ids, count)
        database.insert(rows[name], state=state, created_at_ms=START_MS)
        urls.append(database.section.url)
        database.close()
    frame = (
        spark.read.format("qmq_outbox")
        .option("url", " ".join(urls))
        .option("partitionRows", "20")
        .load()
    )
    assert frame.rdd.getNumPartitions() == 5
    found = {row["message_id"]: row for row in frame.collect()}
    assert set(found) == {one.message_id.hex() for some in rows.values() for one in some}
    one = found[rows["payments"][0].message_id.hex()]
    assert (one["state"], one["subject"], one["producer"], one["counter"]) == (
        "live",
        "orders",
        3,
        50,
    )
    assert one["record_crc"] == record_crc(encode_record(rows["payments"][0]))
    assert one["created_at"].timestamp() * 1000 == START_MS


def test_a_stream_gives_every_message_once_in_bounded_batches_over_a_restart(
    spark: SparkSession, tmp_path: Path
) -> None:
    directory = DataDirectory(tmp_path / "broker")
    directory.append(messages(MessageIds(1), 1500), frame_records=20)

    def run(batches_min: int) -> None:
        frame = (
            spark.readStream.format("qmq")
            .option("path", str(directory.path))
            .option("columns", "sequence")
            .option("maxBytesPerTrigger", str(PARTITION_BYTES))
            .load()
        )
        assert len(take_what_is_there(frame, tmp_path)) >= batches_min

    run(batches_min=2)
    directory.append(messages(MessageIds(2), 100))
    run(batches_min=1)
    rows = spark.read.parquet(str(tmp_path / "out")).collect()
    assert sorted(row["sequence"] for row in rows) == list(range(1600))
    directory.close()
