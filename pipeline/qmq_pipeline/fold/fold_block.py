"""The messages of one group in one block of sequences, as an array and as rows of a table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import pyarrow as pa

from qmq_pipeline.tables.columns import TIME, Numbers
from qmq_pipeline.tables.schemas import DELIVERIES

#: Names of the outcomes; the arrays hold their index.
OUTCOMES: Final = (
    "",
    "in flight",
    "given back",
    "acked",
    "dead",
    "skipped",
    "filtered",
    "waiting",
    "set aside",
)
NONE, IN_FLIGHT, GIVEN_BACK, ACKED, DEAD, SKIPPED, FILTERED, WAITING, SET_ASIDE = range(
    len(OUTCOMES)
)
BATCH_ROWS: Final = 50_000
_ROOM: Final = 1024
_STATE: Final = np.dtype(
    [
        ("first_us", "i8"),
        ("last_us", "i8"),
        ("settled_us", "i8"),
        ("aside_us", "i8"),
        ("back_us", "i8"),
        ("attempts", "i4"),
        ("text", "i4"),
        ("outcome", "i1"),
    ]
)
_TIMES: Final = {
    "first_us": "first_delivered_at",
    "last_us": "last_delivered_at",
    "settled_us": "settled_at",
    "aside_us": "set_aside_at",
    "back_us": "brought_back_at",
}


class Texts:
    """Reasons and errors of one group, each pair once; the arrays hold their numbers."""

    def __init__(self) -> None:
        self._pairs: list[tuple[str | None, str | None]] = [(None, None)]
        self._numbers = {self._pairs[0]: 0}

    def number(self, reason: str | None, error: str | None) -> int:
        """The number of this pair; an empty text counts as none."""
        pair = (reason or None, error or None)
        number = self._numbers.get(pair)
        if number is None:
            number = self._numbers[pair] = len(self._pairs)
            self._pairs.append(pair)
        return number

    def numbers(self, reasons: pa.Array, errors: pa.Array) -> Numbers:
        """The numbers of many pairs."""
        pairs = zip(reasons.to_pylist(), errors.to_pylist(), strict=True)
        return np.fromiter((self.number(*pair) for pair in pairs), np.int32, len(reasons))

    def arrays(self, numbers: pa.Array) -> tuple[pa.Array, pa.Array]:
        """Reasons and errors for these numbers."""
        reasons = pa.array([one[0] for one in self._pairs], pa.string())
        errors = pa.array([one[1] for one in self._pairs], pa.string())
        return reasons.take(numbers), errors.take(numbers)


class Block:
    """The states of consecutive sequences; grows in both directions on demand."""

    def __init__(self) -> None:
        self._first = 0
        self._state = np.zeros(0, _STATE)

    @classmethod
    def of(cls, rows: pa.Table | None, texts: Texts) -> Block:
        """From the table's rows of one group, in order of sequence."""
        block = cls()
        if rows is None or not rows.num_rows:
            return block
        sequences = rows["sequence"].to_numpy()
        states = block.slice(int(sequences[0]), int(sequences[-1]) + 1)
        places = sequences - sequences[0]
        for field, name in _TIMES.items():
            states[field][places] = rows[name].cast(pa.int64()).fill_null(0).to_numpy()
        states["attempts"][places] = rows["attempts"].to_numpy()
        known = pa.array(OUTCOMES)
        encoded = rows["outcome"].combine_chunks().dictionary_encode()
        numbers = np.array([OUTCOMES.index(one) for one in encoded.dictionary.to_pylist()], np.int8)
        assert len(numbers) <= len(known)
        states["outcome"][places] = numbers[encoded.indices.to_numpy()]
        reasons, errors = (rows[name].combine_chunks() for name in ("reason", "error"))
        if reasons.null_count + errors.null_count < 2 * len(reasons):
            states["text"][places] = texts.numbers(reasons, errors)
        return block

    def slice(self, first: int, after: int) -> Numbers:
        """The states of these sequences, for the caller to change in place."""
        length = len(self._state)
        if not length:
            self._first = first
        if first < self._first:
            room = max(self._first - first, min(length, first))
            grown = np.zeros(room + length, _STATE)
            grown[room:] = self._state
            self._state, self._first = grown, self._first - room
        needed = after - self._first
        if needed > len(self._state):
            grown = np.zeros(max(needed, 2 * len(self._state), _ROOM), _STATE)
            grown[: len(self._state)] = self._state
            self._state = grown
        return self._state[first - self._first : after - self._first]

    def batches(self, subject: str, group: str, texts: Texts) -> Iterator[pa.RecordBatch]:
        """Rows of the known messages, in order of sequence."""
        for first in range(0, len(self._state), BATCH_ROWS):
            some = self._state[first : first + BATCH_ROWS]
            places = np.flatnonzero(some["outcome"])
            if len(places):
                sequences = places + first + self._first
                yield _batch(some[places], sequences, (subject, group), texts)


def _batch(
    state: Numbers, sequences: Numbers, names: tuple[str, str], texts: Texts
) -> pa.RecordBatch:
    reasons, errors = texts.arrays(pa.array(state["text"]))
    return pa.RecordBatch.from_arrays(
        [
            *(pa.repeat(pa.scalar(name), len(state)) for name in names),
            pa.array(sequences.astype(np.int64)),
            _times(state["first_us"]),
            _times(state["last_us"]),
            pa.array(np.ascontiguousarray(state["attempts"])),
            _times(state["settled_us"]),
            pa.array(OUTCOMES).take(pa.array(state["outcome"].astype(np.int32))),
            reasons,
            errors,
            _times(state["aside_us"]),
            _times(state["back_us"]),
        ],
        schema=DELIVERIES.arrow(),
    )


def _times(microseconds: Numbers) -> pa.Array:
    values = np.ascontiguousarray(microseconds)
    return pa.array(values, mask=values == 0).view(TIME)
