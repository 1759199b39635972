"""Frames of the commit log as rows of `messages` and `scheduled`, a column at a time.

`qmq_client.wire.frame` reads the frames and their tables; this module gathers the records of many
frames, and `record_columns.py` extracts their fields. Rows come in the order of the log, or ordered
by subject: a reader of one subject then skips most of each file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, compress
from typing import Final

import numpy as np
import pyarrow as pa

from qmq_broker.storage.logs.frame_scan import SCAN_BLOCK_BYTES, ScannedFrame
from qmq_client.wire.errors import ProtocolError
from qmq_client.wire.frame import FrameKind, SubjectRun, parse_subjects
from qmq_client.wire.frame_kind import mark_bytes
from qmq_client.wire.limits import NAME_BYTES_MAX
from qmq_client.wire.marks import read_marks
from qmq_client.wire.names import OWN_PREFIX
from qmq_client.wire.record import RECORD_FIXED_BYTES, TIME_MAX_MS
from qmq_pipeline.rows.record_columns import Records
from qmq_pipeline.tables.columns import Numbers, repeated_text, times
from qmq_pipeline.tables.schemas import MESSAGES
from qmq_pipeline.tables.table import Table

#: A batch is passed on after this many bytes of frames or rows: small enough for the caches and for
#: the heap of a small executor, large enough that the work per batch does not matter.
BATCH_BYTES: Final = 16 * 1024 * 1024
BATCH_ROWS: Final = 20_000
#: With this much, a batch ends where that costs nothing: with the block that was read, or with a
#: subject.
_ENOUGH_BYTES: Final = SCAN_BLOCK_BYTES * 3 // 4
_ENOUGH_ROWS: Final = 5_000
#: Columns of a frame in front of its records.
_LENGTH: Final = np.dtype(">u4")
_LENGTH_BYTES: Final = _LENGTH.itemsize
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


@dataclass(slots=True)
class _Gathered:
    """Frames whose rows are not passed on yet."""

    data: list[bytes | memoryview] = field(default_factory=list)
    data_bytes: int = 0
    #: The block that holds the last of the data, and where in it that begins and ends.
    block: bytes = b""
    block_first: int = 0
    block_next: int = 0
    rows: int = 0
    #: For each stretch of records that lie back to back: their lengths as in the frame, where the
    #: first begins in the joined data, and where the last must have ended.
    lengths: list[bytes | memoryview] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)
    bounds: list[int] = field(default_factory=list)
    #: For each record the due time it was rescheduled to, or -1; only for delayed messages.
    put_off_ms: list[Numbers] = field(default_factory=list)
    #: For each run: subject, sequence and place in its frame of the first record, number of
    #: records.
    subjects: list[str] = field(default_factory=list)
    first_sequences: list[int] = field(default_factory=list)
    first_numbers: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    stored_at_ms: list[int] = field(default_factory=list)

    @property
    def is_full(self) -> bool:
        return self.data_bytes >= BATCH_BYTES or self.rows >= BATCH_ROWS

    @property
    def is_enough(self) -> bool:
        return self.data_bytes >= _ENOUGH_BYTES or self.rows >= _ENOUGH_ROWS

    def put(self, frame: ScannedFrame, view: memoryview) -> int:
        """Append a frame to the data, and return where in it the frame begins.

        Frames that were read one after the other are one piece of the data, which then need not be
        copied.
        """
        begin = self.data_bytes
        self.data_bytes += len(view)
        if not self.data or frame.block is not self.block or frame.first != self.block_next:
            self.data.append(view)
            self.block, self.block_first = frame.block, frame.first
        self.block_next = frame.first + len(view)
        self.data[-1] = memoryview(self.block)[self.block_first : self.block_next]
        return begin

    def let_go_of_blocks(self) -> None:
        """Copy what is wanted from the blocks, and release them."""
        self.data, self.block = [b"".join(self.data)], b""

    def joined(self) -> bytes | memoryview:
        """All data in one."""
        return self.data[0] if len(self.data) == 1 else b"".join(self.data)


def batches(frames: Iterable[ScannedFrame], selection: Selection) -> Iterator[pa.RecordBatch]:
    """Rows of these frames; each batch has the columns of the selection."""
    kinds = QUEUED_KINDS if selection.table is MESSAGES else SCHEDULED_KINDS
    gathered = _Gathered()
    for frame in frames:
        if frame.header.kind not in kinds:
            continue
        stored_at_ms = frame.header.stored_at_ms
        if not selection.first_stored_at_ms <= stored_at_ms < selection.next_stored_at_ms:
            continue
        if gathered.rows and frame.block is not gathered.block:
            if gathered.is_enough:
                yield _batch(gathered, selection)
                gathered = _Gathered()
            else:
                gathered.let_go_of_blocks()
        _gather(gathered, frame, selection.subjects)
        if gathered.is_full:
            yield _batch(gathered, selection)
            gathered = _Gathered()
    if gathered.rows:
        yield _batch(gathered, selection)


def batches_by_subject(
    frames: Iterable[ScannedFrame],
    selection: Selection,
    on_piece: Callable[[Piece], None] | None = None,
) -> Iterator[pa.RecordBatch]:
    """The same rows, ordered by subject; all frames are held until then.

    A batch that is full enough ends with its subject, so that row groups in a file have few
    subjects. `on_piece` is called with what goes into the batches.
    """
    kinds = QUEUED_KINDS if selection.table is MESSAGES else SCHEDULED_KINDS
    pieces = [piece for frame in frames if frame.header.kind in kinds for piece in _pieces(frame)]
    pieces.sort(key=lambda piece: piece.subject)
    gathered, last = _Gathered(), ""
    for piece in pieces:
        if gathered.is_full or (gathered.rows >= _ENOUGH_ROWS and piece.subject != last):
            yield _batch(gathered, selection)
            gathered = _Gathered()
        last = piece.subject
        if on_piece is not None:
            on_piece(piece)
        piece.gather(gathered)
    if gathered.rows:
        yield _batch(gathered, selection)


def frame_runs(frame: ScannedFrame) -> tuple[SubjectRun, ...]:
    """Which sequences of which subjects are in a message frame, without the broker's own."""
    runs = _subjects_of(frame)[0]
    return tuple(run for run in runs if not run.subject.startswith(OWN_PREFIX))


