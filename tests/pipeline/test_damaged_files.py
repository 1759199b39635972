"""A small file of the tables that a disk or other software has damaged: one line with its name and what to do, and
what that line says helps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest

from qmq_client.wire.message_id import MessageIds
from qmq_pipeline.errors import LakeError
from qmq_pipeline.jobs.audit import audit
from qmq_pipeline.jobs.ingest import ingest
from qmq_pipeline.jobs.lifecycle import lifecycle
from qmq_pipeline.jobs.marts import marts
from qmq_pipeline.places.config import PipelineConfig
from qmq_pipeline.spark.explain import explain
from qmq_pipeline.tables.commits import RangeFacts
from qmq_pipeline.tables.lake import Lake
from qmq_pipeline.tables.schemas import (
    AUDIT_RUN,
    DEAD_LETTERS,
    DELIVERIES,
    LIFECYCLE,
    MESSAGES,
    PRODUCERS,
)
from qmq_pipeline.tables.table import Table
from qmq_pipeline.work.tallies import tally_piece
from qmq_pipeline.work.workers import LocalWorkers
from tests.pipeline.exposed import a_world
from tests.pipeline.gold import shop
from tests.pipeline.rot import turn_a_bit
from tests.pipeline.rows import rows_of
from tests.pipeline.world import DataDirectory, messages

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "emptied": lambda _: b"",
    "torn": lambda content: content[: len(content) // 2],
    "zeros": lambda content: bytes(len(content)),
    "bits": lambda content: b"\xff" + content[1:],
    "another object": lambda _: b"{}",
    "no object": lambda _: b"[1]",
    "fields of another kind": lambda _: b'{"name": "a", "version": 1, "ranges": 5, "replaces": []}',
}


def nobody() -> SparkSession:
    raise AssertionError("there is nothing to read, and Spark was asked for")


def newest_commit(config: PipelineConfig, table: Table) -> Path:
    folder = Path(config.tables, Lake(config.tables).folder(table), "_commits")
    return max(path for path in folder.glob("*.json") if path.name != "_state.json")


@pytest.mark.parametrize("damage", _DAMAGES)
def test_a_damaged_commit_is_named_with_what_to_do_and_nothing_is_written(
    directory: DataDirectory, config: PipelineConfig, workers: LocalWorkers, damage: str
) -> None:
    directory.append(messages(MessageIds(1), 20))
    ingest(workers, config)
    commit = newest_commit(config, MESSAGES)
    whole = commit.read_bytes()
    directory.append(messages(MessageIds(2), 10))
    before = sorted(Path(config.tables).rglob("*"))
    commit.write_bytes(_DAMAGES[damage](whole))
    for job in (lambda: ingest(workers, config), lambda: Lake(config.tables).ranges(MESSAGES)):
        with pytest.raises(LakeError) as told:
            job()
        assert told.value.path == str(commit)
        assert "it is not as it was written" in str(told.value)
        assert "Restore it from a copy of this folder, or ingest into another one" in str(
            told.value
        )
    assert sorted(Path(config.tables).rglob("*")) == before
    commit.write_bytes(whole)
    assert ingest(workers, config).rows["messages"] == 10


@pytest.mark.parametrize("damage", ["emptied", "torn", "bits", "another object", "no object"])
def test_a_damaged_mark_of_the_folder_is_named_and_can_be_written_again(
    tmp_path: Path, damage: str
) -> None:
    lake = Lake(str(tmp_path / "tables"))
    lake.prepare()
    mark = tmp_path / "tables" / "LAKE"
    whole = mark.read_bytes()
    mark.write_bytes(_DAMAGES[damage](whole))
    with pytest.raises(LakeError) as told:
        lake.require()
    assert told.value.path == str(mark)
    assert f"write {whole.decode()} into the file" in str(told.value)
    mark.write_bytes(whole)
    lake.require()


def test_a_damaged_list_of_files_that_others_read_stops_the_sweep_that_would_remove_them(
    tmp_path: Path,
) -> None:
    lake = Lake(str(tmp_path))
    lake.prepare()
    lake.keep(DEAD_LETTERS, "delta", ["run=1/a.parquet"])
    listed = tmp_path / "gold" / "dead_letters" / "run=1" / "a.parquet"
    listed.parent.mkdir()
    listed.write_bytes(b"x")
    (kept,) = (tmp_path / "gold" / "dead_letters" / "_kept").iterdir()
    for content in (b"", b"{}"):
        kept.write_bytes(content)
        with pytest.raises(LakeError, match="run `qmq pipeline expose` before any other job"):
            lake.sweep(DEAD_LETTERS)
        assert listed.exists()


def test_a_damaged_state_and_a_damaged_audit_cost_no_more_than_themselves(
    directory: DataDirectory, config: PipelineConfig, workers: LocalWorkers
) -> None:
    directory.append(messages(MessageIds(1), 20))
    ingest(workers, config)
    state = Path(config.tables, "bronze", "messages", "_commits", "_state.json")
    state.write_bytes(b"")
    with pytest.raises(LakeError, match=r"_state\.json: .* Remove it: the next run writes it"):
        audit(nobody, config)
    state.unlink()
    ingest(workers, config)
    runs = [audit(nobody, config).run for _ in range(2)]
    commit = newest_commit(config, AUDIT_RUN)
    commit.write_bytes(b"")
    with pytest.raises(LakeError, match="only the result of that audit goes with it"):
        Lake(config.tables).newest(AUDIT_RUN)
    commit.unlink()
    left = Lake(config.tables).newest(AUDIT_RUN)
    assert left is not None
    assert left.name == runs[0]


def data_file(config: PipelineConfig, table: Table) -> Path:
    lake = Lake(config.tables)
    path = next(file.path for one in lake.ranges(table) for file in one.files if file.rows)
    return Path(config.tables, lake.folder(table), path)


def test_a_bit_that_a_disk_has_turned_is_told_whichever_column_it_is_in(
    directory: DataDirectory, config: PipelineConfig, workers: LocalWorkers
) -> None:
    directory.append(messages(MessageIds(1), 20))
    ingest(workers, config)
    file = data_file(config, MESSAGES)
    whole = file.read_bytes()
    group = pq.ParquetFile(file).metadata.row_group(0)
    columns = [group.column(number).path_in_schema for number in range(group.num_columns)]
    assert len(columns) >= len(MESSAGES.names)
    for column in columns:
        turn_a_bit(file, column)
        with pytest.raises(LakeError, match="it is not as it was written") as told:
            rows_of(config.tables, MESSAGES)
        assert told.value.path == str(file)
        assert "Restore it from a copy of this folder, or ingest into another one" in str(
            told.value
        )
        file.write_bytes(whole)
    assert len(rows_of(config.tables, MESSAGES)) == 20


def test_a_tally_is_not_made_anew_of_a_damaged_file(
    directory: DataDirectory, config: PipelineConfig, workers: LocalWorkers
) -> None:
    """With its old one, which was made when the file was whole, an audit needs none of the rows."""
    directory.append(messages(MessageIds(1), 20))
    ingest(workers, config)
    file = data_file(config, MESSAGES)
    turn_a_bit(file, "record_crc")
    assert audit(nobody, config).stored == 20
    path = f"{file.parent.name}/{file.name}"
    with pytest.raises(LakeError, match="it is not as it was written"):
        tally_piece(config.tables, MESSAGES.name, path)


@pytest.mark.parametrize("damage", ["it is not as it was written", "it is missing"])
def test_a_data_file_that_spark_cannot_read_is_named_with_what_helps(
    spark: SparkSession,
    directory: DataDirectory,
    config: PipelineConfig,
    workers: LocalWorkers,
    damage: str,
) -> None:
    config = replace(config, tables=f"{config.tables} [a folder] 100%25")
    directory.append(messages(MessageIds(1), 20))
    ingest(workers, config)
    lake, file = Lake(config.tables), data_file(config, MESSAGES)
    turn_a_bit(file, "sequence")
    rows = lake.read(spark, MESSAGES).selectExpr("sum(sequence)")
    if "missing" in damage:
        file.unlink()
    with pytest.raises(Exception, match="Encountered error while reading file") as raised:
        rows.collect()
    told = explain(raised.value, "the.log")
    assert isinstance(told, LakeError)
    assert told.path == str(file)
    assert damage in str(told)
    assert "estore it from a copy of this folder" in str(told)


@pytest.mark.parametrize("form", ["delta", "iceberg"])
def test_a_missing_file_is_not_exposed_and_what_was_exposed_stays(
    tmp_path: Path, form: str
) -> None:
    with a_world(tmp_path, tmp_path / "warehouse") as world:
        for first in (0, 10):
            file = world.write(
                MESSAGES, f"day=2026-01-31/{first}.parquet", range(first, first + 10)
            )
            facts = RangeFacts(
                source="store", first=first, next=first + 10, rows=file.rows, files=(file,)
            )
            world.lake.commit(MESSAGES, [facts])
            if not first:
                world.expose(form)
        missing = Path(world.lake.root, "bronze", "messages", file.path)
        missing.unlink()
        with pytest.raises(LakeError, match="it is missing, and a commit names it") as told:
            world.expose(form)
        assert told.value.path == str(missing)
        assert "If a file is still missing: restore it from a copy" in str(told.value)
        assert len(world.read(form, MESSAGES)) == 10


def test_what_spark_says_of_a_file_names_it_wherever_the_tables_are() -> None:
    for root, shown in (
        ("/data/my tables", "file:/data/my tables"),
        ("s3a://bucket/tables", "s3a://bucket/tables"),
    ):
        path = f"{root}/silver/lifecycle/run=1/part=a/b.parquet"
        said = f"[PATH_NOT_FOUND] Path does not exist: {path.replace(root, shown)}. SQLSTATE: 42K03"
        told = explain(RuntimeError(said), "the.log")
        assert isinstance(told, LakeError)
        assert told.path == path
        assert f"remove the folder {root}/silver/lifecycle: the next run makes" in str(told)


def test_a_damaged_derived_table_is_made_anew_when_its_folder_is_removed(
    spark: SparkSession, tmp_path: Path
) -> None:
    config = shop(tmp_path)
    with LocalWorkers(1) as workers:
        ingest(workers, config)
    lake = Lake(config.tables)
    lifecycle(spark, config)
    marts(spark, config)
    made_by = {DELIVERIES: lifecycle, LIFECYCLE: lifecycle, DEAD_LETTERS: marts, PRODUCERS: marts}
    before = {table.name: contents(lake, table) for table in made_by}
    assert all(before.values())
    for table, job in made_by.items():
        newest_commit(config, table).write_bytes(b"")
        folder = Path(config.tables, lake.folder(table))
        with pytest.raises(LakeError) as told:
            lake.newest(table)
        assert f"Remove the folder {folder}: the next run makes the table anew" in str(told.value)
        for path in sorted(folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        folder.rmdir()
        job(spark, config)
        assert {one.name: contents(lake, one) for one in made_by} == before, table.name


def contents(lake: Lake, table: Table) -> list[str]:
    """Its rows, in no order."""
    return sorted(map(repr, rows_of(lake.root, table)))
