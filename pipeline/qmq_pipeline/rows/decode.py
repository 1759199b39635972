"""Frames of the commit log as rows of `messages` and `scheduled`, a column at a time.

`qmq_client.wire.frame` reads the frames and their tables; this module says which of their records are
wanted, `gathered.py` makes batches of them, and `record_columns.py` extracts their fields. Rows come in
the order of the log.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, compress
from typing import Final

import numpy as np
import pyarrow as pa

from qmq_broker.storage.logs.frame_scan import ScannedFrame
from qmq_client.wire.frame import FrameKind, SubjectRun, parse_subjects
from qmq_client.wire.frame_head import mark_bytes
from qmq_client.wire.limits import NAME_BYTES_MAX
from qmq_client.wire.marks import read_marks
from qmq_client.wire.names import OWN_PREFIX
from qmq_client.wire.record import RECORD_FIXED_BYTES, TIME_MAX_MS
from qmq_pipeline.rows.gathered import LENGTH, Gathered, not_adding_up
from qmq_pipeline.tables.columns import Numbers
from qmq_pipeline.tables.schemas import MESSAGES
from qmq_pipeline.tables.table import Table

#: Of each record in the columns in front of them.
_LENGTH_BYTES: Final = LENGTH.itemsize
_TAG_HASH_BYTES: Final = 8
#: The most that a subject takes in the table of a frame: its number of records, and its name with
#: the length.
_SUBJECT_BYTES_MAX: Final = 5 + NAME_BYTES_MAX
#: Frames whose messages have a place in their subject, and frames of messages that wait for their
#: time.
QUEUED_KINDS: Final = frozenset(kind for kind in FrameKind if kind.name in {"MESSAGES", "RELEASED"})
SCHEDULED_KINDS: Final = frozenset(
    kind for kind in FrameKind if kind.name in {"DELAYED", "RESCHEDULED"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which rows and columns of a part of the log to read."""

    #: Columns of `MESSAGES`, in order.
    columns: tuple[str, ...] = MESSAGES.names
    table: Table = MESSAGES
    #: None for all.
    subjects: frozenset[str] | None = None
    #: Stored at this time or later, and before that one; ms since 1970.
    first_stored_at_ms: int = 0
    next_stored_at_ms: int = TIME_MAX_MS
    #: Bytes of log in one part, for the column `part`.
    part_bytes: int = TIME_MAX_MS


def batches(frames: Iterable[ScannedFrame], selection: Selection) -> Iterator[pa.RecordBatch]:
    """Rows of these frames; each batch has the columns of the selection."""
    kinds = QUEUED_KINDS if selection.table is MESSAGES else SCHEDULED_KINDS
    gathered = Gathered(selection.columns, selection.table)
    for frame in frames:
        if frame.header.kind not in kinds:
            continue
        stored_at_ms = frame.header.stored_at_ms
        if not selection.first_stored_at_ms <= stored_at_ms < selection.next_stored_at_ms:
            continue
        if gathered.ends_before(frame):
            yield gathered.batch()
            gathered = Gathered(selection.columns, selection.table)
        _gather(gathered, frame, selection.subjects)
        if gathered.is_full:
            yield gathered.batch()
            gathered = Gathered(selection.columns, selection.table)
    if gathered.rows:
        yield gathered.batch()


@dataclass(slots=True, kw_only=True)
class Piece:
    """The records of one subject in one frame."""

    subject: str
    #: The records, back to back, and the length of each.
    data: memoryview
    lengths: Numbers
    #: Place in the frame of the first one, and the frame's place in the log.
    first_number: int
    offset: int