@dataclass(slots=True, kw_only=True)
class Piece:
    """The records of one subject in one frame."""

    subject: str
    kind: FrameKind
    #: The records, back to back.
    data: memoryview
    #: Their lengths, as in the frame and as numbers.
    column: memoryview
    lengths: Numbers
    put_off_ms: Numbers | None
    first_sequence: int
    first_number: int
    offset: int
    stored_at_ms: int

    def gather(self, gathered: _Gathered) -> None:
        """Append it to what is gathered."""
        gathered.lengths.append(self.column)
        gathered.begins.append(gathered.data_bytes)
        gathered.bounds.append(gathered.data_bytes + len(self.data))
        if self.put_off_ms is not None:
            gathered.put_off_ms.append(self.put_off_ms)
        gathered.subjects.append(self.subject)
        gathered.first_sequences.append(self.first_sequence)
        gathered.first_numbers.append(self.first_number)
        gathered.counts.append(len(self.lengths))
        gathered.offsets.append(self.offset)
        gathered.stored_at_ms.append(self.stored_at_ms)
        gathered.data.append(self.data)
        gathered.data_bytes += len(self.data)
        gathered.rows += len(self.lengths)


def _pieces(frame: ScannedFrame) -> Iterator[Piece]:
    data = frame.view
    runs, column, begin = _parsed(frame, data)
    lengths = np.frombuffer(column, _LENGTH).astype(np.int64)
    ends = begin + np.cumsum(lengths)
    if ends[-1] > len(data) or lengths.min() < RECORD_FIXED_BYTES:
        raise _not_adding_up(frame.offset)
    put_off_ms = _put_off_ms(frame)
    first = 0
    for run in runs:
        after = first + run.count
        piece = Piece(
            subject=run.subject,
            kind=frame.header.kind,
            data=data[int(ends[first] - lengths[first]) : int(ends[after - 1])],
            column=column[_LENGTH_BYTES * first : _LENGTH_BYTES * after],
            lengths=lengths[first:after],
            put_off_ms=None if put_off_ms is None else put_off_ms[first:after],
            first_sequence=run.first_sequence,
            first_number=first,
            offset=frame.offset,
            stored_at_ms=frame.header.stored_at_ms,
        )
        first = after
        if _is_wanted(run.subject, None):
            yield piece


def _put_off_ms(frame: ScannedFrame) -> Numbers | None:
    """The due times that a frame of delayed messages sets anew, -1 where it sets none."""
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


