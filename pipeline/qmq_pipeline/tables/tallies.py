"""What a data file holds, by id word: a tally, some kilobytes beside a file of megabytes.

An id is a producer's instance and a counter, and 64 counters that follow each other are one *id word*: one bit
for each. A tally has a row for each word of which the file holds ids, and each ten seconds in which it got them, so
that the times of a slow producer are not those of an hour::

    producer, word     first half of the id, and the second without its last six bits
    is_apart           see `AUDITED`: some rows of a file have to be told from the others
    bits               which of the 64 ids the file holds
    rows               how many rows they have; more than there are bits set when one is there twice
    contents           exclusive or of a hash of each row's counter and checksum
    first_at, last_at  least and greatest of the time that the table is judged by
    waited_us          the longest that one was stored behind its due time

Tallies of different files are merged without their rows, and two sides with equal bits and equal contents hold
the same messages. Ids that are not dense (those made of dedupe keys) have a word each, and are merged like others.

A tally follows from its data file, which never changes once it is committed. So none has to be there: one that is
missing, or was written in another way, is made from the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from qmq_pipeline.tables.columns import Numbers
from qmq_pipeline.tables.schemas import CANCELLED, MESSAGES, OUTBOX, SCHEDULED
from qmq_pipeline.tables.table import Column, Table

#: Its number is in the path of every tally: one of another version is one that is not there.
TALLY: Final = Table(
    name="tally",
    layer="bronze",
    version=1,
    key=("producer", "word", "is_apart"),
    columns=(
        Column("producer", "long", "first half of the ids"),
        Column("word", "long", "second half of the ids without its last six bits"),
        Column("is_apart", "flag", "rows that have to be told from the others"),
        Column("bits", "long", "which of 64 ids there are"),
        Column("rows", "long", "their rows"),
        Column("contents", "long", "exclusive or of the hashes of counters and checksums"),
        Column("first_at", "long", "least time, microseconds since 1970"),
        Column("last_at", "long", "greatest time"),
        Column("waited_us", "long", "longest time from due to stored; the least number for none"),
    ),
)
#: Six bits of a counter say which bit of its word it is.
WORD_BITS: Final = 6
#: So far apart the times of one row of a tally are at most: a fraction of what anybody calls late.
_SLICE_US: Final = 10_000_000
#: What stands for no time in `waited_us`.
NEVER: Final = -(2**63)
_KEY: Final = ("slice", "is_apart", "word", "producer")
_FOLDS: Final[dict[str, np.ufunc]] = {
    "bits": np.bitwise_or,
    "rows": np.add,
    "contents": np.bitwise_xor,
    "first_at": np.minimum,
    "last_at": np.maximum,
    "waited_us": np.maximum,
}
Columns = dict[str, Numbers]


@dataclass(frozen=True, slots=True, kw_only=True)
class Audited:
    """What of a table's rows goes into its tallies."""

    #: Columns that are read of a file whose tally is missing; files of older versions may lack some.
    columns: tuple[str, ...]
    #: Time that the rows are judged by; the first of these that a row has.
    times: tuple[str, ...]
    #: Rows to be told from the others.
    is_apart: Callable[[pa.RecordBatch], Numbers]


def _has_due_time(rows: pa.RecordBatch) -> Numbers:
    has_due_time: Numbers = pc.is_valid(rows["due_at"]).to_numpy(zero_copy_only=False)
    return has_due_time


def _is_open(rows: pa.RecordBatch) -> Numbers:
    is_open: Numbers = pc.not_equal(rows["state"], "sent").to_numpy(zero_copy_only=False)
    return is_open


def _none(rows: pa.RecordBatch) -> Numbers:
    return np.zeros(rows.num_rows, np.bool_)


_ID: Final = ("producer", "counter")
#: Table name → what is tallied of it. Apart are of the messages those that waited for their time; of the outbox
#: those that are not sent, which each scan reads again; one that is sent is written once.
AUDITED: Final = {
    MESSAGES.name: Audited(
        columns=(*_ID, "record_crc", "stored_at", "due_at"),
        times=("stored_at",),
        is_apart=_has_due_time,
    ),
    SCHEDULED.name: Audited(
        columns=(*_ID, "record_crc", "due_at", "now_due_at"),
        times=("now_due_at", "due_at"),
        is_apart=_none,
    ),
    CANCELLED.name: Audited(
        columns=(*_ID, "cancelled_at"), times=("cancelled_at",), is_apart=_none
    ),
    OUTBOX.name: Audited(
        columns=(*_ID, "record_crc", "created_at", "state"),
        times=("created_at",),
        is_apart=_is_open,
    ),
}


def tally_path(path: str) -> str:
    """Where the tally of a data file is, below the table's folder."""
    return f"_tallies/{TALLY.version}/{path}"


