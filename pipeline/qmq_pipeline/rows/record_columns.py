"""Extracts the fields of thousands of records at once, as columns, without copying the records.

The format of a record is in `qmq_client/wire/record.py` and `docs/format/record.md`; a test gives
random records to this module and to the wire's decoder, and compares the answers.

The broker checks only the checksum and the flags of a record, so a sender can store bytes that are
not a record. Such a row has `body_kind` -1, its bytes after the fixed part as the body, and no key,
tags or headers: one faulty sender must not stop the pipeline. Unknown flags belong to a later
version, because the broker that stored them knew them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from functools import cached_property
from itertools import accumulate
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from qmq_client.wire.record import (
    DELAYED_FLAG,
    DUE_BYTES,
    EXPIRES_FLAG,
    KNOWN_FLAGS,
    RECORD_FIXED_BYTES,
    TIME_MAX_MS,
)
from qmq_pipeline.errors import LaterVersionError
from qmq_pipeline.tables.columns import Numbers, Pieces, hex_text, longs, times, values_of

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
#: Whether each value of the flags is known.
_IS_KNOWN: Final = np.isin(np.arange(256), list(KNOWN_FLAGS))
_EXPIRES_BYTES: Final = 8
_TIME: Final = np.dtype(">u8")
#: Bytes in front of each header.
_PAIR: Final = np.dtype([("name_bytes", "u1"), ("value_bytes", ">u2")])
#: Fields of a record after its fixed part, as indexes into `Pieces`.
_KEY, _TAGS, _HEADERS, _EXPIRES, _BODY = range(5)
_NOT_A_RECORD: Final = -1


class Depth(IntEnum):
    """The part of each record, from its beginning, that columns need."""

    NOTHING = 0
    FIXED = 1
    #: The whole part in front of the body.
    FRONT = 2
    WHOLE = 3


#: Columns that need less, or more, than the part in front of the body.
_DEPTHS: Final = {
    **dict.fromkeys(
        ("message_id", "producer", "counter", "record_crc", "born_at", "body_kind", "body_bytes"),
        Depth.FIXED,
    ),
    "body": Depth.WHOLE,
}


def depth_of(columns: Iterable[str]) -> Depth:
    """How much these columns need of each record."""
    return max((_DEPTHS.get(name, Depth.FRONT) for name in columns), default=Depth.NOTHING)


class Placed(NamedTuple):
    """Records with their positions in memory, which may hold other bytes, and perhaps only parts of records."""

    data: bytes | memoryview
    positions: Numbers
    #: Of the whole records.
    lengths: Numbers
    #: Due times set by a rescheduling, -1 for the record's own; None if there are none.
    put_off_ms: Numbers | None

    def copied(self, depth: Depth) -> Placed:
        """The needed parts of the same records, copied into separate memory."""
        if depth is Depth.WHOLE:
            return self._replace(data=bytes(self.data))
        if depth is Depth.FIXED:
            fixed = _taken(self.data, self.positions, _FIXED).view(np.uint8).data
            return self._replace(data=fixed, positions=np.arange(0, len(fixed), _FIXED.itemsize))
        positions, fronts = Records(self).fronts()
        return self._replace(data=fronts, positions=positions)

    @staticmethod
    def joined(parts: Sequence[Placed]) -> Placed:
        """All of these, in order. Requires: at least one; due times are set in all of them or in none."""
        begins = accumulate((len(part.data) for part in parts[:-1]), initial=0)
        positions = [part.positions + begin for part, begin in zip(parts, begins, strict=True)]
        put_off_ms = [part.put_off_ms for part in parts if part.put_off_ms is not None]
        return Placed(
            b"".join([part.data for part in parts]),
            np.concatenate(positions),
            np.concatenate([part.lengths for part in parts]),
            np.concatenate(put_off_ms) if put_off_ms else None,
        )


class Records:
    """Columns read from records; intermediate values for several columns are computed once, on demand."""

    def __init__(self, placed: Placed) -> None:
        """Requires: the needed part of each record, in fewer than 2³⁰ bytes in total, so that positions fit 32 bits."""
        self._data = placed.data
        self._positions = placed.positions.astype(np.int32)
        #: The end of each record, if all of it were there.
        self._next_positions = (placed.positions + placed.lengths).astype(np.int32)
        self._put_off_ms = placed.put_off_ms
        self._fixed = _taken(placed.data, placed.positions, _FIXED)

    def fronts(self) -> tuple[Numbers, memoryview]:
        """The parts in front of the bodies: the start of each record, and the contiguous bytes."""
        bounds = np.stack((self._positions, self._boundaries[:, _BODY]), axis=1)
        ends, fronts = values_of(Pieces(self._data, bounds).binary(0))
        return ends[:-1], fronts

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
        return hex_text(self._fixed.view(np.uint8).reshape(-1, RECORD_FIXED_BYTES)[:, _ID])

    def _producer(self) -> pa.Array:
        return longs(self._fixed["producer"])

    def _counter(self) -> pa.Array:
        return longs(self._fixed["counter"])

    def _record_crc(self) -> pa.Array:
        return longs(self._fixed["crc"])

    def _born_at(self) -> pa.Array:
        return times(_bounded(self._fixed["born_at_ms"]))

    def _due_at(self) -> pa.Array:
        return self._time(self._positions + RECORD_FIXED_BYTES, self._has_flag(DELAYED_FLAG))

    def _now_due_at(self) -> pa.Array:
        own = self._due_at()
        if self._put_off_ms is None or not (self._put_off_ms >= 0).any():
            return own
        is_put_off = self._put_off_ms >= 0
        return pc.if_else(pa.array(is_put_off), times(np.maximum(self._put_off_ms, 0)), own)

    def _expires_at(self) -> pa.Array:
        return self._time(self._boundaries[:, _EXPIRES], self._has_flag(EXPIRES_FLAG))

    def _key(self) -> pa.Array:
        return self._pieces.text(_KEY, self._length(_KEY) == 0)

    def _body_kind(self) -> pa.Array:
        kinds = (self._flags & _BODY_KIND_MASK).astype(np.int32)
        return pa.array(np.where(self._is_record, kinds, _NOT_A_RECORD).astype(np.int32))

    def _body_bytes(self) -> pa.Array:
        return pa.array(self._next_positions - self._boundaries[:, _BODY])

    def _body(self) -> pa.Array:
        bounds = np.stack((self._boundaries[:, _BODY], self._next_positions), axis=1)
        return Pieces(self._data, bounds).binary(0)

    def _length(self, piece: int) -> Numbers:
        lengths: Numbers = self._boundaries[:, piece + 1] - self._boundaries[:, piece]
        return lengths

    def _has_flag(self, flag: int) -> Numbers:
        has: Numbers = ((self._flags & flag) != 0) & self._is_record
        return has

    @cached_property
    def _flags(self) -> Numbers:
        return np.ascontiguousarray(self._fixed["flags"])

    @cached_property
    def _found(self) -> tuple[Numbers, Numbers]:
        """The boundaries of key, tags, headers, expiry and body, and which rows are valid records."""
        fixed, flags, next_positions = self._fixed, self._flags, self._next_positions
        boundaries = np.empty((len(fixed), _BODY + 1), np.int32)
        first = self._positions + np.int32(RECORD_FIXED_BYTES)
        lengths = (
            np.where(flags & DELAYED_FLAG, np.int32(DUE_BYTES), np.int32(0)),
            fixed["key_bytes"],
            fixed["tags_bytes"],
            fixed["headers_bytes"],
            np.where(flags & EXPIRES_FLAG, np.int32(_EXPIRES_BYTES), np.int32(0)),
        )
        here = first
        for piece, length in enumerate(lengths):
            here = here + length.astype(np.int32)
            boundaries[:, piece] = here
        is_known = _IS_KNOWN[flags]
        if not is_known.all():
            raise LaterVersionError(
                source="commit log",
                reason=f"it has a record with flags {flags[~is_known][0]:#04x}, which this version does not know",
            )
        is_record: Numbers = boundaries[:, _BODY] <= next_positions
        if not is_record.all():
            strange = np.flatnonzero(~is_record)
            boundaries[strange] = first[strange, None]
        return boundaries, is_record

    def _time(self, positions: Numbers, is_there: Numbers) -> pa.Array:
        milliseconds = np.zeros(len(positions), np.int64)
        if is_there.any():
            found = _taken(self._data, positions[is_there], _TIME)
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
        """The number of headers of each row, and all their names and values in order.

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
        here, after = self._boundaries[rows, _HEADERS], self._boundaries[rows, _EXPIRES]
        entries = np.cumsum(counts) - counts
        found = np.zeros((int(counts.sum()), 3), np.int32)
        is_good = here + _PAIR.itemsize * counts <= after
        left = np.arange(len(rows))
        # A sender may claim thousands of headers: a round processes only the remaining rows, and drops false claims.
        for round_ in range(int(counts[is_good].max(initial=0))):
            left = left[(counts[left] > round_) & is_good[left]]
            # Mostly all rows have the same number of headers, and a slice costs less than an index array.
            at = slice(None) if len(left) == len(rows) else left
            first, bound = here[at], after[at]
            is_good[at] &= first + np.int32(_PAIR.itemsize) <= bound
            pair = np.minimum(first, np.int32(len(self._data) - _PAIR.itemsize))
            lengths = _taken(self._data, pair, _PAIR)
            name = pair + np.int32(_PAIR.itemsize)
            value = name + lengths["name_bytes"]
            end = value + lengths["value_bytes"]
            is_good[at] &= end <= bound
            entry = entries[at] + round_
            found[entry, 0], found[entry, 1], found[entry, 2] = name, value, end
            here[at] = end
        is_good &= here == after
        return found, is_good


def _taken(data: bytes | memoryview, positions: Numbers, kind: np.dtype[Any]) -> Numbers:
    """Values at these positions, each copied as one piece of memory: numpy would copy field by field."""
    count = len(data) - kind.itemsize + 1
    piece = f"V{kind.itemsize}"
    everywhere: Numbers = np.ndarray((count,), piece, buffer=data, strides=(1,))
    return everywhere[positions].view(kind)


def _bounded(milliseconds: Numbers) -> Numbers:
    """Times from a sender, clipped to the range of a table."""
    return np.minimum(milliseconds, TIME_MAX_MS).astype(np.int64)


def _offsets(counts: Numbers) -> pa.Array:
    offsets = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    return pa.array(offsets)
