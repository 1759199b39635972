"""Frames on their way into a batch: what its columns want of them, and no more than that.

The log is read in blocks. Records stay where they were read until their block ends; if that is enough for a
batch, its columns are made there. Otherwise what is wanted of the records is copied and the block
released, so that messages with long bodies, of which a block holds few, come in batches as large as
others do: a batch costs as much as some thousand of its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final

import numpy as np
import pyarrow as pa

from qmq_broker.storage.logs.frame_scan import SCAN_BLOCK_BYTES, ScannedFrame
from qmq_client.wire.errors import ProtocolError
from qmq_client.wire.record import RECORD_FIXED_BYTES
from qmq_pipeline.rows.record_columns import Depth, Placed, Records, depth_of
from qmq_pipeline.tables.columns import Numbers, repeated_text, times
from qmq_pipeline.tables.schemas import MESSAGES
from qmq_pipeline.tables.table import Table

#: A batch is passed on after this many bytes of frames or rows: small enough for the caches and for
#: the heap of a small executor, large enough that the work per batch does not matter.
BATCH_BYTES: Final = 16 * 1024 * 1024
BATCH_ROWS: Final = 20_000
#: With this much, a batch ends where that costs nothing: with the block that was read, or with a
#: subject.
ENOUGH_ROWS: Final = 5_000
#: The same in bytes, where all of them are wanted.
_ENOUGH_BYTES: Final = SCAN_BLOCK_BYTES * 3 // 4
#: The column of lengths in front of the records of a frame.
LENGTH: Final = np.dtype(">u4")


@dataclass(slots=True)
class InBlock:
    """Records where they were read."""

    data: list[bytes | memoryview] = field(default_factory=list)
    data_bytes: int = 0
    #: The block that holds the last of the data, and where in it that begins and ends.
    block: bytes = b""
    block_first: int = 0
    block_next: int = 0
    #: For each stretch of records that lie back to back: their lengths as in the frame, where the
    #: first begins in the joined data, and where the last must have ended.
    lengths: list[bytes | memoryview] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)
    bounds: list[int] = field(default_factory=list)
    #: For each record the due time it was rescheduled to, or -1; only for delayed messages.
    put_off_ms: list[Numbers] = field(default_factory=list)

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

    def placed(self, offset: int) -> Placed:
        """All of them; `offset` is that of the first frame, for errors. Requires: there is one.

        All numbers of all records are computed together: doing some for each frame would take as
        long as everything else.
        """
        put_off_ms = np.concatenate(self.put_off_ms) if self.put_off_ms else None
        lengths = np.frombuffer(b"".join(self.lengths), LENGTH).astype(np.int64)
        counts = np.array([len(one) for one in self.lengths], np.int64) // LENGTH.itemsize
        # As if all lay back to back; then each stretch is moved to its real place.
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
    """Frames whose rows are not passed on yet."""

    def __init__(self, columns: Sequence[str], table: Table) -> None:
        self._columns = columns
        self._table = table
        self._depth = depth_of(name for name in columns if name not in Runs.NAMES)
        self._copied: list[Placed] = []
        self._copied_bytes = 0
        #: What was not copied yet.
        self.here = InBlock()
        self.runs = Runs()

    @property
    def rows(self) -> int:
        """How many there are."""
        return self.runs.rows

    @property
    def is_full(self) -> bool:
        """Whether it makes a batch that should not become larger."""
        return self._data_bytes >= BATCH_BYTES or self.rows >= BATCH_ROWS

    def ends_before(self, frame: ScannedFrame) -> bool:
        """Whether a batch should end before the next frame.

        If it should not, and the frame was read with another block, the one before is released.
        """
        if not self.rows or frame.block is self.here.block:
            return False
        is_much = self._depth is Depth.WHOLE and self._data_bytes >= _ENOUGH_BYTES
        is_enough = is_much or self.rows >= ENOUGH_ROWS
        if not is_enough:
            self._copy()
        return is_enough

    def batch(self) -> pa.RecordBatch:
        """The rows of all that was gathered. Requires: there are some."""
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
        """Copy what is wanted from the blocks, and release them."""
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

    #: Of all runs together.
    rows: int = 0
    #: For each run: subject, sequence and place in its frame of the first record, number of
    #: records.
    subjects: list[str] = field(default_factory=list)
    first_sequences: list[int] = field(default_factory=list)
    first_numbers: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    #: Of its frame.
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
    """The error for a frame, or one behind it, whose lengths are not those of its records."""
    return ProtocolError(
        "record lengths do not add up to the frame, or to one of those behind it", offset=offset
    )