def _gather(gathered: _Gathered, frame: ScannedFrame, subjects: frozenset[str] | None) -> None:
    """Append what is wanted of a frame to what is gathered.

    All numbers of all records are computed together, when the batch is made: doing some for each
    frame would take as long as everything else.
    """
    view = frame.view
    runs, column, begin = _parsed(frame, view)
    put_off_ms = _put_off_ms(frame)
    counts = [run.count for run in runs]
    first_numbers = list(accumulate(counts, initial=0))[:-1]
    kept = [_is_wanted(run.subject, subjects) for run in runs]
    if not any(kept):
        return
    frame_begin = gathered.put(frame, view)
    bound = frame_begin + len(view)
    begin += frame_begin
    if all(kept):
        gathered.lengths.append(column)
        gathered.begins.append(begin)
        gathered.bounds.append(bound)
    else:
        ends = np.cumsum(np.frombuffer(column, _LENGTH), dtype=np.int64)
        for run, first, is_kept in zip(runs, first_numbers, kept, strict=True):
            if is_kept:
                after = first + run.count
                gathered.lengths.append(column[_LENGTH_BYTES * first : _LENGTH_BYTES * after])
                gathered.begins.append(begin + (int(ends[first - 1]) if first else 0))
                gathered.bounds.append(bound)
        put_off_ms = None if put_off_ms is None else put_off_ms[np.repeat(np.array(kept), counts)]
        runs = tuple(compress(runs, kept))
        counts, first_numbers = list(compress(counts, kept)), list(compress(first_numbers, kept))
    if put_off_ms is not None:
        gathered.put_off_ms.append(put_off_ms)
    gathered.subjects += [run.subject for run in runs]
    gathered.first_sequences += [run.first_sequence for run in runs]
    gathered.first_numbers += first_numbers
    gathered.counts += counts
    gathered.offsets += [frame.offset] * len(runs)
    gathered.stored_at_ms += [frame.header.stored_at_ms] * len(runs)
    gathered.rows += sum(counts)


def _is_wanted(subject: str, subjects: frozenset[str] | None) -> bool:
    is_own = subject.startswith(OWN_PREFIX)
    return not is_own if subjects is None else subject in subjects


def _batch(gathered: _Gathered, selection: Selection) -> pa.RecordBatch:
    runs = _Runs(gathered)
    needs_records = not _Runs.NAMES.issuperset(selection.columns)
    records = _records(gathered) if needs_records else None
    arrays = [
        runs.column(name, selection.table)
        if records is None or name in _Runs.NAMES
        else records.column(name)
        for name in selection.columns
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=selection.table.arrow(selection.columns))


def _records(gathered: _Gathered) -> Records:
    put_off_ms = np.concatenate(gathered.put_off_ms) if gathered.put_off_ms else None
    lengths = np.frombuffer(b"".join(gathered.lengths), _LENGTH).astype(np.int64)
    counts = np.array([len(one) for one in gathered.lengths], np.int64) // _LENGTH_BYTES
    # As if all lay back to back; then each stretch is moved to its real place.
    ends = np.cumsum(lengths)
    last = np.cumsum(counts) - 1
    stretch_ends = ends[last]
    moved = np.array(gathered.begins, np.int64) - np.concatenate(([0], stretch_ends[:-1]))
    is_whole = stretch_ends + moved <= np.array(gathered.bounds, np.int64)
    if not is_whole.all() or lengths.min() < RECORD_FIXED_BYTES:
        raise _not_adding_up(gathered.offsets[0])
    positions = ends - lengths + np.repeat(moved, counts)
    return Records(gathered.joined(), positions, lengths, put_off_ms)


def _not_adding_up(offset: int) -> ProtocolError:
    return ProtocolError(
        "record lengths do not add up to the frame, or to one of those behind it", offset=offset
    )


class _Runs:
    """Columns that are constant, or count up, within a run."""

    NAMES: Final = frozenset(
        {"subject", "sequence", "physical_offset", "record_number", "stored_at"}
    )

    def __init__(self, gathered: _Gathered) -> None:
        self._gathered = gathered
        self._counts = np.array(gathered.counts, np.int64)
        self._rows = gathered.rows

    def column(self, name: str, table: Table) -> pa.Array:
        gathered = self._gathered
        match name:
            case "subject":
                return self._subjects()
            case "sequence" if table is not MESSAGES:
                return pa.nulls(self._rows, pa.int64())
            case "sequence":
                return pa.array(self._counted(gathered.first_sequences))
            case "record_number":
                return pa.array(self._counted(gathered.first_numbers).astype(np.int32))
            case "physical_offset":
                return pa.array(self._repeated(gathered.offsets))
            case _:
                return times(self._repeated(gathered.stored_at_ms))

    def _repeated(self, values: Sequence[int]) -> Numbers:
        return np.repeat(np.array(values, np.int64), self._counts)

    def _counted(self, firsts: Sequence[int]) -> Numbers:
        run_begins = np.cumsum(self._counts) - self._counts
        begins = np.array(firsts, np.int64) - run_begins
        return np.repeat(begins, self._counts) + np.arange(self._rows)

    def _subjects(self) -> pa.Array:
        subjects = self._gathered.subjects
        return repeated_text(subjects, np.repeat(np.arange(len(subjects)), self._counts))
