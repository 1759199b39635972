"""An archive holds what the log held: proven row by row when it is made, and read like the log."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pyarrow.parquet as pq
import pytest

from qmq_broker.storage.logs.frame_seek import LogRange
from qmq_client.wire.frame import FrameKind
from qmq_client.wire.message_id import MessageIds
from qmq_pipeline.errors import DamagedRangeError, ExpiredRangeError, LakeError, SourceError
from qmq_pipeline.jobs.archive import archive
from qmq_pipeline.jobs.audit import NOT_JUDGED, audit
from qmq_pipeline.jobs.ingest import ingest
from qmq_pipeline.places.config import PipelineConfig
from qmq_pipeline.places.options import Place
from qmq_pipeline.tables.lake import Lake
from qmq_pipeline.tables.schemas import MESSAGES, SCHEDULED
from qmq_pipeline.work.archive import archive_piece, verify_archived
from qmq_pipeline.work.ranges import TABLES_OF, ingest_range
from qmq_pipeline.work.workers import LocalWorkers
from tests.pipeline.world import FAR_MS, FORGETFUL, DataDirectory, messages

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from qmq_pipeline.tables.table import Table

SUBJECTS = ("orders", "flight.departed")


def load(spark: SparkSession, path: Path, **options: str) -> DataFrame:
    return spark.read.format("qmq").option("path", str(path)).options(**options).load()


def test_sealed_segments_are_archived_once_verified_and_read_like_the_log(
    spark: SparkSession, tmp_path: Path
) -> None:
    directory = DataDirectory(tmp_path / "broker", FORGETFUL)
    directory.append(messages(MessageIds(1), 1500, subjects=SUBJECTS), frame_records=20)
    folder = tmp_path / "archive"
    config = PipelineConfig(tables=str(folder), place=Place(path=str(directory.path)))
    done = archive(spark, config)
    sealed = done.next_offsets["commitlog"]
    assert sealed % FORGETFUL.segment_bytes == 0
    assert done.segments == sealed // FORGETFUL.segment_bytes >= 2
    assert done.verified == done.messages > 0
    assert archive(spark, config).segments == 0
    chosen = {"subject": "orders", "columns": "sequence,body,headers", "next_offset": str(sealed)}
    in_log = sorted(load(spark, directory.path, **chosen).collect())
    assert sorted(load(spark, folder, **chosen).collect()) == in_log
    assert in_log
    some = {**chosen, "next_offset": str(sealed // 2)}
    assert load(spark, folder, **some).count() == load(spark, directory.path, **some).count() > 0
    # What the log then gives up is there still, and the archive goes on behind it.
    directory.forget(segments=2)
    assert load(spark, folder).count() == done.messages
    directory.append(messages(MessageIds(2), 1500, subjects=SUBJECTS), frame_records=20)
    assert archive(spark, config).segments > 0
    directory.forget(segments=directory.store.written_offset // FORGETFUL.segment_bytes - 3)
    directory.append(messages(MessageIds(3), 4000, subjects=SUBJECTS), frame_records=20)
    directory.forget(segments=8)
    with pytest.raises(ExpiredRangeError, match="before they were archived"):
        archive(spark, config)
    directory.close()


@pytest.mark.parametrize("damage", ["altered", "missing"])
def test_an_archive_that_is_not_the_segment_is_found_before_it_counts(
    tmp_path: Path, damage: str
) -> None:
    directory = DataDirectory(tmp_path / "broker")
    directory.append(messages(MessageIds(1), 100))
    directory.close()
    lake = Lake(str(tmp_path / "archive"))
    place = Place(path=str(directory.path))
    after = directory.store.durable_offset
    facts = ingest_range(place, lake.root, "commitlog", LogRange(0, after))["messages"]
    assert verify_archived(lake, MESSAGES, facts) == {"verified": 100, "not_records": 0}
    path = tmp_path / "archive" / lake.folder(MESSAGES) / facts.files[0].path
    table = pq.read_table(path)
    if damage == "missing":
        changed = table.slice(1)
    else:
        keys = table["key"].to_pylist()
        keys[50] = "another"
        place_of_key = table.schema.get_field_index("key")
        changed = table.set_column(place_of_key, table.schema.field("key"), [keys])
    pq.write_table(changed, path)
    with pytest.raises(DamagedRangeError, match=r"differs|99 rows for 100 records"):
        verify_archived(lake, MESSAGES, facts)


def test_a_segment_with_an_altered_message_is_refused_by_its_name_and_no_disk_is_blamed(
    tmp_path: Path,
) -> None:
    directory = DataDirectory(tmp_path / "broker")
    every = messages(MessageIds(1), 40)
    directory.spoilt = {every[7].message_id}
    directory.append(every)
    directory.close()
    place = {"path": str(directory.path)}
    after = directory.store.durable_offset
    with pytest.raises(DamagedRangeError) as raised:
        archive_piece(place, str(tmp_path / "archive"), "commitlog", 0, after)
    said = str(raised.value)
    assert f"message {every[7].message_id.hex()} of {every[7].subject}" in said
    assert "no disk changed it" in said
    assert "check the disk" not in said


def test_messages_that_wait_for_their_time_are_verified_like_the_others(tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path / "broker")
    ids = MessageIds(1)
    later = [msgspec.structs.replace(one, due_at_ms=FAR_MS) for one in messages(ids, 20)]
    directory.append(later, kind=FrameKind.DELAYED)
    directory.append(messages(ids, 30))
    place, after = {"path": str(directory.path)}, directory.store.durable_offset
    directory.close()
    found = archive_piece(place, str(tmp_path / "archive"), "commitlog", 0, after)
    verified = {name: one["notes"].get("verified") for name, one in found.items()}
    assert verified == {"messages": 30, "scheduled": 20, "cancelled": None, "copies": None}


@pytest.fixture
def sealed(tmp_path: Path) -> Iterator[DataDirectory]:
    """Some whole segments and the beginning of another one, in each some messages that wait for their time."""
    directory = DataDirectory(tmp_path / "broker", FORGETFUL)
    come_in(directory, 1)
    yield directory
    directory.close()


def come_in(directory: DataDirectory, number: int) -> None:
    ids = MessageIds(number)
    for _ in range(10):
        directory.append(messages(ids, 150), frame_records=20)
        later = [msgspec.structs.replace(one, due_at_ms=FAR_MS) for one in messages(ids, 2)]
        directory.append(later, kind=FrameKind.DELAYED)


def offsets(folder: Path, table: Table) -> list[tuple[int, int]]:
    lake = Lake(str(folder))
    return sorted(
        (row["physical_offset"], row["record_number"])
        for one in lake.ranges(table)
        for file in one.files
        for batch in lake.read_file(table, file.path, ["physical_offset", "record_number"])
        for row in batch.to_pylist()
    )


def test_P2_an_archive_that_died_between_the_commits_of_two_tables_has_nothing_twice(
    sealed: DataDirectory, tmp_path: Path
) -> None:
    folder = tmp_path / "archive"
    config = PipelineConfig(tables=str(folder), place=Place(path=str(sealed.path)))
    with LocalWorkers(1) as workers:
        archive(workers, config)
        (last,) = (folder / "bronze" / "messages" / "_commits").glob("*-*.json")
        last.unlink()  # the one that says how far the archive goes is written last
        come_in(sealed, 2)
        done = archive(workers, config)
    end = done.next_offsets["commitlog"]
    whole = str(tmp_path / "whole")
    Lake(whole).prepare()
    at_once = ingest_range(Place(path=str(sealed.path)), whole, "commitlog", LogRange(0, end))
    for table in TABLES_OF["commitlog"]:
        Lake(whole).commit(table, [at_once[table.name]])
        assert offsets(folder, table) == offsets(Path(whole), table)
    assert len(offsets(folder, SCHEDULED)) > 20


def test_an_archive_takes_nothing_that_was_ingested_and_ingest_nothing_into_an_archive(
    sealed: DataDirectory, tmp_path: Path
) -> None:
    """Whoever wrote ranges that are no segments would have some rows twice, or rows that nobody verified."""
    place = Place(path=str(sealed.path))
    with LocalWorkers(1) as workers:
        for first, other, said in (
            (ingest, archive, "its tables were ingested.*a folder of its own"),
            (archive, ingest, "it is an archive.*a folder of its own"),
        ):
            config = PipelineConfig(tables=str(tmp_path / first.__name__), place=place)
            first(workers, config)
            before = Lake(config.tables).ranges(MESSAGES)
            come_in(sealed, len(before))
            with pytest.raises(LakeError, match=said):
                other(workers, config)
            assert Lake(config.tables).ranges(MESSAGES) == before
            first(workers, config)
            assert len(Lake(config.tables).ranges(MESSAGES)) > len(before)


def test_a_folder_of_tables_is_no_log_to_be_ingested_and_it_is_said_what_it_is_good_for(
    sealed: DataDirectory, tmp_path: Path
) -> None:
    folder = tmp_path / "archive"
    with LocalWorkers(1) as workers:
        archive(workers, PipelineConfig(tables=str(folder), place=Place(path=str(sealed.path))))
        config = PipelineConfig(tables=str(tmp_path / "t"), place=Place(path=str(folder)))
        for job in (ingest, archive):
            with pytest.raises(SourceError, match=r"folder of tables.*Give it as --tables"):
                job(workers, config)
    assert not (tmp_path / "t").exists()


def test_P4_an_audit_of_an_archive_says_that_nothing_could_be_judged(
    workers: LocalWorkers, tmp_path: Path
) -> None:
    directory = DataDirectory(tmp_path / "broker", FORGETFUL)
    directory.append(messages(MessageIds(1), 1500), frame_records=20)
    config = PipelineConfig(tables=str(tmp_path / "archive"), place=Place(path=str(directory.path)))
    assert archive(workers, config).segments > 0

    def nobody() -> SparkSession:
        raise AssertionError("there is no doubt")

    done = audit(nobody, config)
    assert (done.verdict, done.is_clean, done.stored) == (NOT_JUDGED, False, 0)
    assert any("archived and not ingested" in one for one in done.coverage)
    directory.close()
