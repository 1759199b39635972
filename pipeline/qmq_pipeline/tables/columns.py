"""Arrow columns from many pieces of one buffer, without touching the pieces one by one.

Every record is a run of consecutive fields. The boundaries of the fields of all records, written
one after the other, are the offsets of an Arrow array over the buffer itself. Taking every fifth of
its values copies one field of every record, in C++: ten million fields a second and core, where
slicing in Python makes half a million.

Not for: the meaning of fields; that is `rows/decode.py`.
"""

from __future__ import annotations

import binascii
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

Numbers = np.ndarray[Any, np.dtype[Any]]

TIME: Final = pa.timestamp("us", tz="UTC")


class Pieces:
    """Consecutive pieces of a buffer; `boundaries` has the shape (rows, fields), each row in order."""

    def __init__(self, data: bytes | memoryview, boundaries: Numbers) -> None:
        """Requires: boundaries never decrease, not even from one row to the next, and are below 2³¹."""
        flat = np.ascontiguousarray(boundaries, dtype=np.int32).reshape(-1)
        self._fields = boundaries.shape[1]
        self._rows = boundaries.shape[0]
        self._array = pa.BinaryArray.from_buffers(
            pa.binary(), max(0, len(flat) - 1), [None, pa.py_buffer(flat), pa.py_buffer(data)]
        )

    def binary(self, field: int, mask: Numbers | None = None) -> pa.Array:
        """Each row's bytes from boundary `field` to the next one; null where `mask` is set."""
        numbers = np.arange(field, self._rows * self._fields, self._fields, dtype=np.int32)
        return pc.take(self._array, pa.array(numbers, mask=mask), boundscheck=False)

    def text(self, field: int, mask: Numbers | None = None) -> pa.Array:
        """The same as text. The bytes are unchecked, so invalid UTF-8 is replaced."""
        return as_text(self.binary(field, mask))


def as_text(array: pa.Array) -> pa.Array:
    """Bytes as text; invalid UTF-8 becomes U+FFFD."""
    try:
        return pc.cast(array, pa.string())
    except pa.ArrowInvalid:
        values = [
            None if one is None else one.decode("utf-8", "replace") for one in array.to_pylist()
        ]
        return pa.array(values, pa.string())


def values_of(array: pa.Array) -> tuple[Numbers, memoryview]:
    """Offsets of texts or bytes, and the buffer they point into; nulls are empty."""
    _, offsets, data = array.buffers()
    if offsets is None:
        return np.zeros(1, np.int32), memoryview(b"")
    width = np.dtype(np.int32).itemsize
    ends = np.frombuffer(offsets, np.int32, len(array) + 1, array.offset * width)
    return ends - ends[0], memoryview(data or b"")[int(ends[0]) : int(ends[-1])]


def hex_text(rows: Numbers) -> pa.Array:
    """Rows of bytes, shape (n, width), as hex digits."""
    count, width = rows.shape
    digits = binascii.hexlify(np.ascontiguousarray(rows).data)
    offsets = np.arange(count + 1, dtype=np.int32) * (2 * width)
    return pa.StringArray.from_buffers(count, pa.py_buffer(offsets), pa.py_buffer(digits))


def times(milliseconds: Numbers, mask: Numbers | None = None) -> pa.Array:
    """Milliseconds since 1970 UTC as times; null where `mask` is set."""
    return pa.array(milliseconds.astype(np.int64) * 1000, mask=mask).view(TIME)


def longs(numbers: Numbers, mask: Numbers | None = None) -> pa.Array:
    """Numbers of 64 bits; unsigned ones keep their bits."""
    return pa.array(numbers.astype(np.int64), mask=mask)


def repeated_text(values: list[str], codes: Numbers) -> pa.Array:
    """The value for each code."""
    return pa.array(values, pa.string()).take(pa.array(codes))
