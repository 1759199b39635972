"""Frames of the commit log as rows of `messages`, a column at a time.

The frames and their tables are read by `qmq_client.wire.frame`; this gathers the fields of the records,
which stand in `qmq_client/wire/record.py` and `docs/format/record.md`, from thousands of them at once.
A test gives random records to both this and the wire's decoder and holds the answers equal.

The broker stores what passes the frame's checksum and never looks into a record, so a sender can store
bytes that are none. Such a row has `body_kind` -1, its bytes behind the fixed part as the body, and no
key, tags or headers: one strange sender must not stop everybody's pipeline.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, compress
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from qmq_broker.storage.logs.frame_scan import ScannedFrame
from qmq_client.wire.errors import ProtocolError
from qmq_client.wire.frame import FrameKind, SubjectRun, parse_subjects
from qmq_client.wire.names import OWN_PREFIX
from qmq_client.wire.record import DUE_BYTES, RECORD_FIXED_BYTES, TIME_MAX_MS
from qmq_pipeline.columns import Numbers, Pieces, hex_text, longs, repeated_text, times
from qmq_pipeline.schemas import MESSAGES, Table

#: A batch is handed on after so many bytes of frames or so many rows: small enough for the caches
#: and the heap of a small executor, large enough that the work for a batch does not count.
BATCH_BYTES: Final = 16 * 1024 * 1024
BATCH_ROWS: Final = 20_000
#: The fixed part of a record, as `record.py` writes it.
_FIXED: Final = np.dtype(
    [
        ("crc", ">u4"),
        ("producer", ">u8"),
        ("counter", ">u8"),
        ("flags", "u1"),
        ("key_bytes", "u1"),
        ("tags_bytes", ">u2"),
        ("headers_bytes", ">u2"),
        ("headers", ">u2"),
        ("born_at_ms", ">u8"),
    ]
)
_ID: Final = slice(4, 20)
_BODY_KIND_MASK: Final = 0b11
_DELAYED_FLAG: Final = 0b100
_EXPIRES_FLAG: Final = 0b1000
_EXPIRES_BYTES: Final = 8
_PAIR_BYTES: Final = 3
#: Fields of a record behind its fixed part, as numbers of `Pieces`.
_KEY, _TAGS, _HEADERS, _EXPIRES, _BODY = range(5)
_NOT_A_RECORD: Final = -1
#: Columns of a frame in front of its records.
_LENGTH_BYTES: Final = 4
_TAG_HASH_BYTES: Final = 8
#: Frames whose messages have a place in their subject, and those of messages that wait for theirs.
QUEUED_KINDS: Final = frozenset(kind for kind in FrameKind if kind.name in {"MESSAGES", "RELEASED"})
SCHEDULED_KINDS: Final = frozenset(
    kind for kind in FrameKind if kind.name in {"DELAYED", "RESCHEDULED"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which rows and columns of a part of the log are wanted."""

    #: Those of `MESSAGES`, in order.
    columns: tuple[str, ...] = MESSAGES.names
    table: Table = MESSAGES
    #: None for all.
    subjects: frozenset[str] | None = None
    #: Stored at this time or later, and before that one; ms since 1970.
    first_stored_at_ms: int = 0
    next_stored_at_ms: int = TIME_MAX_MS


@dataclass(slots=True)
class _Gathered:
    """Frames whose rows are not handed on yet."""

    data: list[bytes] = field(default_factory=list)
    data_bytes: int = 0
    rows: int = 0
    #: Of each record: where it begins in the joined data, and its length.
    positions: list[Numbers] = field(default_factory=list)
    lengths: list[Numbers] = field(default_factory=list)
    #: Of each run: subject, sequence and place in its frame of the first record, records.
    subjects: list[str] = field(default_factory=list)
    first_sequences: list[int] = field(default_factory=list)
    first_numbers: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    stored_at_ms: list[int] = field(default_factory=list)


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
        _gather(gathered, frame, selection.subjects)
        if gathered.data_bytes >= BATCH_BYTES or gathered.rows >= BATCH_ROWS:
            yield _batch(gathered, selection)
            gathered = _Gathered()
    if gathered.rows:
        yield _batch(gathered, selection)


def frame_runs(frame: ScannedFrame) -> tuple[SubjectRun, ...]:
    """Which sequences of which subjects are in a message frame; not those of the broker's own."""
    runs = parse_subjects(frame.data, frame.header)[0]
    return tuple(run for run in runs if not run.subject.startswith(OWN_PREFIX))


