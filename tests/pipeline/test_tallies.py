"""Tallies follow from their files: made with them, made again when they are missing, and gone when their files go."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sqlalchemy as sa

from qmq_client.outbox.table import DEFAULT_TABLES, LIVE, SENT
from qmq_client.wire.message_id import MessageIds
from qmq_pipeline.jobs.audit import NOT_JUDGED, audit
from qmq_pipeline.jobs.ingest import ingest
from qmq_pipeline.jobs.ingest_outbox import ingest_outbox
from qmq_pipeline.places.config import AuditOptions, PipelineConfig
from qmq_pipeline.places.options import Place
from qmq_pipeline.tables.commits import RangeFacts
from qmq_pipeline.tables.lake import Lake
from qmq_pipeline.tables.schemas import MESSAGES, OUTBOX, SCHEDULED, table_named
from qmq_pipeline.tables.tallies import AUDITED, Columns, Tallying, tally_columns, tally_path
from qmq_pipeline.work.outbox import scan_piece
from qmq_pipeline.work.tallies import tally_piece
from tests.pipeline.world import START_MS, DataDirectory, OutboxDatabase, messages

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def rows_of(table_name: str, seed: int) -> list[pa.RecordBatch]:
    """Random rows, some ids twice, some next to the ends of what a counter can be."""
    draw = random.Random(seed)
    schema = table_named(table_name).arrow(AUDITED[table_name].columns)
    at = partial(draw.randrange, 10**15)
    near = draw.choice((0, -300, 2**63 - 400, -(2**63)))
    kinds: dict[str, Callable[[], object]] = {
        "producer": lambda: draw.choice((1, -7, 2**62)),
        "counter": lambda: near + draw.randrange(300),
        "record_crc": lambda: draw.choice((None, draw.getrandbits(32))),
        "state": lambda: draw.choice(("live", "parked", "sent")),
        "due_at": lambda: draw.choice((None, draw.randrange(10**15))),
        "now_due_at": lambda: draw.choice((None, draw.randrange(10**15))),
    }
    return [
        pa.RecordBatch.from_pylist(
            [
                {name: kinds.get(name, at)() for name in schema.names}
                for _ in range(draw.randrange(200))
            ],
            schema=schema,
        )
        for _ in range(3)
    ]


def told(tally: Columns) -> tuple[int, dict[tuple[int, int], int], int]:
    """What does not hang on how rows are put together: rows, ids of each producer and word, and contents."""
    bits: dict[tuple[int, int], int] = {}
    contents = 0
    for producer, word, some, one in zip(
        *(tally[name].tolist() for name in ("producer", "word", "bits", "contents")), strict=True
    ):
        bits[producer, word] = bits.get((producer, word), 0) | (some % 2**64)
        contents ^= one
    return int(tally["rows"].sum()), bits, contents


@pytest.mark.parametrize("name", sorted(AUDITED))
def test_a_tally_has_the_ids_and_times_of_all_rows_in_whatever_batches_they_come(name: str) -> None:
    for seed in range(20):
        batches = rows_of(name, seed)
        tallying = Tallying(table_named(name))
        for batch in batches:
            tallying.add(batch)
        tally = tally_columns(tallying.tally())
        rows = [row for batch in batches for row in batch.to_pylist()]
        bits: dict[tuple[int, int], int] = {}
        for row in rows:
            key = row["producer"], row["counter"] >> 6
            bits[key] = bits.get(key, 0) | 1 << (row["counter"] & 63)
        again = Tallying(table_named(name))
        again.add(pa.Table.from_batches(batches).combine_chunks().to_batches()[0])
        whole = told(tally_columns(again.tally()))
        assert told(tally) == whole == (len(rows), bits, whole[2]), seed
        assert (tally["last_at"] - tally["first_at"]).max() < 10_000_000
        if name == OUTBOX.name:
            apart = sum(row["state"] != "sent" for row in rows)
            assert tally["rows"][tally["is_apart"]].sum() == apart


def test_contents_tell_of_every_bit_of_a_checksum_and_of_who_has_it() -> None:
    def contents(crcs: tuple[int | None, ...]) -> int:
        tallying = Tallying(MESSAGES)
        schema = MESSAGES.arrow(AUDITED[MESSAGES.name].columns)
        rows = [
            {"producer": 1, "counter": number, "record_crc": crc, "stored_at": 0, "due_at": None}
            for number, crc in enumerate(crcs)
        ]
        tallying.add(pa.RecordBatch.from_pylist(rows, schema=schema))
        (found,) = tallying.tally()["contents"].to_pylist()
        return int(found)

    sound = (5, 9, 77)
    others: list[tuple[int | None, ...]] = [(5 ^ 1 << bit, 9, 77) for bit in range(32)]
    others += [(9, 5, 77), (77, 9, 5), (None, 9, 77), (5, 9)]
    assert contents(sound) == contents((5, 9, 77))
    assert len({contents(one) for one in [sound, *others]}) == 1 + len(others)


def test_a_tally_that_is_missing_damaged_or_of_another_version_is_made_from_the_file(
    tmp_path: Path,
) -> None:
    lake = Lake(str(tmp_path))
    batches = rows_of(SCHEDULED.name, 3)
    lake.write_tallied(SCHEDULED, "day=1/a.parquet", batches)
    path = tmp_path / "bronze" / "scheduled" / tally_path("day=1/a.parquet")
    sound = lake.read_tally(SCHEDULED, "day=1/a.parquet")
    assert sound is not None
    assert told(sound)[0] == sum(batch.num_rows for batch in batches)
    data = path.read_bytes()
    for damage in (b"", data[: len(data) // 2], bytes(len(data))):
        path.write_bytes(damage)
        assert lake.read_tally(SCHEDULED, "day=1/a.parquet") is None
    path.rename(path.with_name("b.parquet"))
    assert lake.read_tally(SCHEDULED, "day=1/a.parquet") is None
    tally_piece(lake.root, SCHEDULED.name, "day=1/a.parquet")
    again = lake.read_tally(SCHEDULED, "day=1/a.parquet")
    assert again is not None
    assert told(again) == told(sound)


def test_P2_a_sweep_takes_the_tallies_of_files_that_no_commit_names_and_those_of_other_versions(
    tmp_path: Path,
) -> None:
    lake = Lake(str(tmp_path))
    lake.prepare()
    batches = rows_of(MESSAGES.name, 4)
    kept, left = (
        lake.write_tallied(MESSAGES, f"day=1/{name}.parquet", batches) for name in ("kept", "left")
    )
    lake.commit(MESSAGES, [RangeFacts(source="s", first=0, next=1, rows=kept.rows, files=(kept,))])
    folder = tmp_path / "bronze" / "messages"
    older = folder / "_tallies" / "0" / kept.path
    older.parent.mkdir(parents=True)
    older.write_bytes(b"of an older version")
    assert lake.sweep(MESSAGES) == 3
    names = {str(one.relative_to(folder)) for one in folder.rglob("*.parquet")}
    assert names == {kept.path, tally_path(kept.path)}
    assert left.path not in names


def test_P2_a_scan_that_is_done_twice_has_two_files_each_with_the_tally_of_its_own_rows(
    tmp_path: Path,
) -> None:
    database = OutboxDatabase(tmp_path / "orders.db")
    lake = Lake(str(tmp_path / "tables"))
    ids, files = MessageIds(1), []
    for _ in range(2):  # a row comes in between the task and its twin
        database.insert(messages(ids, 5), created_at_ms=START_MS)
        answer = scan_piece(
            section=msgspec.to_builtins(database.section),
            tables=lake.root,
            first=0,
            after=100,
            scanned_at_ms=START_MS,
            ids=[],
            known=[],
        )
        files += answer["files"]
    database.close()
    assert [one["rows"] for one in files] == [5, 10]
    for one in files:
        rows = sum(batch.num_rows for batch in lake.read_file(OUTBOX, one["path"], ["row_id"]))
        tally = lake.read_tally(OUTBOX, one["path"])
        assert tally is not None
        assert rows == one["rows"] == tally["rows"].sum()


def test_P4_a_young_row_that_was_seen_as_sent_is_written_again_only_when_it_changed(
    tmp_path: Path,
) -> None:
    database = OutboxDatabase(tmp_path / "orders.db")
    lake = Lake(str(tmp_path / "tables"))
    known: list[str] = []
    sent, waiting = (messages(MessageIds(number), 4) for number in (1, 2))
    database.insert(sent, created_at_ms=START_MS)
    database.insert(waiting, created_at_ms=START_MS, state=LIVE)

    def seen(scan: int) -> list[tuple[int, str]]:
        answer = scan_piece(
            section=msgspec.to_builtins(database.section),
            tables=lake.root,
            first=0,
            after=100,
            scanned_at_ms=START_MS + scan,
            ids=[],
            known=list(known),
        )
        (file,) = answer["files"]
        known.append(file["path"])
        rows = pq.read_table(tmp_path / "tables" / "bronze" / "outbox" / file["path"])
        return list(zip(rows["row_id"].to_pylist(), rows["state"].to_pylist(), strict=True))

    outbox = DEFAULT_TABLES.outbox
    still_open = [(number, "live") for number in range(5, 9)]
    assert seen(1) == [(1, "sent"), (2, "sent"), (3, "sent"), (4, "sent"), *still_open]
    assert seen(2) == still_open
    database.execute(sa.update(outbox).where(outbox.c.id == 5).values(state=SENT))
    database.execute(sa.update(outbox).where(outbox.c.id == 2).values(record=b"other"))
    database.execute(sa.update(outbox).where(outbox.c.id == 3).values(state=LIVE))
    assert seen(3) == [(2, "sent"), (3, "live"), (5, "sent"), *still_open[1:]]
    database.execute(sa.update(outbox).where(outbox.c.id == 3).values(state=SENT))
    assert seen(4) == [(3, "sent"), *still_open[1:]], "it was open when it was seen last"
    assert seen(5) == still_open[1:]
    database.close()


def test_P4_tables_that_were_written_without_tallies_are_audited_and_their_tallies_made_once(
    spark: SparkSession, tmp_path: Path
) -> None:
    directory, database = DataDirectory(tmp_path / "broker"), OutboxDatabase(tmp_path / "orders.db")
    every = messages(MessageIds(5), 300, born_at_ms=START_MS)
    database.insert(every, created_at_ms=START_MS)
    directory.append(every[1:], at_ms=START_MS + 500)
    directory.close()
    config = PipelineConfig(
        tables=str(tmp_path / "tables"),
        place=Place(path=str(directory.path)),
        databases=(database.section,),
        audit=AuditOptions(until_ms=START_MS + 100_000),
    )
    ingest_outbox(spark, config)
    ingest(spark, config)
    database.close()
    bronze = tmp_path / "tables" / "bronze"
    tallies = {path: pq.read_table(path) for path in bronze.glob("*/_tallies/**/*.parquet")}
    assert {path.relative_to(bronze).parts[0] for path in tallies} == {"messages", "outbox"}
    for path in tallies:
        path.unlink()
    first = audit(spark, config)
    again = {path: path.stat().st_mtime_ns for path in bronze.glob("*/_tallies/**/*.parquet")}
    assert {path: pq.read_table(path) for path in again} == tallies
    second = audit(spark, config)
    assert {path: path.stat().st_mtime_ns for path in again} == again
    assert first.findings == second.findings == {**dict.fromkeys(first.findings, 0), "lost": 1}
    assert (second.committed, second.stored) == (300, 299)


def test_an_audit_of_tables_without_a_row_is_not_clean_and_says_what_it_could_not_judge(
    tmp_path: Path,
) -> None:
    def no_spark() -> SparkSession:
        raise AssertionError("there is no row to look at")

    lake = Lake(str(tmp_path))
    lake.prepare()
    done = audit(no_spark, PipelineConfig(tables=str(tmp_path)))
    assert (done.verdict, done.is_clean, done.committed, done.stored) == (NOT_JUDGED, False, 0, 0)
    assert len(done.coverage) == 2
