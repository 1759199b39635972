"""Decodes frames of the commit log into rows of `messages` and `scheduled`, a column at a time.

`qmq_client.wire.frame` reads the frames and their tables; this module selects records and makes
batches of them; `record_columns.py` extracts their fields. Rows are in the order of the log.

The log is read in blocks. Records stay in the block until it ends; if they are enough for a batch,
its columns are made from there. Otherwise the needed parts of the records are copied and the block
released, so that messages with long bodies, of which a block holds few, are in batches as large as
others: a batch costs as much as some thousand rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, compress
from typing import ClassVar, Final

import numpy as np
import pyarrow as pa

from qmq_broker.storage.logs.frame_scan import SCAN_BLOCK_BYTES, ScannedFrame
from qmq_client.wire.errors import ProtocolError
from qmq_client.wire.frame import FrameKind, SubjectRun, parse_subjects
from qmq_client.wire.frame_head import mark_bytes
from qmq_client.wire.limits import NAME_BYTES_MAX
from qmq_client.wire.marks import read_marks
from qmq_client.wire.names import OWN_PREFIX
from qmq_client.wire.record import RECORD_FIXED_BYTES, TIME_MAX_MS
from qmq_pipeline.rows.record_columns import Depth, Placed, Records, depth_of
from qmq_pipeline.tables.columns import Numbers, repeated_text, times
from qmq_pipeline.tables.schemas import MESSAGES
from qmq_pipeline.tables.table import Table

#: A batch is passed on after this many bytes of frames or rows: small enough for the caches and for
#: the heap of a small executor, large enough that the work per batch does not matter.
BATCH_BYTES: Final = 16 * 1024 * 1024
BATCH_ROWS: Final = 20_000
#: From this size on, a batch ends at the next convenient place: the end of a block or of a subject.
ENOUGH_ROWS: Final = 5_000
#: The same in bytes, if the whole records are needed.
_ENOUGH_BYTES: Final = SCAN_BLOCK_BYTES * 3 // 4
#: The column of lengths in front of the records of a frame.
LENGTH: Final = np.dtype(">u4")


@dataclass(slots=True)
class InBlock:
    """Records in the block in which they were read."""

    data: list[bytes | memoryview] = field(default_factory=list)
    data_bytes: int = 0
    #: The block with the last data, and the range of these data in it.
    block: bytes = b""
    block_first: int = 0
    block_next: int = 0
    #: For each stretch of contiguous records: their lengths as in the frame, where the
    #: first begins in the joined data, and where the last must have ended.
    lengths: list[bytes | memoryview] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)
    bounds: list[int] = field(default_factory=list)
    #: For each record the due time it was rescheduled to, or -1; only for delayed messages.
    put_off_ms: list[Numbers] = field(default_factory=list)

    def put(self, frame: ScannedFrame, view: memoryview) -> int:
        """Append a frame to the data, and return its position there.

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

    def placed(self, offset: int) -> Placed:
        """All of them; `offset` is that of the first frame, for errors. Requires: there is one.

        All numbers of all records are computed together: doing some for each frame would take as
        long as everything else.
        """
        put_off_ms = np.concatenate(self.put_off_ms) if self.put_off_ms else None
        lengths = np.frombuffer(b"".join(self.lengths), LENGTH).astype(np.int64)
        counts = np.array([len(one) for one in self.lengths], np.int64) // LENGTH.itemsize
        # First computed as if all were contiguous; then each stretch is moved to its real place.
        ends = np.cumsum(lengths)
        last = np.cumsum(counts) - 1
        stretch_ends = ends[last]
        moved = np.array(self.begins, np.int64) - np.concatenate(([0], stretch_ends[:-1]))
        is_whole = stretch_ends + moved <= np.array(self.bounds, np.int64)
        if not is_whole.all() or lengths.min() < RECORD_FIXED_BYTES:
            raise not_adding_up(offset)
        positions = ends - lengths + np.repeat(moved, counts)
        data = self.data[0] if len(self.data) == 1 else b"".join(self.data)
        return Placed(data, positions, lengths, put_off_ms)