class Tallying:
    """Makes the tally of one file out of its rows as they pass by."""

    def __init__(self, table: Table) -> None:
        self._audited = AUDITED[table.name]
        self._parts: list[Columns] = []

    def passing(self, batches: Iterable[pa.RecordBatch]) -> Iterable[pa.RecordBatch]:
        """The same batches."""
        for rows in batches:
            self.add(rows)
            yield rows

    def add(self, rows: pa.RecordBatch) -> None:
        """Count these rows."""
        if rows.num_rows:
            self._parts.append(_counted(rows, self._audited))

    def tally(self) -> pa.RecordBatch:
        """All that was added."""
        merged = folded_tally(sorted_tally(joined(self._parts), _KEY), _KEY)
        return pa.RecordBatch.from_arrays(
            [pa.array(merged[name]) for name in TALLY.names], schema=TALLY.arrow()
        )


def tally_columns(tally: pa.Table | pa.RecordBatch) -> Columns:
    """A tally that was read."""
    return {name: tally[name].to_numpy(zero_copy_only=False) for name in TALLY.names}


def joined(parts: Iterable[Columns]) -> Columns:
    """Several behind each other; columns without rows for none."""
    some = list(parts)
    if not some:
        kinds = {one.name: one.type.to_pandas_dtype() for one in TALLY.arrow()}
        return {name: np.empty(0, kinds.get(name, np.int64)) for name in (*_KEY, *kinds)}
    return {name: np.concatenate([one[name] for one in some]) for name in some[0]}


def sorted_tally(columns: Columns, key: tuple[str, ...]) -> Columns:
    """The rows in order of a key, whose last name counts most."""
    order = np.lexsort([columns[name] for name in key])
    return {name: values[order] for name, values in columns.items()}


def folded_tally(columns: Columns, key: tuple[str, ...]) -> Columns:
    """Rows that follow each other and have one key become one row."""
    begins = np.flatnonzero(begins_of(columns, key))
    folded = {name: columns[name][begins] for name in key}
    if not len(begins):
        return folded | {name: columns[name] for name in _FOLDS}
    return folded | {name: fold.reduceat(columns[name], begins) for name, fold in _FOLDS.items()}


def begins_of(columns: Columns, key: tuple[str, ...]) -> Numbers:
    """Which rows have another key than the one before."""
    begins = np.ones(len(columns["bits"]), np.bool_)
    begins[1:] = np.logical_or.reduce([columns[name][1:] != columns[name][:-1] for name in key])
    return begins


def id_words(counters: Numbers) -> Numbers:
    """The words of these counters."""
    words: Numbers = counters >> WORD_BITS
    return words


def _counted(rows: pa.RecordBatch, audited: Audited) -> Columns:
    counters = _longs(rows["counter"])
    at = _time(rows, audited.times)
    is_apart = audited.is_apart(rows)
    waited = np.full(len(at), NEVER, np.int64)
    if "stored_at" in audited.times and is_apart.any():
        due = _longs(rows["due_at"], 0)
        waited[is_apart] = at[is_apart] - due[is_apart]
    columns = {
        "producer": _longs(rows["producer"]),
        "word": id_words(counters),
        "is_apart": is_apart,
        "bits": np.left_shift(np.int64(1), counters & ((1 << WORD_BITS) - 1)),
        "rows": np.ones(len(at), np.int64),
        "contents": _hashes(counters, rows),
        "first_at": at,
        "last_at": at,
        "waited_us": waited,
        "slice": at // _SLICE_US,
    }
    return folded_tally(columns, _KEY)


def _time(rows: pa.RecordBatch, names: tuple[str, ...]) -> Numbers:
    found = [rows[name] for name in names if name in rows.schema.names]
    return _longs(found[0] if len(found) == 1 else pc.coalesce(*found), 0)


def _hashes(counters: Numbers, rows: pa.RecordBatch) -> Numbers:
    """64 bits of each row's counter and checksum, spread as by SplitMix64 [Steele, Lea and Flood 2014]."""
    if "record_crc" not in rows.schema.names:
        return np.zeros(len(counters), np.int64)
    checksums = _longs(rows["record_crc"], -1).view(np.uint64)
    hashes: Numbers = _spread(_spread(counters.view(np.uint64)) ^ checksums).view(np.int64)
    return hashes


def _spread(values: Numbers) -> Numbers:
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    spread: Numbers = mixed ^ (mixed >> np.uint64(31))
    return spread


def _longs(array: pa.Array, null: int | None = None) -> Numbers:
    longs = array.cast(pa.int64())
    if null is not None and longs.null_count:
        longs = pc.fill_null(longs, null)
    numbers: Numbers = longs.to_numpy(zero_copy_only=False)
    return numbers
