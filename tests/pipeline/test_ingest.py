"""Bronze: exactly once under re-runs, crashes and twins; complete, or the job fails."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pyarrow.parquet as pq
import pytest

from qmq_broker.storage.logs.actions import Acked, Dead, GroupDefined, Nacked, Pulled
from qmq_broker.storage.logs.frame_seek import LogRange
from qmq_client.wire.deliveries import DeliveryRun
from qmq_client.wire.frame import FrameKind
from qmq_client.wire.message_id import MessageIds
from qmq_client.wire.record import Record
from qmq_pipeline.errors import ExpiredRangeError, IncompleteError, LakeError, SourceError
from qmq_pipeline.jobs.ingest import ingest
from qmq_pipeline.places.config import PipelineConfig
from qmq_pipeline.places.log import COMMIT_LOG
from qmq_pipeline.places.options import Place
from qmq_pipeline.places.places import open_log
from qmq_pipeline.tables.commits import RangeFacts
from qmq_pipeline.tables.lake import Lake
from qmq_pipeline.tables.schemas import ACTIONS, MESSAGES, SCHEDULED, TABLES
from qmq_pipeline.work.completeness import next_sequences
from qmq_pipeline.work.ranges import Runs, add_run, ingest_range
from tests.pipeline.world import FAR_MS, FORGETFUL, DataDirectory, messages

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SUBJECTS = ("orders", "flight.departed")


def config_of(
    directory: DataDirectory, tables: Path, *, ranges_per_commit: int = 64
) -> PipelineConfig:
    return PipelineConfig(
        tables=str(tables),
        place=Place(path=str(directory.path)),
        partition_bytes=64 * 1024,
        ranges_per_commit=ranges_per_commit,
    )


def keys(spark: SparkSession, tables: Path) -> list[tuple[str, int]]:
    rows = Lake(str(tables)).read(spark, MESSAGES).select("subject", "sequence").collect()
    return sorted((row["subject"], row["sequence"]) for row in rows)


def dense(count: int) -> list[tuple[str, int]]:
    return sorted((subject, number) for subject in SUBJECTS for number in range(count // 2))


def test_P2_runs_that_died_at_any_step_and_twins_add_nothing(
    spark: SparkSession, tmp_path: Path
) -> None:
    directory = DataDirectory(tmp_path / "broker")
    directory.append(messages(MessageIds(1), 2000, subjects=SUBJECTS), frame_records=50)
    config = config_of(directory, tmp_path / "tables", ranges_per_commit=2)
    assert config.place is not None
    log = open_log(config.place, COMMIT_LOG)
    bounds = log.bounds()
    ranges = log.ranges(bounds.first_offset, bounds.next_offset, config.partition_bytes)
    assert len(ranges) > 2
    Lake(config.tables).prepare()
    # A driver that died between the work of its tasks and its commit, and a twin of one task.
    ingest_range(config.place, config.tables, COMMIT_LOG, ranges[0])
    ingest_range(config.place, config.tables, COMMIT_LOG, ranges[0])
    # One that died in the middle of a range that is never cut so again.
    middle = LogRange(ranges[1].first_offset, ranges[2].next_offset)
    ingest_range(config.place, config.tables, COMMIT_LOG, middle)
    assert keys(spark, tmp_path / "tables") == []
    done = ingest(spark, config)
    assert done.rows["messages"] == 2000
    assert keys(spark, tmp_path / "tables") == dense(2000)
    # The same work once more by a task that Spark thought dead.
    ingest_range(config.place, config.tables, COMMIT_LOG, ranges[0])
    assert ingest(spark, config).rows == {}
    directory.append(messages(MessageIds(2), 500, subjects=SUBJECTS))
    assert ingest(spark, config).rows["messages"] == 500
    assert keys(spark, tmp_path / "tables") == dense(2500)
    log.close()
    directory.close()


def test_P2_a_run_that_died_between_the_commits_of_two_tables_adds_nothing_twice(
    spark: SparkSession, tmp_path: Path
) -> None:
    directory = DataDirectory(tmp_path / "broker")
    later = [replace_due(one) for one in messages(MessageIds(1), 30)]
    directory.append(later, kind=FrameKind.DELAYED)
    config = config_of(directory, tmp_path / "tables")
    ingest(spark, config)
    # The table that says how far the log was read commits last; this is what is there before.
    for path in (tmp_path / "tables" / "bronze" / "messages" / "_commits").glob("*.json"):
        path.unlink()
    directory.append(
        [replace_due(one) for one in messages(MessageIds(2), 20)], kind=FrameKind.DELAYED
    )
    assert ingest(spark, config).rows["scheduled"] == 50
    assert Lake(config.tables).read(spark, SCHEDULED).count() == 50
    directory.close()


def replace_due(record: Record) -> Record:
    return msgspec.structs.replace(record, due_at_ms=FAR_MS)


def test_files_hold_the_rows_of_a_subject_together(tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path / "broker")
    subjects = [f"s{number}" for number in range(4)]
    directory.append(messages(MessageIds(1), 30_000, subjects=subjects), frame_records=500)
    config = config_of(directory, tmp_path / "tables")
    assert config.place is not None
    whole = LogRange(0, directory.store.durable_offset)
    facts = ingest_range(config.place, config.tables, COMMIT_LOG, whole)[MESSAGES.name]
    (file,) = facts.files
    parquet = pq.ParquetFile(tmp_path / "tables" / "bronze" / "messages" / file.path)
    groups = [
        parquet.metadata.row_group(i).column(0).statistics for i in range(parquet.num_row_groups)
    ]
    assert [(one.min, one.max) for one in groups] == [(name, name) for name in subjects]
    sequences = parquet.read(["subject", "sequence"]).to_pylist()
    assert [row["sequence"] for row in sequences] == [*range(7_500)] * 4
    directory.close()


def test_files_have_dictionaries_of_what_repeats_and_statistics_of_all_but_bodies(
    tmp_path: Path,
) -> None:
    directory = DataDirectory(tmp_path / "broker")
    many = [
        msgspec.structs.replace(one, key="k", tags=("t",), headers=(("name", "value"),))
        for one in messages(MessageIds(1), 200)
    ]
    directory.append(many, frame_records=50)
    config = config_of(directory, tmp_path / "tables")
    assert config.place is not None
    whole = LogRange(0, directory.store.durable_offset)
    (file,) = ingest_range(config.place, config.tables, COMMIT_LOG, whole)[MESSAGES.name].files
    group = pq.ParquetFile(tmp_path / "tables" / "bronze" / "messages" / file.path).metadata
    columns = [group.row_group(0).column(i) for i in range(group.num_columns)]
    distinct = {"message_id", "counter", "sequence", "record_crc", "body"}
    assert {one.path_in_schema for one in columns if not one.has_dictionary_page} == distinct
    assert [one.path_in_schema for one in columns if not one.is_stats_set] == ["body"]
    directory.close()


def test_P3_a_hole_in_the_sequences_fails_and_names_it() -> None:
    def facts(first: int, after: int, *lost: tuple[int, int]) -> RangeFacts:
        return RangeFacts(
            source="s",
            first=0,
            next=1,
            rows=0,
            files=(),
            sequences={"a": [(first, after)]},
            lost={"a": lost} if lost else {},
        )

    assert next_sequences({}, [facts(0, 5), facts(5, 9)], is_from_start=True) == {"a": 9}
    assert next_sequences({"a": 3}, [facts(3, 5)], is_from_start=True) == {"a": 5}
    assert next_sequences({}, [facts(7, 9)], is_from_start=False) == {"a": 9}
    quarantined = facts(5, 9, (3, 5))
    assert next_sequences({"a": 3}, [quarantined], is_from_start=True) == {"a": 9}
    cases: list[tuple[dict[str, int], list[RangeFacts], bool, str]] = [
        ({}, [facts(1, 5)], True, "sequences 0 to 0 "),
        ({"a": 3}, [facts(5, 9)], True, "sequences 3 to 4 "),
        ({}, [facts(0, 5), facts(6, 9)], True, "sequences 5 to 5 "),
        ({}, [facts(0, 5), facts(4, 9)], True, "sequences 4 to 4 "),
    ]
    for known, ranges, is_from_start, hole in cases:
        with pytest.raises(IncompleteError, match=hole):
            next_sequences(known, ranges, is_from_start=is_from_start)


def test_P3_a_hole_within_one_range_is_two_runs_and_stays_a_hole() -> None:
    seen: Runs = {}
    for first, count in ((0, 5), (5, 2), (9, 1)):
        add_run(seen, "orders", first, count)
    assert seen == {"orders": [(0, 7), (9, 10)]}
    add_run(seen, "orders", 3, 1)
    assert seen["orders"][-1] == (3, 4)


def test_P3_behind_an_expired_gap_a_subject_begins_where_it_is_seen_first() -> None:
    def part(
        first: int, notes: dict[str, object], **sequences: list[tuple[int, int]]
    ) -> RangeFacts:
        return RangeFacts(
            source="one",
            first=first,
            next=first + 1,
            rows=1,
            files=(),
            sequences=sequences,
            notes=notes,
        )

    some = [
        part(0, {}, orders=[(0, 4)]),
        part(1, {"is_expired": True}),
        part(2, {}, orders=[(9, 12)], other=[(3, 5)]),
    ]
    assert next_sequences({}, some, is_from_start=True) == {"orders": 12, "other": 5}
    with pytest.raises(IncompleteError):
        next_sequences({}, [some[2]], is_from_start=True)


def test_P3_retention_that_passed_the_reader_fails_loudly_and_may_be_skipped_by_name(
    spark: SparkSession, tmp_path: Path
) -> None:
    directory = DataDirectory(tmp_path / "broker", FORGETFUL)
    config = config_of(directory, tmp_path / "tables")
    directory.append(messages(MessageIds(1), 400, subjects=SUBJECTS))
    assert ingest(spark, config).rows["messages"] == 400
    directory.append(messages(MessageIds(2), 3000, subjects=SUBJECTS))
    first_offset = directory.forget(segments=3)
    with pytest.raises(ExpiredRangeError, match=str(first_offset)):
        ingest(spark, config)
    assert keys(spark, tmp_path / "tables") == dense(400)
    done = ingest(spark, config, skip_expired=True)
    found = keys(spark, tmp_path / "tables")
    assert len(found) == 400 + done.rows["messages"]
    assert len(set(found)) == len(found)
    assert found[-1] == ("orders", 1699)
    directory.close()


def test_tables_of_another_store_or_of_a_restored_log_are_not_gone_on_with(
    spark: SparkSession, tmp_path: Path
) -> None:
    one, other = DataDirectory(tmp_path / "one"), DataDirectory(tmp_path / "other")
    for directory in (one, other):
        directory.append(messages(MessageIds(1), 50))
    ingest(spark, config_of(one, tmp_path / "tables"))
    with pytest.raises(SourceError, match=other.store.index._store_id.hex()):
        ingest(spark, config_of(other, tmp_path / "tables"))
    lake = Lake(str(tmp_path / "tables"))
    (last,) = lake.commits(MESSAGES)[-1].ranges
    offset, crc = last.notes["last_frame"]
    changed = {**last.notes, "last_frame": [offset, crc ^ 1]}
    lake.commit(MESSAGES, [replace(last, notes=changed)])
    with pytest.raises(SourceError, match="restored"):
        ingest(spark, config_of(one, tmp_path / "tables"))
    one.close()
    other.close()


def test_actions_are_rows_of_ranges(spark: SparkSession, tmp_path: Path) -> None:
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
    assert ingest(spark, config_of(directory, tmp_path / "tables")).rows["actions"] == 6
    rows = Lake(str(tmp_path / "tables")).read(spark, ACTIONS).orderBy("action_number").collect()
    assert [row["action"] for row in rows] == [
        *("groupdefined", "pulled", "pulled", "acked", "nacked", "dead"),
    ]
    assert [
        (row["first_sequence"], row["next_sequence"], row["first_pull"]) for row in rows[1:3]
    ] == [
        (0, 3, 0),
        (5, 7, 3),
    ]
    assert (rows[4]["error"], rows[5]["reason"]) == ("no stock", "attempts")
    directory.close()


def test_a_folder_of_another_version_is_refused_untouched(tmp_path: Path) -> None:
    (tmp_path / "LAKE").write_text('{"version": 9}')
    with pytest.raises(LakeError, match="version 9; known: 2"):
        Lake(str(tmp_path)).prepare()
    assert [path.name for path in tmp_path.iterdir()] == ["LAKE"]


def test_a_folder_with_other_things_in_it_is_refused_by_a_roundabout_name_too(
    tmp_path: Path,
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("mine")
    with pytest.raises(LakeError, match="other things"):
        Lake(f"{tmp_path}/not there/../full").prepare()
    assert [one.name for one in (tmp_path / "full").iterdir()] == ["letter.txt"]


def test_P2_a_second_run_on_the_same_tables_is_refused_at_once(tmp_path: Path) -> None:
    first, second = Lake(str(tmp_path / "tables")), Lake(str(tmp_path / "tables"))
    with first.writing(), pytest.raises(LakeError, match="another run"), second.writing():
        pass
    with second.writing():
        pass


def test_every_table_says_each_column_once_and_its_key() -> None:
    for table in TABLES.values():
        assert len(set(table.names)) == len(table.names)
        assert set(table.key) <= set(table.names)
        assert table.arrow().names == list(table.names)


def test_what_a_run_leaves_that_was_killed_when_it_made_the_folder_is_no_stranger(
    tmp_path: Path,
) -> None:
    (tmp_path / ".draft-0123").write_text('{"vers')
    Lake(str(tmp_path)).prepare()
    Lake(str(tmp_path)).require()