def _gather(gathered: _Gathered, frame: ScannedFrame, subjects: frozenset[str] | None) -> None:
    runs, position = parse_subjects(frame.data, frame.header)
    count = frame.header.record_count
    lengths = np.frombuffer(frame.data, ">u4", count, position).astype(np.int64)
    ends = position + (_LENGTH_BYTES + _TAG_HASH_BYTES) * count + np.cumsum(lengths)
    if ends[-1] > len(frame.data):
        raise ProtocolError("record lengths do not add up to the frame", offset=position)
    counts = [run.count for run in runs]
    first_numbers = list(accumulate(counts, initial=0))[:-1]
    kept = [_is_wanted(run.subject, subjects) for run in runs]
    if not all(kept):
        mask = np.repeat(np.array(kept), counts)
        lengths, ends = lengths[mask], ends[mask]
        runs = tuple(compress(runs, kept))
        counts, first_numbers = list(compress(counts, kept)), list(compress(first_numbers, kept))
    if not runs:
        return
    gathered.lengths.append(lengths)
    gathered.positions.append(ends - lengths + gathered.data_bytes)
    gathered.subjects += [run.subject for run in runs]
    gathered.first_sequences += [run.first_sequence for run in runs]
    gathered.first_numbers += first_numbers
    gathered.counts += counts
    gathered.offsets += [frame.offset] * len(runs)
    gathered.stored_at_ms += [frame.header.stored_at_ms] * len(runs)
    gathered.data.append(frame.data)
    gathered.data_bytes += len(frame.data)
    gathered.rows += len(lengths)


def _is_wanted(subject: str, subjects: frozenset[str] | None) -> bool:
    is_own = subject.startswith(OWN_PREFIX)
    return not is_own if subjects is None else subject in subjects


def _batch(gathered: _Gathered, selection: Selection) -> pa.RecordBatch:
    runs = _Runs(gathered)
    needs_records = not _Runs.NAMES.issuperset(selection.columns)
    records = _Records(gathered) if needs_records else None
    arrays = [
        runs.column(name, selection.table)
        if records is None or name in _Runs.NAMES
        else records.column(name)
        for name in selection.columns
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=selection.table.arrow(selection.columns))


class _Runs:
    """Columns that are the same, or count on, within a run."""

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
        code_of = {name: code for code, name in enumerate(dict.fromkeys(self._gathered.subjects))}
        codes = np.array([code_of[name] for name in self._gathered.subjects], np.int32)
        return repeated_text(list(code_of), np.repeat(codes, self._counts))


