"""The table `deliveries`: workers fold the action log, continuing from the end of the last fold.

The notes of each commit hold what the next fold needs (the `GroupMark` of every group), and the
sequences that were touched, for the tables derived from this one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from qmq_pipeline.fold.runs import RunList
from qmq_pipeline.places.config import PipelineConfig
from qmq_pipeline.sources.tasks import run_tasks
from qmq_pipeline.spark.frames import arrow_frame
from qmq_pipeline.tables.commits import Commit, DataFile, RangeFacts
from qmq_pipeline.tables.lake import Lake
from qmq_pipeline.tables.schemas import ACTIONS, DELIVERIES
from qmq_pipeline.work.fold import bucket_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_WORK: Final = "qmq_pipeline.work.fold.fold_piece"
_GROUPS: Final = pa.schema(
    [
        ("subject", pa.string()),
        ("consumer_group", pa.string()),
        ("group_first", pa.int64()),
        ("group_next", pa.int64()),
    ]
)
#: The end of a group that still exists.
ENDLESS: Final = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Folded:
    """The state of the table."""

    rows: int
    #: Settlements of messages that were handed out before the table of actions begins.
    unmatched: int
    #: Offset of the action log up to which it is folded.
    actions: int
    #: Group (see `fold_work.group_name`) → first sequence for it, and the one behind the last.
    groups: Mapping[str, tuple[int, int]]
    #: Since this offset of the action log …
    since: int
    #: … these sequences were touched: subject → runs.
    touched: Mapping[str, RunList]


def fold_actions(
    spark: SparkSession, config: PipelineConfig, lake: Lake, run: str, *, seen: int | None
) -> Folded:
    """Bring the table up to date with `actions`.

    `seen`: the offset up to which its reader knows the table; None rebuilds it as a whole.
    """
    before = None if seen is None else _continued(lake, config)
    notes = {} if before is None else before.notes
    first, after = int(notes.get("actions", 0)), actions_end(lake)
    if before is not None and first >= after:
        done = _folded(before)
        return done if seen != first else replace(done, since=first, touched={})
    pieces = _pieces(config, run, before, (first, after))
    files: dict[str, list[DataFile]] = {}
    marks: dict[str, Any] = dict(notes.get("marks", {}))
    since, touched = first, {}
    if seen is not None and seen < first:  # the reader of the last fold died before it was done
        since, touched = int(notes["since"]), _runs(notes["touched"])
    if before is None:
        lake.sweep(DELIVERIES)
    for answer in run_tasks(spark, _WORK, pieces):
        marks.update(answer["marks"])
        for part, some in answer["files"].items():
            files[part] = [DataFile(**one) for one in some]
        for subject, runs in answer["touched"].items():
            known = touched.setdefault(subject, RunList())
            for begin, end in runs:
                known.add(begin, end)
    made = lake.replace_parts(
        DELIVERIES,
        run,
        {part: some for part, some in files.items() if some},
        made=None if before is None else files.keys(),
        notes={
            "actions": after,
            "since": since,
            "buckets": config.fold_buckets,
            "block_sequences": config.fold_block_sequences,
            "marks": marks,
            "touched": {subject: list(runs) for subject, runs in touched.items()},
        },
    )
    return _folded(made)


def actions_end(lake: Lake) -> int:
    """The offset up to which the action log was ingested."""
    return max((one.next for one in lake.ranges(ACTIONS)), default=0)


def block_of(part: RangeFacts) -> tuple[int, int]:
    """Bucket and block of a part of the table; see `fold_work.part_name`."""
    bucket, _, block = part.source.partition("-")
    return int(bucket), int(block)


def folded(lake: Lake) -> Folded | None:
    """The state of the table; None if there is no table."""
    newest = lake.newest(DELIVERIES)
    return None if newest is None or "marks" not in newest.notes else _folded(newest)


def group_names(lake: Lake) -> list[str]:
    """The names of all groups in the table, each once whatever its subjects; sorted."""
    newest = lake.newest(DELIVERIES)
    marks = {} if newest is None else newest.notes.get("marks", {})
    return sorted({name.partition("\n")[2] for name in marks})


def groups(spark: SparkSession, known: Mapping[str, tuple[int, int]]) -> DataFrame:
    """The groups as a table: subject, group, and the sequences for it."""
    rows = [(*name.split("\n"), *sequences) for name, sequences in known.items()]
    columns = [list(column) for column in zip(*rows, strict=True)] or [[]] * len(_GROUPS)
    return arrow_frame(spark, pa.table(columns, schema=_GROUPS))


def _continued(lake: Lake, config: PipelineConfig) -> Commit | None:
    """The fold to continue; None if it was made with other settings."""
    newest = lake.newest(DELIVERIES)
    wanted = {
        "buckets": config.fold_buckets,
        "block_sequences": config.fold_block_sequences,
    }
    if newest is None or newest.version != DELIVERIES.version:
        return None
    if any(newest.notes.get(name) != value for name, value in wanted.items()):
        return None
    lake.sweep(DELIVERIES)
    return newest


def _pieces(
    config: PipelineConfig, run: str, before: Commit | None, actions: tuple[int, int]
) -> list[dict[str, Any]]:
    """The work of each bucket: its groups and its current files."""
    count = config.fold_buckets
    marks: list[dict[str, Any]] = [{} for _ in range(count)]
    files: list[dict[str, str]] = [{} for _ in range(count)]
    if before is not None:
        for name, mark in before.notes["marks"].items():
            marks[bucket_of(name, count)][name] = mark
        for one in before.ranges:
            bucket, block = block_of(one)
            files[bucket][str(block)] = one.files[0].path
    return [
        {
            "tables": config.tables,
            "run": run,
            "bucket": {
                "number": number,
                "of": count,
                "block_sequences": config.fold_block_sequences,
            },
            "actions": {"first": actions[0], "next": actions[1]},
            "marks": marks[number],
            "files": files[number],
        }
        for number in range(count)
    ]


def _folded(commit: Commit) -> Folded:
    marks = commit.notes["marks"]
    return Folded(
        rows=sum(one.rows for one in commit.ranges),
        unmatched=sum(mark["unmatched"] for mark in marks.values()),
        actions=int(commit.notes["actions"]),
        groups={
            name: (mark["first"], mark["come_to"] if mark["has_ended"] else ENDLESS)
            for name, mark in marks.items()
            if mark["first"] is not None
        },
        since=int(commit.notes["since"]),
        touched=_runs(commit.notes["touched"]),
    )


def _runs(found: Mapping[str, list[tuple[int, int]]]) -> dict[str, RunList]:
    return {
        subject: RunList((first, after) for first, after in runs) for subject, runs in found.items()
    }
