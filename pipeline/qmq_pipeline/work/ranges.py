"""One worker's part of an ingest: read, verify and decode one range of a log, write Parquet, and
report what there was.

Rows never pass through the JVM. The worker writes the files itself, which is as fast as reading
alone, and returns facts of a few hundred bytes. No Spark here; a plain loop over ranges does the
same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import groupby
from typing import Any, Final

import pyarrow as pa

from qmq_broker.storage.logs.frame_scan import ScannedFrame
from qmq_broker.storage.logs.frame_seek import LogRange
from qmq_broker.storage.logs.lost import lost_runs
from qmq_client.wire.frame import FrameKind
from qmq_pipeline.places.log import ACTION_LOG, COMMIT_LOG
from qmq_pipeline.places.options import Place
from qmq_pipeline.places.places import open_log
from qmq_pipeline.rows import actions, cancelled, copies
from qmq_pipeline.rows.altered import ALTERED_MAX, AlteredRecord, altered_records
from qmq_pipeline.rows.decode import (
    QUEUED_KINDS,
    SCHEDULED_KINDS,
    Piece,
    Selection,
    batches_by_subject,
    frame_runs,
)
from qmq_pipeline.tables.commits import ALTERED, ALTERED_COUNT, DataFile, RangeFacts
from qmq_pipeline.tables.lake import Lake
from qmq_pipeline.tables.schemas import ACTIONS, CANCELLED, COPIES, MESSAGES, SCHEDULED
from qmq_pipeline.tables.table import Table
from qmq_pipeline.tables.tallies import AUDITED

#: Log → the table that says how far it was read, and all others made from it.
TABLES_OF: Final = {
    COMMIT_LOG: (MESSAGES, SCHEDULED, CANCELLED, COPIES),
    ACTION_LOG: (ACTIONS,),
}
#: Tables whose files are sorted by subject; the files of all others are in order of the log.
BY_SUBJECT: Final = (MESSAGES, SCHEDULED)
_DIGITS: Final = 20
Runs = dict[str, list[tuple[int, int]]]


@dataclass(slots=True)
class _Seen:
    """Facts gathered while a range is read."""

    sequences: Runs = field(default_factory=dict)
    lost: Runs = field(default_factory=dict)
    delayed: list[ScannedFrame] = field(default_factory=list)
    cancelled: list[ScannedFrame] = field(default_factory=list)
    copies: list[ScannedFrame] = field(default_factory=list)
    #: Number of altered records, and the first of them.
    altered_count: int = 0
    altered: list[AlteredRecord] = field(default_factory=list)
    first_at_ms: int = 0
    last_at_ms: int = 0
    last_frame: tuple[int, int] = (-1, 0)

    def look_into(self, piece: Piece) -> None:
        """Recompute the records' checksums."""
        found = altered_records(piece)
        self.altered_count += len(found)
        self.altered += found[: ALTERED_MAX - len(self.altered)]


def ingest_range(place: Place, tables: str, log: str, within: LogRange) -> dict[str, RangeFacts]:
    """Write the bronze files of one range; table name → what was written. May be repeated."""
    lake = Lake(tables)
    reader = open_log(place, log)
    try:
        seen = _Seen()
        frames = _watched(reader.frames(within), seen)
        if log == ACTION_LOG:
            rows = {ACTIONS: _write(lake, ACTIONS, frames, within, seen)}
        else:
            rows = {MESSAGES: _write(lake, MESSAGES, frames, within, seen)}
            rows[SCHEDULED] = _write(lake, SCHEDULED, seen.delayed, within, seen)
            rows[CANCELLED] = _write(lake, CANCELLED, seen.cancelled, within, seen)
            rows[COPIES] = _write(lake, COPIES, seen.copies, within, seen)
        return {
            table.name: _facts(
                reader.store_id, within, files, seen, with_sequences=table is MESSAGES
            )
            for table, files in rows.items()
        }
    finally:
        reader.close()