class _Records:
    """Columns that stand in the records; what several of them need is made once, when it is needed."""

    def __init__(self, gathered: _Gathered) -> None:
        self._data = b"".join(gathered.data)
        self._bytes = np.frombuffer(self._data, np.uint8)
        self._positions = np.concatenate(gathered.positions)
        self._next_positions = self._positions + np.concatenate(gathered.lengths)
        windows = np.lib.stride_tricks.sliding_window_view(self._bytes, RECORD_FIXED_BYTES)
        self._rows = windows[self._positions]
        self._fixed = self._rows.view(_FIXED)[:, 0]

    @cached_property
    def _boundaries(self) -> Numbers:
        return self._found[0]

    @cached_property
    def _is_record(self) -> Numbers:
        return self._found[1]

    @cached_property
    def _pieces(self) -> Pieces:
        return Pieces(self._data, self._boundaries)

    def column(self, name: str) -> pa.Array:
        column: pa.Array = getattr(self, f"_{name}")()
        return column

    def _message_id(self) -> pa.Array:
        return hex_text(self._rows[:, _ID])

    def _producer(self) -> pa.Array:
        return longs(self._fixed["producer"])

    def _counter(self) -> pa.Array:
        return longs(self._fixed["counter"])

    def _record_crc(self) -> pa.Array:
        return longs(self._fixed["crc"])

    def _born_at(self) -> pa.Array:
        return times(_bounded(self._fixed["born_at_ms"]))

    def _due_at(self) -> pa.Array:
        return self._time(self._positions + RECORD_FIXED_BYTES, self._has_flag(_DELAYED_FLAG))

    def _expires_at(self) -> pa.Array:
        return self._time(self._boundaries[:, _EXPIRES], self._has_flag(_EXPIRES_FLAG))

    def _key(self) -> pa.Array:
        return self._pieces.text(_KEY, self._length(_KEY) == 0)

    def _body_kind(self) -> pa.Array:
        kinds = (self._fixed["flags"] & _BODY_KIND_MASK).astype(np.int32)
        return pa.array(np.where(self._is_record, kinds, _NOT_A_RECORD).astype(np.int32))

    def _body_bytes(self) -> pa.Array:
        return pa.array(self._length(_BODY).astype(np.int32))

    def _body(self) -> pa.Array:
        return self._pieces.binary(_BODY)

    def _length(self, piece: int) -> Numbers:
        lengths: Numbers = self._boundaries[:, piece + 1] - self._boundaries[:, piece]
        return lengths

    def _has_flag(self, flag: int) -> Numbers:
        has: Numbers = ((self._fixed["flags"] & flag) != 0) & self._is_record
        return has

    @cached_property
    def _found(self) -> tuple[Numbers, Numbers]:
        """Where key, tags, headers, expiry and body begin and the body ends; which rows are records."""
        fixed, next_positions = self._fixed, self._next_positions
        flags = fixed["flags"]
        boundaries = np.empty((len(fixed), 6), np.int64)
        first = self._positions + RECORD_FIXED_BYTES
        boundaries[:, _KEY] = first + DUE_BYTES * ((flags & _DELAYED_FLAG) != 0)
        boundaries[:, _TAGS] = boundaries[:, _KEY] + fixed["key_bytes"]
        boundaries[:, _HEADERS] = boundaries[:, _TAGS] + fixed["tags_bytes"]
        boundaries[:, _EXPIRES] = boundaries[:, _HEADERS] + fixed["headers_bytes"]
        expires_bytes = _EXPIRES_BYTES * ((flags & _EXPIRES_FLAG) != 0)
        boundaries[:, _BODY] = boundaries[:, _EXPIRES] + expires_bytes
        boundaries[:, _BODY + 1] = next_positions
        known_flags = _BODY_KIND_MASK | _DELAYED_FLAG | _EXPIRES_FLAG
        is_record = (
            (boundaries[:, _BODY] <= next_positions)
            & ((flags & ~np.uint8(known_flags)) == 0)
            & ((flags & _BODY_KIND_MASK) <= 2)
        )
        if not is_record.all():
            strange = np.flatnonzero(~is_record)
            boundaries[strange, : _BODY + 1] = first[strange, None]
        return boundaries, is_record

    def _time(self, positions: Numbers, is_there: Numbers) -> pa.Array:
        milliseconds = np.zeros(len(positions), np.int64)
        if is_there.any():
            windows = np.lib.stride_tricks.sliding_window_view(self._bytes, DUE_BYTES)
            found = windows[positions[is_there]].view(">u8")[:, 0]
            milliseconds[is_there] = _bounded(found)
        return times(milliseconds, ~is_there)

    def _tags(self) -> pa.Array:
        lengths = self._length(_TAGS)
        if not lengths.any():
            empty = pa.array(np.zeros(len(lengths) + 1, np.int32))
            return pa.ListArray.from_arrays(empty, pa.array([], pa.string()))
        has_tags = lengths != 0
        split = pc.split_pattern(self._pieces.text(_TAGS), ",")
        counts = np.where(has_tags, pc.list_value_length(split).to_numpy(), 0)
        values = split.filter(pa.array(has_tags)).flatten()
        return pa.ListArray.from_arrays(_offsets(counts), values)

    def _headers(self) -> pa.Array:
        counts, pieces = self._header_pieces()
        kind = pa.map_(pa.string(), pa.string())
        if pieces is None:
            none = pa.array([], pa.string())
            return pa.MapArray.from_arrays(_offsets(counts), none, none).cast(kind)
        return pa.MapArray.from_arrays(_offsets(counts), pieces.text(0), pieces.text(1)).cast(kind)

    def _header_pieces(self) -> tuple[Numbers, Pieces | None]:
        """How many headers each row has, and all their names and values in order.

        All first headers are found at once, then all second ones, and so on: as many rounds as the
        row with the most headers has. Headers that do not add up are left out as a whole.
        """
        counts = np.where(self._is_record, self._fixed["headers"], 0).astype(np.int64)
        while counts.any():
            rows = np.flatnonzero(counts)
            found, is_good = self._walk_headers(rows, counts[rows])
            if is_good.all():
                return counts, Pieces(self._data, found)
            counts[rows[~is_good]] = 0
        return counts, None

    def _walk_headers(self, rows: Numbers, counts: Numbers) -> tuple[Numbers, Numbers]:
        here = self._boundaries[rows, _HEADERS].copy()
        after = self._boundaries[rows, _EXPIRES]
        entries = np.cumsum(counts) - counts
        found = np.zeros((int(counts.sum()), 3), np.int64)
        is_good = here + _PAIR_BYTES * counts <= after
        for round_ in range(int(counts.max())):
            at = np.flatnonzero((counts > round_) & is_good)
            first = here[at]
            is_good[at] &= first + _PAIR_BYTES <= after[at]
            first = np.minimum(first, len(self._bytes) - _PAIR_BYTES)
            name = first + _PAIR_BYTES
            value = name + self._bytes[first]
            high = self._bytes[first + 1].astype(np.int64)
            end = value + high * 256 + self._bytes[first + 2]
            is_good[at] &= end <= after[at]
            found[entries[at] + round_] = np.stack((name, value, end), axis=1)
            here[at] = end
        is_good &= here == after
        return found, is_good


def _bounded(milliseconds: Numbers) -> Numbers:
    """Times a sender may have made up, brought into what a table can hold."""
    return np.minimum(milliseconds, TIME_MAX_MS).astype(np.int64)


def _offsets(counts: Numbers) -> pa.Array:
    offsets = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    return pa.array(offsets)
