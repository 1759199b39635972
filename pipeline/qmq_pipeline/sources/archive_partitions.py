"""Reads an archive like a log: its Parquet files become the tasks' partitions, with the same options.

Notes from the time of writing tell which files to read; within a file, rows are selected by
subject, time and offset.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import InputPartition

from qmq_pipeline.errors import ExpiredRangeError
from qmq_pipeline.places.options import LogOptions, Place
from qmq_pipeline.rows.quarantined import refuse_quarantined
from qmq_pipeline.sources.worker_heap import prepare_heap
from qmq_pipeline.tables.columns import TIME
from qmq_pipeline.tables.commits import RangeFacts
from qmq_pipeline.tables.lake import Lake
from qmq_pipeline.tables.marker import is_lake
from qmq_pipeline.tables.schemas import ACTIONS, MESSAGES


@dataclass(frozen=True, slots=True)
class ArchivePartition(InputPartition):
    """One file of an archive."""

    options: LogOptions
    path: str


def is_archive(place: Place) -> bool:
    """Whether this place is a folder of tables, not a data directory."""
    return place.path is not None and is_lake(place.path.removeprefix("file://"))


def archived_ranges(options: LogOptions) -> list[RangeFacts]:
    """What the archive has of the table, in order of the log."""
    return _lake(options).ranges(options.table)


def plan_archive(options: LogOptions) -> list[InputPartition]:
    """One partition for each file that may have rows for these options.

    Raises `ExpiredRangeError` for an offset below the archive's first, and `QuarantinedRangeError`.
    """
    prepare_heap()
    ranges = archived_ranges(options)
    if ranges and options.first_offset is not None and options.first_offset < ranges[0].first:
        raise ExpiredRangeError(
            source=options.place.name,
            reason=f"offset {options.first_offset} is asked for, and the archive begins at "
            f"{ranges[0].first}",
            remedy="Begin there",
        )
    if options.table is not ACTIONS:
        _refuse_quarantined(options)
    return [
        ArchivePartition(options, file.path)
        for one in ranges
        if _may_have(one, options)
        for file in one.files
    ]


def read_archive(partition: ArchivePartition) -> Iterator[pa.RecordBatch]:
    """The rows of one file."""
    prepare_heap()
    options = partition.options
    lake = _lake(options)
    needed = list(dict.fromkeys((*options.columns, *_chosen_by(options))))
    schema = options.table.arrow(options.columns)
    for batch in lake.read_file(options.table, partition.path, needed):
        chosen = _choose(batch, options).select(list(options.columns))
        if chosen.num_rows:
            yield pa.RecordBatch.from_arrays(
                [column.cast(field.type) for column, field in zip(chosen, schema, strict=True)],
                schema=schema,
            )


def _refuse_quarantined(options: LogOptions) -> None:
    """Messages and delayed ones are lost together; which part of a range was lost is not noted."""
    for one in _lake(options).ranges(MESSAGES):
        if one.lost and _may_have(one, options):
            refuse_quarantined(one.lost, one.first, options)


def _lake(options: LogOptions) -> Lake:
    lake = Lake((options.place.path or "").removeprefix("file://"))
    lake.require()
    return lake


def _may_have(one: RangeFacts, options: LogOptions) -> bool:
    is_behind = one.next <= max(options.first_offset or 0, options.skip_below_offset)
    is_before = options.next_offset is not None and one.first >= options.next_offset
    is_old = one.last_at_ms < options.first_stored_at_ms
    # The times are those of frames, and actions are a moment older than the frame that they are in.
    is_new = options.table is not ACTIONS and one.first_at_ms >= options.next_stored_at_ms
    return not (is_behind or is_before or is_old or is_new)


def _chosen_by(options: LogOptions) -> tuple[str, str, str]:
    if options.table is ACTIONS:
        return ("subject", "at", "action_offset")
    return ("subject", "stored_at", "physical_offset")


def _choose(batch: pa.RecordBatch, options: LogOptions) -> pa.RecordBatch:
    subject, at, offset = (batch[name] for name in _chosen_by(options))
    mask = pc.greater_equal(offset, options.first_offset or 0)
    if options.next_offset is not None:
        mask = pc.and_(mask, pc.less(offset, options.next_offset))
    first, after = (
        pa.scalar(time_ms * 1000, pa.int64()).cast(TIME)
        for time_ms in (options.first_stored_at_ms, options.next_stored_at_ms)
    )
    mask = pc.and_(mask, pc.greater_equal(at, first))
    mask = pc.and_(mask, pc.less(at, after))
    if options.subjects is not None:
        wanted = pa.array(sorted(options.subjects), pa.string())
        mask = pc.and_(mask, pc.is_in(subject, value_set=wanted))
    return batch.filter(mask)
