"""Merges the small files that many short runs of `ingest` leave; each run does so after its own commit.

The rows of consecutive commits are written again in fewer files, and one commit replaces theirs.
Readers see the old state or the new one, with the same rows. Merged files stay for an hour, for
queries that are reading them. If a run dies, the files that no commit names are removed with them.

What to merge, and what a merged commit says: `tables/merging.py`. Scans of outboxes:
`merge_scans.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from qmq_client.clock import SYSTEM_CLOCK
from qmq_pipeline.places.config import PipelineConfig
from qmq_pipeline.sources.tasks import run_tasks
from qmq_pipeline.tables.commits import MERGED_AT, Commit, DataFile, RangeFacts
from qmq_pipeline.tables.lake import Lake
from qmq_pipeline.tables.log_end import LogEnd
from qmq_pipeline.tables.merging import (
    Span,
    between_gaps,
    counted_spans,
    mergeable,
    merged_facts,
)
from qmq_pipeline.tables.table import Table
from qmq_pipeline.work.ranges import file_name

if TYPE_CHECKING:
    from qmq_pipeline.sources.tasks import Workers

MERGE_WORK: Final = "qmq_pipeline.work.merge.merge_piece"


def merge(workers: Workers, config: PipelineConfig, lake: Lake, table: Table) -> int:
    """Merge small files in the tables of a log; by how many commits it shrank.

    Files and commit are durable before they count. Requires: the caller holds the tables' write
    lock.
    """
    spans = LogEnd(lake, table).spans()
    counted = counted_spans(spans)
    wanted = mergeable(counted, commits_min=config.merge_commits, bytes_enough=config.merged_bytes)
    commits = [[lake.read_commit(table, span.name) for span in some] for some in wanted]
    commits = [some for some in commits if all(one.version == table.version for one in some)]
    for some, ranges in zip(commits, _merged(workers, lake, table, commits), strict=True):
        # Includes commits that these replaced themselves: those may not be swept yet, and must not count
        # again once these are.
        replaced = {name for one in some for name in (one.name, *one.replaces)}
        lake.commit(
            table,
            ranges,
            replaces=sorted(replaced & {span.name for span in spans}),
            notes={MERGED_AT: SYSTEM_CLOCK.now_ms()},
        )
    if commits:
        _sweep(lake, table, config.merged_kept_s, spans, counted)
    return sum(map(len, commits))


def _merged(
    workers: Workers, lake: Lake, table: Table, commits: Sequence[Sequence[Commit]]
) -> list[list[RangeFacts]]:
    """The ranges of each merged commit, after writing their files."""
    runs = [list(between_gaps(one for commit in some for one in commit.ranges)) for some in commits]
    every = [run for some in runs for run in some]
    files = [[file for one in run for file in one.files] for run in every]
    doubled = [number for number, some in enumerate(files) if len(some) > 1]
    answers = run_tasks(
        workers, MERGE_WORK, [_piece(lake, table, every[one], files[one]) for one in doubled]
    )
    for number, answer in zip(doubled, answers, strict=True):
        files[number] = [DataFile(**one) for one in answer]
    facts = iter(
        run[0] if len(run) == 1 else merged_facts(run, some)
        for run, some in zip(every, files, strict=True)
    )
    return [[next(facts) for _ in some] for some in runs]


def _piece(
    lake: Lake, table: Table, run: Sequence[RangeFacts], files: Sequence[DataFile]
) -> dict[str, Any]:
    return {
        "tables": lake.root,
        "table": table.name,
        "name": file_name(run[0].first, run[-1].next),
        "files": [asdict(one) for one in files],
    }


def _sweep(
    lake: Lake, table: Table, kept_s: float, spans: Sequence[Span], counted: Sequence[Span]
) -> None:
    """Remove files that were merged long ago. Not at each run: it lists all files."""
    merged = min(set(spans) - set(counted), default=None)
    if merged is None:
        return
    now_ms, kept_ms = SYSTEM_CLOCK.now_ms(), round(kept_s * 1000)
    holders = [
        one
        for one in spans
        if one != merged and one.first <= merged.first and merged.next <= one.next
    ]
    at_ms = [int(lake.read_commit(table, one.name).notes.get(MERGED_AT, 0)) for one in holders]
    if min(at_ms) <= now_ms - 2 * kept_ms:
        lake.sweep(table, merged_before_ms=now_ms - kept_ms)