class Gathered:
    """Frames whose rows are not returned yet."""

    def __init__(self, columns: Sequence[str], table: Table) -> None:
        self._columns = columns
        self._table = table
        self._depth = depth_of(name for name in columns if name not in Runs.NAMES)
        self._copied: list[Placed] = []
        self._copied_bytes = 0
        #: Records that are not copied yet.
        self.here = InBlock()
        self.runs = Runs()

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.runs.rows

    @property
    def is_full(self) -> bool:
        """Whether it is enough for a batch."""
        return self._data_bytes >= BATCH_BYTES or self.rows >= BATCH_ROWS

    def ends_before(self, frame: ScannedFrame) -> bool:
        """Whether a batch should end before the next frame.

        If not, and the frame was read with another block, the previous block is released.
        """
        if not self.rows or frame.block is self.here.block:
            return False
        is_much = self._depth is Depth.WHOLE and self._data_bytes >= _ENOUGH_BYTES
        is_enough = is_much or self.rows >= ENOUGH_ROWS
        if not is_enough:
            self._copy()
        return is_enough

    def batch(self) -> pa.RecordBatch:
        """The gathered rows as a batch. Requires: there are some."""
        records = None if self._depth is Depth.NOTHING else self._records()
        arrays = [
            self.runs.column(name, self._table)
            if records is None or name in Runs.NAMES
            else records.column(name)
            for name in self._columns
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self._table.arrow(self._columns))

    @property
    def _data_bytes(self) -> int:
        return self._copied_bytes + self.here.data_bytes

    def _records(self) -> Records:
        if not self._copied:
            return Records(self.here.placed(self.runs.offsets[0]))
        self._copy()
        return Records(Placed.joined(self._copied))

    def _copy(self) -> None:
        """Copy the needed parts from the blocks, and release them."""
        if self._depth is not Depth.NOTHING and self.here.lengths:
            copied = self.here.placed(self.runs.offsets[0]).copied(self._depth)
            self._copied.append(copied)
            self._copied_bytes += len(copied.data)
        self.here = InBlock()


@dataclass(slots=True)
class Runs:
    """Runs of records, each of one subject in one frame, and the columns that are constant, or count up, within one."""

    NAMES: ClassVar[frozenset[str]] = frozenset(
        {"subject", "sequence", "physical_offset", "record_number", "stored_at"}
    )

    #: Number of records of all runs.
    rows: int = 0
    #: For each run: subject, sequence and place in its frame of the first record, number of
    #: records.
    subjects: list[str] = field(default_factory=list)
    first_sequences: list[int] = field(default_factory=list)
    first_numbers: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    #: Values of its frame.
    offsets: list[int] = field(default_factory=list)
    stored_at_ms: list[int] = field(default_factory=list)

    def column(self, name: str, table: Table) -> pa.Array:
        """The column of `NAMES` with this name, in that table."""
        match name:
            case "subject":
                return repeated_text(self.subjects, self._repeated(range(len(self.subjects))))
            case "sequence" if table is not MESSAGES:
                return pa.nulls(self.rows, pa.int64())
            case "sequence":
                return pa.array(self._counted(self.first_sequences))
            case "record_number":
                return pa.array(self._counted(self.first_numbers).astype(np.int32))
            case "physical_offset":
                return pa.array(self._repeated(self.offsets))
            case _:
                return times(self._repeated(self.stored_at_ms))

    def _repeated(self, values: Sequence[int]) -> Numbers:
        return np.repeat(np.array(values, np.int64), np.array(self.counts, np.int64))

    def _counted(self, firsts: Sequence[int]) -> Numbers:
        counts = np.array(self.counts, np.int64)
        begins = np.array(firsts, np.int64) - (np.cumsum(counts) - counts)
        return np.repeat(begins, counts) + np.arange(self.rows)


def not_adding_up(offset: int) -> ProtocolError:
    """The error for a frame, or a later one, whose lengths do not match its records."""
    return ProtocolError(
        "record lengths do not add up to the frame, or to one of those after it", offset=offset
    )


#: Bytes of each record in the columns in front of the records.
_LENGTH_BYTES: Final = LENGTH.itemsize
_TAG_HASH_BYTES: Final = 8
#: Most bytes of a subject in the table of a frame: its number of records, and its name with the length.
_SUBJECT_BYTES_MAX: Final = 5 + NAME_BYTES_MAX
#: Frames whose messages have a place in their subject, and frames of delayed messages.
QUEUED_KINDS: Final = frozenset(kind for kind in FrameKind if kind.name in {"MESSAGES", "RELEASED"})
SCHEDULED_KINDS: Final = frozenset(
    kind for kind in FrameKind if kind.name in {"DELAYED", "RESCHEDULED"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The rows and columns to read of a part of the log."""

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
    """The records of a message frame by subject, without the broker's internal subjects."""
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
    """The runs of a message frame, and the position after its subject table."""
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
    """Append the selected records of a frame to the gathered ones."""
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
    """Whether a subject is selected. The broker's internal subjects never are, even if a query names them."""
    return not subject.startswith(OWN_PREFIX) and (subjects is None or subject in subjects)
