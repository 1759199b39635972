"""Scans of an outbox are merged: few commits, however often it is scanned, and the audit sees what it saw."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import sqlalchemy as sa

from qmq_client.outbox.table import DEFAULT_TABLES, LIVE, SENT
from qmq_client.wire.message_id import MessageIds
from qmq_pipeline.jobs.audit_tallies import Tallies
from qmq_pipeline.jobs.audit_window import judged_window
from qmq_pipeline.jobs.ingest_outbox import ingest_outbox, last_scans
from qmq_pipeline.places.config import PipelineConfig
from qmq_pipeline.tables.commits import SCANNED_AT
from qmq_pipeline.tables.lake import Lake
from qmq_pipeline.tables.schemas import OUTBOX
from qmq_pipeline.work.workers import LocalWorkers
from tests.pipeline.world import START_MS, OutboxDatabase, messages

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_COLUMNS = tuple(name for name in OUTBOX.names if name != "scanned_at")


@pytest.fixture
def config(database: OutboxDatabase, tmp_path: Path) -> PipelineConfig:
    return PipelineConfig(
        tables=str(tmp_path / "merged"),
        databases=(database.section,),
        outbox_safety_s=0.0,
        merge_commits=4,
    )


def live(database: OutboxDatabase, draw: random.Random, number: int) -> None:
    """Some rows come in, some that were open are sent, some go."""
    rows = messages(MessageIds(number), draw.randint(0, 9), subjects=("a", "b"))
    for one in rows:
        state = draw.choice((LIVE, SENT))
        database.insert([one], state=state, created_at_ms=START_MS + 1_000 * number)
    outbox = DEFAULT_TABLES.outbox
    is_due = sa.text(f"(id + {number}) % 4 = 0")
    database.execute(sa.update(outbox).where(is_due).values(state=SENT, attempts=2))
    database.execute(sa.delete(outbox).where(sa.text(f"(id + {number}) % 9 = 0")))


def rows_of(config: PipelineConfig) -> list[dict[str, object]]:
    lake = Lake(config.tables)
    return [
        row
        for one in lake.ranges(OUTBOX)
        for file in one.files
        for batch in lake.read_file(OUTBOX, file.path, _COLUMNS)
        for row in batch.to_pylist()
    ]


def seen_by_the_audit(config: PipelineConfig) -> list[object]:
    def no_spark() -> SparkSession:
        raise AssertionError("a tally is missing")

    lake = Lake(config.tables)
    tallies = Tallies.read(no_spark, lake, judged_window(lake, config))
    counts, is_cut = tallies.words.committed()
    words = [tallies.words.producer.tolist(), tallies.words.word.tolist()]
    return [counts, np.asarray(is_cut).tolist(), *words, tallies.producers()[0].tolist()]


@pytest.mark.parametrize("seed", range(3))
def test_many_scans_leave_few_commits_and_the_same_rows_in_the_same_order(
    workers: LocalWorkers,
    database: OutboxDatabase,
    config: PipelineConfig,
    tmp_path: Path,
    seed: int,
) -> None:
    draw = random.Random(seed)
    plain = replace(config, tables=str(tmp_path / "plain"), merge_commits=99)
    for number in range(14):
        live(database, draw, number)
        assert ingest_outbox(workers, config) == ingest_outbox(workers, plain)
        assert sorted(map(repr, rows_of(config))) == sorted(map(repr, rows_of(plain)))
        assert seen_by_the_audit(config) == seen_by_the_audit(plain)
    assert len(Lake(plain.tables).commits(OUTBOX)) == 14
    assert len(Lake(config.tables).commits(OUTBOX)) <= 8
    assert any(row["state"] != "sent" for row in rows_of(config))


def test_the_newest_scan_stays_and_says_how_to_go_on(
    workers: LocalWorkers, database: OutboxDatabase, config: PipelineConfig
) -> None:
    for _ in range(20):
        ingest_outbox(workers, config)
    lake = Lake(config.tables)
    newest = lake.commits(OUTBOX)[-1]
    assert len(lake.commits(OUTBOX)) <= 4
    assert newest.ranges[-1].notes[SCANNED_AT] == last_scans(lake)["orders"]
    assert not newest.replaces


def test_rows_that_are_read_again_are_not_merged(
    workers: LocalWorkers, database: OutboxDatabase, config: PipelineConfig
) -> None:
    young = replace(config, outbox_safety_s=100 * 365 * 86_400.0)
    for number in range(8):
        database.insert(messages(MessageIds(number), 2), created_at_ms=START_MS)
        ingest_outbox(workers, young)
    assert len(Lake(config.tables).commits(OUTBOX)) == 8
    ingest_outbox(workers, config)
    ingest_outbox(workers, config)
    assert len(Lake(config.tables).commits(OUTBOX)) <= 3
    assert len(rows_of(config)) == 16


def test_merged_scans_stay_for_their_readers_and_go_later(
    workers: LocalWorkers, database: OutboxDatabase, config: PipelineConfig
) -> None:
    folder = Path(config.tables, "bronze", "outbox")
    for number in range(6):
        database.insert(messages(MessageIds(number), 2), created_at_ms=START_MS)
        ingest_outbox(workers, config)
    assert len(list(folder.glob("database=*/*.parquet"))) == 7
    ingest_outbox(workers, replace(config, merged_kept_s=-1.0))
    lake = Lake(config.tables)
    named = {file.path for one in lake.ranges(OUTBOX) for file in one.files}
    found = {str(one.relative_to(folder)) for one in folder.glob("database=*/*.parquet")}
    assert found == named
    assert lake.commit_names(OUTBOX) == {one.name for one in lake.commits(OUTBOX)}
    assert len(rows_of(config)) == 12


def test_a_row_that_stays_open_has_a_row_of_each_scan_and_the_key_tells_them_apart(
    workers: LocalWorkers, database: OutboxDatabase, config: PipelineConfig
) -> None:
    """The last one says how it was sent, although all numbers of then are behind the mark."""
    database.insert(messages(MessageIds(1), 3), state=LIVE, created_at_ms=START_MS)
    for _ in range(3):
        ingest_outbox(workers, config)
    database.execute(sa.update(DEFAULT_TABLES.outbox).values(state=SENT))
    ingest_outbox(workers, config)
    lake = Lake(config.tables)
    states = {
        tuple(row[name] for name in OUTBOX.key): row["state"]
        for one in lake.ranges(OUTBOX)
        for file in one.files
        for batch in lake.read_file(OUTBOX, file.path, OUTBOX.names)
        for row in batch.to_pylist()
    }
    assert list(states.values()) == ["live"] * 9 + ["sent"] * 3