def pieces(frame: ScannedFrame) -> Iterator[Piece]:
    """The records of a message frame by subject, without the broker's own."""
    data = frame.view
    runs, column, begin = _parsed(frame, data)
    lengths = np.frombuffer(column, LENGTH).astype(np.int64)
    ends = begin + np.cumsum(lengths)
    if ends[-1] > len(data) or lengths.min() < RECORD_FIXED_BYTES:
        raise not_adding_up(frame.offset)
    first = 0
    for run in runs:
        after = first + run.count
        if _is_wanted(run.subject, None):
            yield Piece(
                subject=run.subject,
                data=data[int(ends[first] - lengths[first]) : int(ends[after - 1])],
                lengths=lengths[first:after],
                first_number=first,
                offset=frame.offset,
            )
        first = after


def _put_off_ms(frame: ScannedFrame) -> Numbers | None:
    """The due times that a frame of delayed messages sets again, -1 where it sets none."""
    header = frame.header
    if header.kind not in SCHEDULED_KINDS:
        return None
    count = mark_bytes(header.kind, header.record_count)
    if not count:
        return np.full(header.record_count, -1, np.int64)
    return np.array(read_marks(header, bytes(frame.view[-count:])).due_at_ms, np.int64)


def _subjects_of(frame: ScannedFrame) -> tuple[tuple[SubjectRun, ...], int]:
    """The runs of a message frame, and the position behind its subject table."""
    header, first = frame.header, frame.first
    front_bytes = header.head_bytes + _SUBJECT_BYTES_MAX * header.subject_count
    front = frame.block[first : first + min(front_bytes, header.frame_bytes)]
    return parse_subjects(front, header)


def _parsed(
    frame: ScannedFrame, data: memoryview
) -> tuple[tuple[SubjectRun, ...], memoryview, int]:
    """Runs of a message frame, its column of lengths, and where its records begin."""
    runs, position = _subjects_of(frame)
    count = frame.header.record_count
    column = data[position : position + _LENGTH_BYTES * count]
    return runs, column, position + (_LENGTH_BYTES + _TAG_HASH_BYTES) * count


def _gather(gathered: Gathered, frame: ScannedFrame, subjects: frozenset[str] | None) -> None:
    """Append what is wanted of a frame to what is gathered."""
    view = frame.view
    runs, column, begin = _parsed(frame, view)
    put_off_ms = _put_off_ms(frame)
    counts = [run.count for run in runs]
    first_numbers = list(accumulate(counts, initial=0))[:-1]
    kept = [_is_wanted(run.subject, subjects) for run in runs]
    if not any(kept):
        return
    here, noted = gathered.here, gathered.runs
    frame_begin = here.put(frame, view)
    bound = frame_begin + len(view)
    begin += frame_begin
    if all(kept):
        here.lengths.append(column)
        here.begins.append(begin)
        here.bounds.append(bound)
    else:
        ends = np.cumsum(np.frombuffer(column, LENGTH), dtype=np.int64)
        for run, first, is_kept in zip(runs, first_numbers, kept, strict=True):
            if is_kept:
                after = first + run.count
                here.lengths.append(column[_LENGTH_BYTES * first : _LENGTH_BYTES * after])
                here.begins.append(begin + (int(ends[first - 1]) if first else 0))
                here.bounds.append(bound)
        put_off_ms = None if put_off_ms is None else put_off_ms[np.repeat(np.array(kept), counts)]
        runs = tuple(compress(runs, kept))
        counts, first_numbers = list(compress(counts, kept)), list(compress(first_numbers, kept))
    if put_off_ms is not None:
        here.put_off_ms.append(put_off_ms)
    noted.subjects += [run.subject for run in runs]
    noted.first_sequences += [run.first_sequence for run in runs]
    noted.first_numbers += first_numbers
    noted.counts += counts
    noted.offsets += [frame.offset] * len(runs)
    noted.stored_at_ms += [frame.header.stored_at_ms] * len(runs)
    noted.rows += sum(counts)


def _is_wanted(subject: str, subjects: frozenset[str] | None) -> bool:
    """The broker's own subjects are not, even if a condition of a query names them: its answer would change."""
    return not subject.startswith(OWN_PREFIX) and (subjects is None or subject in subjects)
