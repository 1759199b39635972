"""The format `qmq_outbox` as a stream: rows that are new, and those again that changed."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import sqlalchemy as sa

from qmq_client.outbox.table import DEFAULT_TABLES, LIVE, SENT, create_tables
from qmq_client.settings.sections import DatabaseSection
from qmq_client.wire.message_id import MessageIds
from qmq_pipeline.errors import OptionError
from qmq_pipeline.places.outbox_options import parse_outbox_options
from qmq_pipeline.rows.outbox import (
    ScanMark,
    batches,
    first_and_next_id,
    id_ranges,
    plan_scan,
)
from qmq_pipeline.sources.outbox_stream import Offset, OutboxStreamReader
from tests.pipeline.streams import take_what_is_there
from tests.pipeline.world import FAR_MS, START_MS, OutboxDatabase, messages, outbox_rows
from tests.services.databases import Database

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OUTBOX = DEFAULT_TABLES.outbox
IDS = OUTBOX.c.id
#: Made in the future, a row is young until the test says otherwise.
YOUNG_MS = FAR_MS


def grow_old(database: OutboxDatabase) -> None:
    """Every row is old enough from here on."""
    database.execute(sa.update(OUTBOX).values(created_at_ms=START_MS))


def with_one_under_way(path: Path, name: str = "orders") -> OutboxDatabase:
    """Rows 1 to 5 are old, 7 is young; 6 was taken by a transaction that has not ended."""
    database = OutboxDatabase(path / f"{name}.db", name)
    database.insert(messages(MessageIds(1), 5), created_at_ms=START_MS)
    database.insert(messages(MessageIds(2), 1), created_at_ms=YOUNG_MS)
    database.execute(sa.update(OUTBOX).where(IDS == 6).values(id=7))
    return database


def commit_late(database: OutboxDatabase) -> None:
    """Row 6 commits behind row 7."""
    database.execute(sa.update(OUTBOX).where(IDS == 7).values(id=8))
    database.insert(messages(MessageIds(3), 1), created_at_ms=YOUNG_MS)
    database.execute(sa.update(OUTBOX).where(IDS == 9).values(id=6))
    database.execute(sa.update(OUTBOX).where(IDS == 8).values(id=7))


def reader_of(*databases: OutboxDatabase, **options: str) -> OutboxStreamReader:
    urls = " ".join(one.section.url for one in databases)
    return OutboxStreamReader(parse_outbox_options({"url": urls, **options}, {}, ["row_id"]))


def test_no_scan_comes_past_a_number_whose_transaction_is_under_way(
    a_server_database: Database,
) -> None:
    engine = a_server_database.engine()
    create_tables(engine)
    section = DatabaseSection(name="orders", url=a_server_database.url)

    def insert(connection: sa.Connection, producer: int, at_ms: int) -> None:
        connection.execute(sa.insert(OUTBOX), outbox_rows(messages(MessageIds(producer), 1), at_ms))

    with engine.begin() as connection:
        insert(connection, 1, START_MS)
    with engine.connect() as slow, engine.connect() as quick:
        insert(slow, 2, YOUNG_MS)
        insert(quick, 3, YOUNG_MS)
        quick.commit()
        first, last = quick.execute(sa.select(IDS).order_by(IDS)).scalars()
        assert last == first + 2
        scan = plan_scan(section, ScanMark(), safety_ms=1_000)
        assert (scan.next_id, scan.end_id) == (first + 1, last + 1)
        slow.commit()
        quick.execute(sa.update(OUTBOX).values(created_at_ms=START_MS))
        quick.commit()
    again = plan_scan(section, scan, safety_ms=1_000)
    assert (again.first_id, again.next_id, again.end_id) == (first + 1, last + 1, last + 1)
    assert first_and_next_id(section)[:2] == (first, last + 1)
    found = batches(section, first_id=first + 1, next_id=last + 1, scanned_at_ms=START_MS)
    assert [batch["row_id"].to_pylist() for batch in found] == [[first + 1, last]]


def test_a_stream_gives_every_row_and_those_again_that_are_young_open_or_sent_since(
    spark: SparkSession, tmp_path: Path
) -> None:
    database = with_one_under_way(tmp_path)
    database.execute(sa.update(OUTBOX).where(IDS == 2).values(state=LIVE))

    def run() -> list[int]:
        frame = (
            spark.readStream.format("qmq_outbox")
            .schema("row_id LONG, message_id STRING")
            .option("url", database.section.url)
            .load()
        )
        return take_what_is_there(frame, tmp_path)

    assert run() == [6]
    commit_late(database)
    assert run() == [1 + 2], "row 2 is open; 6 and 7 may be new"
    grow_old(database)
    database.execute(sa.update(OUTBOX).values(state=SENT))
    assert run() == [2], "rows 6 and 7; all others were sent before the last scan"
    rows = spark.read.parquet(str(tmp_path / "out")).collect()
    assert {row["row_id"] for row in rows} == set(range(1, 8))
    database.close()


def test_a_database_that_is_added_begins_at_its_first_row_and_one_that_goes_is_left_out(
    tmp_path: Path,
) -> None:
    orders, payments = (OutboxDatabase(tmp_path / f"{name}.db") for name in ("orders", "payments"))
    for number, database in enumerate((orders, payments)):
        database.insert(messages(MessageIds(number + 1), 9), created_at_ms=START_MS)
    one = reader_of(orders)
    begin = one.latestOffset(one.initialOffset())
    both = reader_of(payments, orders)
    here, given = read_on(both, begin)
    assert (sorted(here), given) == (["orders", "payments"], list(range(1, 10)))
    orders.insert(messages(MessageIds(3), 1), created_at_ms=START_MS)
    after, given = read_on(one, here)
    assert (sorted(after), given) == (["orders"], [10])
    orders.close()
    payments.close()


def test_with_available_now_a_query_makes_one_scan(tmp_path: Path) -> None:
    database = OutboxDatabase(tmp_path / "orders.db")
    database.insert(messages(MessageIds(1), 3), created_at_ms=START_MS)
    reader = reader_of(database)
    reader.prepareForTriggerAvailableNow()
    first = reader.latestOffset(reader.initialOffset())
    database.insert(messages(MessageIds(2), 3), created_at_ms=START_MS)
    assert reader.latestOffset(first) == first
    database.close()


def read_on(reader: OutboxStreamReader, here: Offset) -> tuple[Offset, list[int]]:
    """One micro-batch from here on: where the next one begins, and the numbers of its rows."""
    after = reader.latestOffset(here)
    found = [reader.read(one) for one in reader.partitions(here, after)]
    return after, [row for rows in found for batch in rows for row in batch["row_id"].to_pylist()]


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("partitionRow", "5", "Did you mean partition_rows"),
        ("partitionRows", "0", "a number from 1 to .* in rows, in digits"),
        ("safety_s", "10m", "a number from 0 to .* in seconds, in digits"),
    ],
    ids=["unknown", "bound", "safety"],
)
def test_a_wrong_option_of_a_stream_is_said_before_a_database_is_asked(
    option: str, value: str, told: str
) -> None:
    with pytest.raises(OptionError, match=told):
        parse_outbox_options({"url": "sqlite:///nowhere.db", option: value}, {}, ["row_id"])


@pytest.mark.parametrize("option", ["url", "database"])
def test_a_database_that_nobody_knows_is_reported_by_the_option_that_names_it(option: str) -> None:
    with pytest.raises(OptionError, match=f"^option {option}: ordres is not known;"):
        parse_outbox_options({option: "ordres"}, {}, ["row_id"])


def test_a_wrong_option_is_said_before_the_stream_is_started(spark: SparkSession) -> None:
    source = spark.readStream.format("qmq_outbox").option("url", "sqlite:///nowhere.db")
    with pytest.raises(Exception, match="Did you mean partition_rows"):
        source.option("partitionRow", "5").load()


def test_wide_gaps_of_numbers_make_ranges_wider_and_not_more() -> None:
    ranges = id_ranges(5, 5_000_000_000, 20)
    assert len(ranges) <= 1_000
    assert (ranges[0][0], ranges[-1][1]) == (5, 5_000_000_000)
    assert all(one[1] == other[0] for one, other in pairwise(ranges))