def ingest_piece(
    place: dict[str, Any], tables: str, log: str, first: int, after: int
) -> dict[str, Any]:
    """The same for a worker, with JSON arguments and a JSON answer."""
    facts = ingest_range(Place(**place), tables, log, LogRange(first, after))
    return {name: asdict(one) for name, one in facts.items()}


def _watched(frames: Iterable[ScannedFrame], seen: _Seen) -> Iterator[ScannedFrame]:
    """The frames, noting the facts on the way; delayed frames are kept for their own table."""
    for frame in frames:
        header = frame.header
        seen.last_frame = (frame.offset, header.stamp_crc)
        if header.kind in (FrameKind.SEGMENT_HEAD, FrameKind.PADDING):
            continue
        seen.first_at_ms = seen.first_at_ms or header.stored_at_ms
        seen.last_at_ms = header.stored_at_ms
        if header.kind in SCHEDULED_KINDS:
            seen.delayed.append(frame)
        elif header.kind is FrameKind.CANCELLED:
            seen.cancelled.append(frame)
        elif header.kind is FrameKind.LOST:
            for lost in lost_runs(frame):
                add_run(seen.lost, lost.subject, lost.first_sequence, lost.count)
        elif header.kind in QUEUED_KINDS:
            for run in frame_runs(frame):
                add_run(seen.sequences, run.subject, run.first_sequence, run.count)
        if header.kind is not FrameKind.MESSAGES and copies.has_copies(frame):
            seen.copies.append(frame)
        yield frame


def add_run(runs: Runs, subject: str, first: int, count: int) -> None:
    """Note sequences of a subject. Only adjacent ones form one run, so that a gap stays visible."""
    of_subject = runs.setdefault(subject, [])
    if of_subject and of_subject[-1][1] == first:
        of_subject[-1] = (of_subject[-1][0], first + count)
    else:
        of_subject.append((first, first + count))


def file_name(first_offset: int, next_offset: int) -> str:
    """Name of a data file with the rows of this range of the log."""
    return f"{first_offset:0{_DIGITS}d}-{next_offset:0{_DIGITS}d}.parquet"


def _write(
    lake: Lake, table: Table, frames: Iterable[ScannedFrame], within: LogRange, seen: _Seen
) -> tuple[DataFile, ...]:
    """Write one file for each day, sorted by subject; frames are in order of time."""
    name = file_name(within.first_offset, within.next_offset)
    files = []
    for day, of_day in groupby(frames, key=lambda frame: frame.header.stored_at_ms // 86_400_000):
        rows = _rows(table, of_day, seen)
        first = next(rows, None)
        if first is not None:
            date = datetime.fromtimestamp(day * 86_400, UTC).date()
            write = lake.write_tallied if table.name in AUDITED else lake.write
            files.append(write(table, f"day={date}/{name}", _chain(first, rows)))
    return tuple(files)


def _rows(table: Table, frames: Iterable[ScannedFrame], seen: _Seen) -> Iterator[pa.RecordBatch]:
    if table is ACTIONS:
        return actions.batches(frames)
    if table is CANCELLED:
        return cancelled.batches(frames)
    if table is COPIES:
        return copies.batches(frames)
    selection = Selection(columns=table.names, table=table)
    return batches_by_subject(frames, selection, seen.look_into)


def _chain(first: pa.RecordBatch, rest: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield first
    yield from rest


def _facts(
    source: str, within: LogRange, files: tuple[DataFile, ...], seen: _Seen, *, with_sequences: bool
) -> RangeFacts:
    notes: dict[str, Any] = {"last_frame": list(seen.last_frame)}
    if with_sequences and seen.altered:
        notes[ALTERED] = [asdict(one) for one in seen.altered]
        notes[ALTERED_COUNT] = seen.altered_count
    return RangeFacts(
        source=source,
        first=within.first_offset,
        next=within.next_offset,
        rows=sum(file.rows for file in files),
        files=files,
        sequences=seen.sequences if with_sequences else {},
        lost=seen.lost if with_sequences else {},
        first_at_ms=seen.first_at_ms,
        last_at_ms=seen.last_at_ms,
        notes=notes,
    )
