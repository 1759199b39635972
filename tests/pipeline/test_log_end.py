"""Where a table of a log ends: found by names, and cleared of what a run left behind that died."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from qmq_broker.storage.logs.frame_seek import LogRange
from qmq_client.wire.frame import FrameKind
from qmq_client.wire.message_id import MessageIds
from qmq_pipeline.jobs.ingest import ingest
from qmq_pipeline.places.config import PipelineConfig
from qmq_pipeline.places.log import COMMIT_LOG
from qmq_pipeline.places.options import Place
from qmq_pipeline.tables.commits import Commit, RangeFacts
from qmq_pipeline.tables.lake import Lake
from qmq_pipeline.tables.log_end import LogEnd
from qmq_pipeline.tables.schemas import MESSAGES, SCHEDULED
from qmq_pipeline.tables.table import Table
from qmq_pipeline.work.ranges import TABLES_OF, ingest_range
from qmq_pipeline.work.workers import LocalWorkers
from tests.pipeline.object_store import object_store
from tests.pipeline.world import FAR_MS, DataDirectory, messages

BUCKET = "bucket"


def test_P2_an_ingest_looks_at_the_last_commit_alone_and_adds_what_came_since(
    tmp_path: Path,
) -> None:
    """So the hundred thousandth small run costs what the tenth did."""
    directory = DataDirectory(tmp_path / "broker")
    config = PipelineConfig(tables=str(tmp_path / "tables"), place=Place(path=str(directory.path)))
    lake = Lake(config.tables)
    with LocalWorkers(1) as workers:
        for number in range(12):
            directory.append(messages(MessageIds(number), 10))
            assert ingest(workers, config).rows["messages"] == 10
        ranges = lake.ranges(MESSAGES)
        assert LogEnd(lake, MESSAGES).last() == ranges[-1]
        commits = sorted(Path(config.tables).glob("bronze/*/_commits/*-*.json"))
        for commit in commits:
            if f"{ranges[-1].next:020d}" not in commit.name:
                commit.write_text("who reads this reads all of them")
        directory.append(messages(MessageIds(12), 10))
        assert ingest(workers, config).rows["messages"] == 10
        assert ingest(workers, config).rows == {}
    directory.close()


@pytest.mark.parametrize("commits", range(len(TABLES_OF[COMMIT_LOG])))
def test_P2_whichever_commit_a_run_dies_behind_the_next_run_has_all_rows_of_all_tables_once(
    tmp_path: Path, workers: LocalWorkers, monkeypatch: pytest.MonkeyPatch, commits: int
) -> None:
    """The table that says how far the log was read is never ahead of the others."""
    directory = DataDirectory(tmp_path / "broker")
    config = PipelineConfig(tables=str(tmp_path / "tables"), place=Place(path=str(directory.path)))
    ids = MessageIds(1)
    directory.append(messages(ids, 30))
    later = [msgspec.structs.replace(one, due_at_ms=FAR_MS) for one in messages(ids, 20)]
    directory.append(later, kind=FrameKind.DELAYED)
    commit, made = Lake.commit, list[str]()

    def dying(lake: Lake, table: Table, *given: Any, **more: Any) -> Commit:
        if len(made) == commits:
            raise InterruptedError
        made.append(table.name)
        return commit(lake, table, *given, **more)

    with monkeypatch.context() as here:
        here.setattr(Lake, "commit", dying)
        with pytest.raises(InterruptedError):
            ingest(workers, config)
    ingest(workers, config)
    lake = Lake(config.tables)
    rows = {table: sum(one.rows for one in lake.ranges(table)) for table in TABLES_OF[COMMIT_LOG]}
    assert (rows[MESSAGES], rows[SCHEDULED]) == (30, 20), made
    directory.close()


def test_P2_what_a_run_left_that_died_is_removed_and_nothing_else(tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path / "broker")
    config = PipelineConfig(tables=str(tmp_path / "tables"), place=Place(path=str(directory.path)))
    assert config.place is not None
    lake = Lake(config.tables)
    with LocalWorkers(1) as workers:
        directory.append(messages(MessageIds(1), 50))
        ingest(workers, config)
        before = files(tmp_path / "tables")
        (last,) = lake.ranges(MESSAGES)
        directory.append(messages(MessageIds(2), 50))
        behind = LogRange(last.next, directory.store.durable_offset)
        facts = ingest_range(config.place, config.tables, COMMIT_LOG, behind)
        lake.commit(SCHEDULED, [facts[SCHEDULED.name]])
        (written,) = facts[MESSAGES.name].files
        data = tmp_path / "tables" / "bronze" / "messages" / written.path
        data.with_name(".draft-0123").write_text("half")
        # Later by a day: the range that died went over midnight.
        later = data.parent.with_name("day=2999-01-01") / data.name
        later.parent.mkdir()
        later.write_bytes(data.read_bytes())
        assert LogEnd(lake, MESSAGES).last() == last
        assert LogEnd(lake, MESSAGES).clear_behind(last) == 4  # a tally is among them
        assert LogEnd(lake, SCHEDULED).clear_behind(last) == 0
        assert files(tmp_path / "tables") == before
        assert ingest(workers, config).rows["messages"] == 50
    directory.close()


def test_what_a_run_left_that_died_stays_where_a_listing_names_it(tmp_path: Path) -> None:
    """It was committed in one table and not in the one that says how far the log was read, and exposed then."""
    directory = DataDirectory(tmp_path / "broker")
    directory.append(messages(MessageIds(1), 40))
    directory.close()
    lake = Lake(str(tmp_path / "tables"))
    place, after = Place(path=str(directory.path)), directory.store.durable_offset
    (file,) = ingest_range(place, lake.root, COMMIT_LOG, LogRange(0, after))["messages"].files
    path = Path(lake.root, "bronze", "messages", file.path)
    lake.keep(MESSAGES, "delta", [file.path])
    LogEnd(lake, MESSAGES).clear_behind(None)
    assert path.exists()
    lake.keep(MESSAGES, "delta", [])
    LogEnd(lake, MESSAGES).clear_behind(None)
    assert not path.exists()


def test_a_table_without_commits_has_no_end_and_all_of_its_files_go(tmp_path: Path) -> None:
    lake = Lake(str(tmp_path / "tables"))
    end = LogEnd(lake, MESSAGES)
    assert (end.last(), end.clear_behind(None)) == (None, 0)
    day = tmp_path / "tables" / "bronze" / "messages" / "day=2026-01-31"
    day.mkdir(parents=True)
    (day / f"{0:020d}-{100:020d}.parquet").write_text("")
    assert LogEnd(lake, MESSAGES).clear_behind(None) == 1
    assert not list(day.iterdir())


@pytest.mark.parametrize("where", ["disk", "object store"])
def test_the_end_is_the_same_on_a_disk_and_in_an_object_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    (tmp_path / BUCKET).mkdir()
    with object_store(tmp_path) as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        lake = Lake(f"s3://{BUCKET}/tables" if where == "object store" else str(tmp_path / "here"))
        lake.prepare()
        paths = [f"day={day}/{n:020d}-{n + 1:020d}.parquet" for n, day in enumerate("112")]
        every = [lake.write_tallied(MESSAGES, path, ()) for path in paths]
        facts = [
            RangeFacts(source="s" * 32, first=n, next=n + 1, rows=0, files=(file,))
            for n, file in enumerate(every)
        ]
        for one in facts[:2]:
            lake.commit(MESSAGES, [one])
        assert LogEnd(lake, MESSAGES).last() == facts[1]
        assert LogEnd(lake, MESSAGES).clear_behind(facts[1]) == 2
        assert LogEnd(lake, MESSAGES).clear_behind(facts[0]) == 2
        assert lake.ranges(MESSAGES) == facts[:1]


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
