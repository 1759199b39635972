"""The formats in a session that nobody told of them: Spark looks for packages named `pyspark_…` by itself."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from qmq_client.outbox.table import SENT
from qmq_client.wire.message_id import MessageIds
from qmq_pipeline.sources.register import register
from tests.pipeline.streams import take_what_is_there
from tests.pipeline.world import DataDirectory, OutboxDatabase, messages

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COUNT = 100


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    directory = DataDirectory(tmp_path / "broker")
    directory.append(messages(MessageIds(5), COUNT))
    directory.close()
    return directory.path


@pytest.fixture
def stranger(spark: SparkSession) -> SparkSession:
    """A session of the same JVM in which nothing is registered."""
    return spark.newSession()


def test_both_formats_are_there_in_a_session_that_nobody_told(
    stranger: SparkSession, stored: Path, tmp_path: Path
) -> None:
    database = OutboxDatabase(tmp_path / "orders.db")
    database.insert(messages(MessageIds(6), COUNT), state=SENT, created_at_ms=0)
    database.close()
    assert stranger.read.format("qmq").option("path", str(stored)).load().count() == COUNT
    rows = stranger.read.format("qmq_outbox").option("url", database.section.url).load()
    assert rows.count() == COUNT


def test_a_view_in_sql_uses_the_format(stranger: SparkSession, stored: Path) -> None:
    stranger.sql(
        f"CREATE TEMPORARY VIEW log USING qmq OPTIONS (path '{stored}', columns 'subject')"
    )
    (row,) = stranger.sql("SELECT COUNT(*) AS rows, COUNT(subject) AS subjects FROM log").collect()
    assert (row["rows"], row["subjects"]) == (COUNT, COUNT)


def test_a_stream_uses_the_format(stranger: SparkSession, stored: Path, tmp_path: Path) -> None:
    frame = stranger.readStream.format("qmq").option("path", str(stored)).load()
    assert sum(take_what_is_there(frame, tmp_path)) == COUNT


def test_registering_what_spark_has_found_changes_nothing(
    stranger: SparkSession, stored: Path
) -> None:
    reader = stranger.read.format("qmq").option("path", str(stored))
    assert reader.load().count() == COUNT
    register(stranger)
    assert reader.load().count() == COUNT
