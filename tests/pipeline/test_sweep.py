"""What a sweep of a table's folder leaves alone, and what it does not leave."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from qmq_client.wire.message_id import MessageIds
from qmq_pipeline.jobs.audit import audit
from qmq_pipeline.jobs.ingest import ingest
from qmq_pipeline.places.config import PipelineConfig
from qmq_pipeline.tables.lake import Lake
from qmq_pipeline.tables.schemas import AUDIT_FINDINGS, AUDIT_RUN, DEAD_LETTERS
from qmq_pipeline.work.workers import LocalWorkers
from tests.pipeline.exposed import a_world
from tests.pipeline.world import DataDirectory, messages

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_a_warehouse_in_the_folder_of_a_table_stays(tmp_path: Path) -> None:
    warehouse = tmp_path / "tables" / DEAD_LETTERS.layer / DEAD_LETTERS.name / "warehouse"
    with a_world(tmp_path, warehouse) as world:
        for run in ("1", "2"):
            world.parts(DEAD_LETTERS, run, {"a": range(10)})
            world.expose("iceberg")
        world.parts(DEAD_LETTERS, "3", {"a": range(4)})
        assert len(world.read("iceberg", DEAD_LETTERS)) == 10
        world.expose("iceberg")
        assert len(world.read("iceberg", DEAD_LETTERS)) == 4


def test_files_that_no_writer_of_the_tables_makes_stay(tmp_path: Path) -> None:
    with a_world(tmp_path, tmp_path / "warehouse") as world:
        world.parts(DEAD_LETTERS, "1", {"a": range(10)})
        folder = Path(world.lake.root, world.lake.folder(DEAD_LETTERS))
        note, left = folder / "notes" / "about.md", folder / "run=0" / "left.parquet"
        draft = folder / "_commits" / ".draft-of-a-run-that-was-killed"
        for path in (note, left, draft):
            path.parent.mkdir(exist_ok=True)
            path.write_text("x")
        assert world.lake.sweep(DEAD_LETTERS) == 2
        assert note.exists()
        assert not left.exists()
        assert not draft.exists()
        assert world.committed(DEAD_LETTERS)


def test_of_rebuilt_tables_no_empty_folders_pile_up(tmp_path: Path) -> None:
    with a_world(tmp_path, tmp_path / "warehouse") as world:
        folder = Path(world.lake.root, world.lake.folder(DEAD_LETTERS))
        other = folder / "notes" / "empty"
        killed = folder / "run=0" / "_temporary" / "0"
        for path in (other, killed):
            path.mkdir(parents=True)
        for run in range(1, 6):
            world.parts(DEAD_LETTERS, str(run), {"a": range(run), "b": range(3)})
        assert sorted(path.name for path in folder.glob("run=*")) == ["run=4", "run=5"]
        assert other.exists()
        assert len(world.committed(DEAD_LETTERS)) == 8


def nobody() -> SparkSession:
    raise AssertionError("there is no doubt, and Spark was asked for")


def left_by_a_killed_audit(config: PipelineConfig, run: str) -> list[Path]:
    """What there is between the first file of an audit and its commits."""
    root = Path(config.tables, "audit")
    paths = [
        root / "audit_findings" / f"run={run}" / "part-0.parquet",
        root / "audit_findings" / f"run={run}" / "_temporary" / "0" / "part-1.parquet",
        root / "audit_run" / f"{run}.parquet",
    ]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    return paths


def test_an_audit_removes_what_killed_ones_left_and_nothing_of_the_others(
    directory: DataDirectory, config: PipelineConfig, workers: LocalWorkers
) -> None:
    directory.append(messages(MessageIds(1), 20))
    ingest(workers, config)
    runs = [audit(nobody, config).run]
    left = left_by_a_killed_audit(config, "20260101T000000.000000Z")
    runs.append(audit(nobody, config).run)
    assert not any(path.exists() for path in left)
    assert not left[0].parent.exists()
    lake = Lake(config.tables)
    for table in (AUDIT_RUN, AUDIT_FINDINGS):
        assert [one.name for one in lake.commits(table)] == runs
    for commit in lake.commits(AUDIT_RUN):
        for file in commit.ranges[0].files:
            assert Path(config.tables, lake.folder(AUDIT_RUN), file.path).exists()


def test_an_audit_beside_another_one_leaves_alone_what_that_has_not_committed_yet(
    directory: DataDirectory, config: PipelineConfig, workers: LocalWorkers
) -> None:
    directory.append(messages(MessageIds(1), 20))
    ingest(workers, config)
    with Lake(config.tables).adding_runs(AUDIT_FINDINGS, AUDIT_RUN):
        begun = left_by_a_killed_audit(config, "20260101T000000.000000Z")
        audit(nobody, config)
        assert all(path.exists() for path in begun)
    audit(nobody, config)
    assert not any(path.exists() for path in begun)
