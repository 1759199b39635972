"""Merges what many scans of an outbox leave, as `merge.py` does for the logs.

Each scan is a commit, with a file if rows were new, changed or open. Scans are merged if none of
their rows will be read again by number, that is if all are below the mark of the newest scan. The
newest is never merged: it says which rows are open and where to continue.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Final
from uuid import uuid4

from qmq_client.clock import SYSTEM_CLOCK
from qmq_pipeline.jobs.merge import MERGE_WORK
from qmq_pipeline.places.config import PipelineConfig
from qmq_pipeline.sources.tasks import run_tasks
from qmq_pipeline.tables.commits import (
    MERGED_AT,
    SCANNED_AT,
    SCANNED_UNTIL,
    Commit,
    DataFile,
    RangeFacts,
)
from qmq_pipeline.tables.lake import Lake
from qmq_pipeline.tables.merging import Span, mergeable
from qmq_pipeline.tables.schemas import OUTBOX

if TYPE_CHECKING:
    from qmq_pipeline.sources.tasks import Workers

_DIGITS: Final = 20


def merge_scans(
    workers: Workers, config: PipelineConfig, lake: Lake, database: str, *, mark: int
) -> int:
    """Merge small scans of a database; by how many they shrank. Requires: the caller is the tables' only writer."""
    every = lake.commits(OUTBOX)
    commits = {one.name: one for one in _settled(every, database, mark)}
    rows = [sum(one.rows for one in commit.ranges) for commit in commits.values()]
    spans = [
        Span(sum(rows[:number]), sum(rows[: number + 1]), name)
        for number, name in enumerate(commits)
    ]
    wanted = mergeable(spans, commits_min=config.merge_commits, bytes_enough=config.merged_rows)
    for some in wanted:
        _merge(workers, lake, database, [commits[one.name] for one in some])
    return sum(map(len, wanted))


def scan_of(commit: Commit) -> tuple[str, int]:
    """Database and time of a scan, ms since 1970; for merged scans, that of the last one with rows."""
    times_ms = [one.notes.get(SCANNED_AT, one.notes.get(SCANNED_UNTIL, 0)) for one in commit.ranges]
    return commit.ranges[0].source, int(max(times_ms))


def _settled(commits: Sequence[Commit], database: str, mark: int) -> Iterator[Commit]:
    """The scans that may be merged, in order from the first."""
    mine = [one for one in commits if one.ranges[0].source == database]
    for one in mine[:-1]:
        if any(facts.files and facts.next > mark for facts in one.ranges):
            return
        yield one


def _merge(workers: Workers, lake: Lake, database: str, commits: Sequence[Commit]) -> None:
    ranges = [one for commit in commits for one in commit.ranges if one.files]
    files = [file for one in ranges for file in one.files]
    until_ms = max((ms for one in commits for _, ms in [scan_of(one)] if _has_rows(one)), default=0)
    now_ms = SYSTEM_CLOCK.now_ms()
    if len(files) > 1:
        name = f"{until_ms:0{_DIGITS}d}-merged-{uuid4().hex}.parquet"
        piece = {
            "tables": lake.root,
            "table": OUTBOX.name,
            "name": name,
            "files": [asdict(one) for one in files],
        }
        (answer,) = run_tasks(workers, MERGE_WORK, [piece])
        files = [DataFile(**one) for one in answer]
    facts = RangeFacts(
        source=database,
        first=min((one.first for one in ranges), default=0),
        next=max((one.next for one in ranges), default=0),
        rows=sum(one.rows for one in ranges),
        files=tuple(files),
        notes={SCANNED_UNTIL: until_ms},
    )
    # The order of their names is the order of the scans.
    name = f"{commits[-1].name.partition('-merged-')[0]}-merged-{now_ms:0{_DIGITS}d}"
    replaced = {one for commit in commits for one in (commit.name, *commit.replaces)}
    lake.commit(
        OUTBOX,
        [facts],
        replaces=sorted(replaced & lake.commit_names(OUTBOX)),
        name=name,
        notes={MERGED_AT: now_ms},
    )


def _has_rows(commit: Commit) -> bool:
    return any(one.rows for one in commit.ranges)
