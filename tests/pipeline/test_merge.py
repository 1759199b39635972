"""Small files are merged: fewer files and commits, the same rows, whatever dies and whoever reads meanwhile."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import msgspec
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from qmq_broker.storage.logs.frame_seek import LogRange
from qmq_client.wire.frame import FrameKind
from qmq_client.wire.message_id import MessageIds
from qmq_pipeline.errors import LakeError
from qmq_pipeline.jobs.expose import expose
from qmq_pipeline.jobs.ingest import ingest
from qmq_pipeline.jobs.merge import merge
from qmq_pipeline.places.config import ExposeOptions, PipelineConfig
from qmq_pipeline.tables.commits import EXPIRED, MERGED_AT, RangeFacts
from qmq_pipeline.tables.lake import Lake
from qmq_pipeline.tables.lake_files import LakeFiles
from qmq_pipeline.tables.log_end import LogEnd
from qmq_pipeline.tables.merging import (
    between_gaps,
    counted_spans,
    merged_facts,
)
from qmq_pipeline.tables.schemas import ACTIONS, MESSAGES, SCHEDULED
from qmq_pipeline.tables.table import Table
from qmq_pipeline.tables.tallies import tally_path
from qmq_pipeline.work.fold import action_batches
from qmq_pipeline.work.merge import merge_piece
from qmq_pipeline.work.ranges import TABLES_OF, file_name, ingest_range
from qmq_pipeline.work.workers import LocalWorkers
from tests.pipeline.gold import pulled
from tests.pipeline.rot import turn_a_bit
from tests.pipeline.world import FAR_MS, DataDirectory, messages

DAY_MS = 24 * 3_600_000


@pytest.fixture
def config(config: PipelineConfig) -> PipelineConfig:
    return replace(config, merge_commits=4)


def come_in(directory: DataDirectory, number: int) -> None:
    """Something for most tables, some of it of another day."""
    born_ms = directory.clock.now_ms()
    of_both = messages(MessageIds(number), 10, subjects=("b", "a"), born_at_ms=born_ms)
    if number == 2:
        directory.spoilt.add(of_both[3].message_id)
    directory.append(of_both, at_ms=born_ms + (DAY_MS if number == 3 else 1_000))
    later = [
        msgspec.structs.replace(one, due_at_ms=FAR_MS)
        for one in messages(MessageIds(100 + number), 2, subjects=("b", "a"))
    ]
    directory.append(later, kind=FrameKind.DELAYED)
    directory.act([pulled(10 * number, 3, directory.clock.now_ms())])


def short_runs(
    workers: LocalWorkers, directory: DataDirectory, config: PipelineConfig, count: int
) -> None:
    for number in range(count):
        come_in(directory, number)
        ingest(workers, config)


def rows_of(config: PipelineConfig, table: Table) -> list[dict[str, object]]:
    lake = Lake(config.tables)
    rows = [
        row
        for one in lake.ranges(table)
        for file in one.files
        for batch in lake.read_file(table, file.path, table.names)
        for row in batch.to_pylist()
    ]
    return sorted(rows, key=lambda row: [str(row[name]) for name in table.key])


def data_files(config: PipelineConfig, table: Table) -> set[str]:
    folder = Path(config.tables, table.layer, table.name)
    found = (str(one.relative_to(folder)) for one in folder.glob("day=*/*.parquet"))
    return set(found)


def test_many_short_runs_leave_few_files_and_the_rows_of_one_long_run(
    workers: LocalWorkers, directory: DataDirectory, config: PipelineConfig, tmp_path: Path
) -> None:
    short_runs(workers, directory, config, 9)
    assert config.place is not None
    for log, tables in TABLES_OF.items():
        last = LogEnd(Lake(config.tables), tables[0]).last()
        assert last is not None
        whole = str(tmp_path / log)
        Lake(whole).prepare()
        at_once = ingest_range(config.place, whole, log, LogRange(0, last.next))
        for table in tables:
            lake = Lake(config.tables)
            assert len(lake.commits(table)) < 4
            (of_commits,) = between_gaps(lake.ranges(table))
            found = merged_facts(of_commits, ())
            notes = dict(found.notes)
            # What the driver notes for the next run.
            assert ("next_sequences" in notes) == (table is MESSAGES)
            notes.pop("next_sequences", None)
            assert replace(found, notes=notes) == replace(at_once[table.name], files=())
            Lake(whole).commit(table, [at_once[table.name]])
            other = replace(config, tables=whole)
            assert rows_of(config, table) == rows_of(other, table)
    assert len(rows_of(config, MESSAGES)) == 90
    assert len(rows_of(config, SCHEDULED)) == 18
    assert len(rows_of(config, ACTIONS)) == 9


def test_in_a_merged_file_rows_of_a_subject_stand_together_and_a_tally_beside_it(
    workers: LocalWorkers, directory: DataDirectory, config: PipelineConfig
) -> None:
    short_runs(workers, directory, config, 4)
    lake = Lake(config.tables)
    (facts,) = lake.ranges(MESSAGES)
    assert [file.path.partition("/")[0] for file in facts.files] == [
        "day=2025-10-09",
        "day=2025-10-10",
    ]
    path = Path(config.tables, "bronze", "messages", facts.files[0].path)
    read = pq.ParquetFile(path).read(["subject", "physical_offset"]).to_pydict()
    keys = list(zip(read["subject"], read["physical_offset"], strict=True))
    assert keys == sorted(keys)
    assert read["subject"][0] != read["subject"][-1]
    tally = lake.read_tally(MESSAGES, facts.files[0].path)
    assert tally is not None
    assert int(tally["rows"].sum()) == facts.files[0].rows == 30


def test_the_next_run_goes_on_behind_what_was_merged(
    workers: LocalWorkers, directory: DataDirectory, config: PipelineConfig
) -> None:
    short_runs(workers, directory, config, 4)
    (merged,) = Lake(config.tables).ranges(MESSAGES)
    assert LogEnd(Lake(config.tables), MESSAGES).last() is not None
    for path in Path(config.tables).glob("bronze/*/_commits/*.json"):
        if f"{0:020d}-" not in path.name and path.name != "_state.json":
            path.unlink()  # as if what was merged had been swept already
    assert LogEnd(Lake(config.tables), MESSAGES).last() == merged
    come_in(directory, 4)
    assert ingest(workers, config).rows["messages"] == 10
    assert [one.first for one in Lake(config.tables).ranges(MESSAGES)] == [0, merged.next]


def test_what_was_merged_stays_for_its_readers_and_goes_later(
    workers: LocalWorkers, directory: DataDirectory, config: PipelineConfig
) -> None:
    short_runs(workers, directory, config, 8)
    lake = Lake(config.tables)
    before = data_files(config, MESSAGES)
    assert len(before) > len(named(lake))
    rows = rows_of(config, MESSAGES)
    soon = replace(config, merged_kept_s=0.0)
    for number in range(8, 12):
        come_in(directory, number)
        ingest(workers, soon)
    assert len(rows_of(config, MESSAGES)) == len(rows) + 40
    assert data_files(config, MESSAGES) == named(lake)
    tallies = Path(config.tables, "bronze", "messages")
    assert all((tallies / tally_path(path)).exists() for path in named(lake))
    assert len(list(tallies.glob("_tallies/**/*.parquet"))) == len(named(lake))


def test_only_what_was_merged_long_ago_goes(
    workers: LocalWorkers, directory: DataDirectory, config: PipelineConfig
) -> None:
    short_runs(workers, directory, config, 4)
    first = data_files(config, MESSAGES)
    (merged,) = Lake(config.tables).commits(MESSAGES)
    folder = Path(config.tables, "bronze", "messages", "_commits")
    aged = {MERGED_AT: merged.notes[MERGED_AT] - 3 * 3_600_000}
    (folder / f"{merged.name}.json").write_text(replace(merged, notes=aged).to_json())
    for number in range(4, 8):
        come_in(directory, number)
        ingest(workers, config)
    left = data_files(config, MESSAGES)
    assert left & first == {file.path for file in merged.ranges[0].files}
    # The second one, and the four that it stands for.
    assert len(left - first) == 5
    assert len(rows_of(config, MESSAGES)) == 80


def named(lake: Lake) -> set[str]:
    return {file.path for one in lake.ranges(MESSAGES) for file in one.files}


def test_a_listing_of_delta_is_readable_before_and_after_and_its_files_are_not_swept(
    workers: LocalWorkers, directory: DataDirectory, config: PipelineConfig
) -> None:
    soon = replace(config, merged_kept_s=0.0)
    options = ExposeOptions(format="delta", tables=("messages",))
    for number in range(3):
        come_in(directory, number)
        ingest(workers, soon)
    expose(soon, options)
    for number in range(3, 8):
        come_in(directory, number)
        ingest(workers, soon)
    url = f"{config.tables}/bronze/messages"
    assert DeltaTable(url).to_pyarrow_table().num_rows == 30
    done = expose(soon, options).tables["messages"]
    assert (done.rows, done.added, done.removed) == (80, len(named(Lake(soon.tables))), 3)
    assert DeltaTable(url).to_pyarrow_table().num_rows == 80
    Lake(soon.tables).sweep(MESSAGES)
    assert data_files(soon, MESSAGES) == named(Lake(soon.tables))


def test_a_merge_that_dies_before_its_commit_changes_nothing_and_leaves_nothing(
    workers: LocalWorkers, directory: DataDirectory, config: PipelineConfig
) -> None:
    soon = replace(config, merged_kept_s=0.0)
    short_runs(workers, directory, replace(config, merge_commits=99), 3)
    lake = Lake(config.tables)
    ranges, rows = lake.ranges(MESSAGES), rows_of(config, MESSAGES)
    files = [asdict(file) for one in ranges for file in one.files]
    (left, *_) = merge_piece(config.tables, "messages", file_name(0, ranges[-1].next), files)
    assert left["path"] in data_files(config, MESSAGES)
    assert (lake.ranges(MESSAGES), rows_of(config, MESSAGES)) == (ranges, rows)
    for number in range(3, 12):
        come_in(directory, number)
        ingest(workers, soon)
    assert len(rows_of(config, MESSAGES)) == 120
    assert left["path"] not in data_files(config, MESSAGES)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_part_of_the_merged_is_swept_no_row_is_there_twice_or_missing(
    workers: LocalWorkers, directory: DataDirectory, config: PipelineConfig, seed: int
) -> None:
    """A sweep that is killed has removed some of the commits that count no more, in whatever order."""
    draw = random.Random(seed)
    lake, sequences = Lake(config.tables), []
    for number in range(14):
        come_in(directory, number)
        ingest(workers, replace(config, merge_commits=draw.choice((2, 2, 5))))
        sequences += [(subject, 5 * number + place) for subject in "ab" for place in range(5)]
        spans = LogEnd(lake, MESSAGES).spans()
        over = sorted(set(spans) - set(counted_spans(spans)))
        # Those alone that stand for others, which are still there; or any.
        merged = [
            one for one in over if any(one.first <= it.first < it.next < one.next for it in over)
        ]
        some = draw.sample(over, draw.randint(0, len(over)))
        for one in draw.choice((merged, merged, some, [])):
            Path(config.tables, "bronze", "messages", "_commits", f"{one.name}.json").unlink()
        found = [(row["subject"], row["sequence"]) for row in rows_of(config, MESSAGES)]
        assert sorted(map(repr, found)) == sorted(map(repr, sequences))


class SweptFiles(LakeFiles):
    """Something happens to a table right before its second commit is read."""

    def __init__(self, root: str, happens: Callable[[], object]) -> None:
        super().__init__(root)
        self._happens = happens
        self._reads = 0

    def read_text(self, path: str) -> str | None:
        self._reads += 1
        if self._reads == 2:
            self._happens()
        return super().read_text(path)


def test_a_reader_beside_a_merge_and_a_sweep_finds_the_commits_that_count(
    workers: LocalWorkers, directory: DataDirectory, config: PipelineConfig
) -> None:
    short_runs(workers, directory, replace(config, merge_commits=99), 5)
    lake = Lake(config.tables)

    def merge_and_sweep() -> None:
        assert merge(workers, config, lake, MESSAGES) == 5
        lake.sweep(MESSAGES)

    beside = Lake(config.tables, SweptFiles(config.tables, merge_and_sweep))
    (found,) = beside.commits(MESSAGES)
    assert sum(one.rows for one in found.ranges) == 50


def test_what_expired_unread_stays_by_itself(workers: LocalWorkers, config: PipelineConfig) -> None:
    lake = Lake(config.tables)
    lake.prepare()
    gap = {1: {EXPIRED: True}}
    for number in range(4):
        facts = RangeFacts(
            source="s" * 32,
            first=number,
            next=number + 1,
            rows=0,
            files=(),
            notes=gap.get(number, {"last_frame": [number, 7]}),
        )
        lake.commit(MESSAGES, [facts])
    assert merge(workers, config, lake, MESSAGES) == 4
    (commit,) = lake.commits(MESSAGES)
    assert [(one.first, one.next, dict(one.notes)) for one in commit.ranges] == [
        (0, 1, {"last_frame": [0, 7]}),
        (1, 2, {EXPIRED: True}),
        (2, 4, {"last_frame": [3, 7]}),
    ]
    assert commit.notes[MERGED_AT] > 0


def test_a_fold_goes_on_in_the_middle_of_what_was_merged(
    workers: LocalWorkers, directory: DataDirectory, config: PipelineConfig
) -> None:
    short_runs(workers, directory, replace(config, merge_commits=99), 4)
    lake = Lake(config.tables)
    offsets = [one.first for one in lake.ranges(ACTIONS)]
    merge(workers, config, lake, ACTIONS)
    (merged,) = lake.ranges(ACTIONS)

    def folded(first: int, after: int) -> int:
        return sum(batch.num_rows for batch in action_batches(lake, first, after))

    assert folded(0, merged.next) == folded(0, 2**62) == 4
    assert folded(offsets[2], merged.next) == 2
    assert folded(offsets[1], offsets[2]) == 1
    assert folded(merged.next, 2**62) == 0


@pytest.mark.parametrize("damage", ["missing", "another bit", "other rows"])
def test_a_file_that_is_not_what_its_commit_says_ends_the_merge_and_nothing_is_lost(
    workers: LocalWorkers, directory: DataDirectory, config: PipelineConfig, damage: str
) -> None:
    short_runs(workers, directory, replace(config, merge_commits=99), 4)
    lake = Lake(config.tables)
    before = lake.commits(MESSAGES)
    path = Path(config.tables, "bronze", "messages", before[1].ranges[0].files[0].path)
    if damage == "missing":
        path.unlink()
        said = "it is missing, and a commit names it"
    elif damage == "another bit":
        turn_a_bit(path, "sequence")
        said = "it is not as it was written .* ingest into another one"
    else:
        pq.write_table(pq.ParquetFile(path).read().slice(1), path)
        said = "has other rows than its commit says"
    with pytest.raises(LakeError, match=said):
        merge(workers, config, lake, MESSAGES)
    assert lake.commits(MESSAGES) == before
