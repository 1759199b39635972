"""Tallies: what a data file holds, by id word; some kilobytes beside a file of megabytes.

An id is a producer's instance and a counter, and 64 consecutive counters form one *id word*, with
one bit for each. A tally has a row for each word with ids in the file and each ten seconds in which
they came, so that the times of a slow producer do not become those of an hour::

    producer, word     first half of the id, and the second without its last six bits
    is_apart           see `AUDITED`: rows of a file that are kept apart from the others
    bits               which of the 64 ids the file holds
    rows               number of their rows; more than bits set if one is there twice
    contents           exclusive or of a hash of each row's counter and checksum
    first_at, last_at  least and greatest time that the table is judged by
    waited_us          the longest that one was stored behind its due time

Tallies of different files are merged without their rows, and two sides with equal bits and equal
contents hold the same messages. Ids that are not dense (those made of dedupe keys) have a word
each, and are merged like the others.

A tally follows from its data file, which never changes once it is committed. So a tally that is
missing, or was written in another format, is made again from the file.
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

#: Part of the path of every tally, so one of another version counts as missing.
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
#: Six bits of a counter select the bit in its word.
WORD_BITS: Final = 6
#: The longest time that one row of a tally spans: a fraction of what anybody would call late.
_SLICE_US: Final = 10_000_000
#: Stands for no time in `waited_us`.
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
    """How a table's rows are tallied."""

    #: Columns to read from a file whose tally is missing; files of older versions may lack some.
    columns: tuple[str, ...]
    #: The times that rows are judged by; for each row the first one it has.
    times: tuple[str, ...]
    #: Rows to be kept apart from the others.
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
#: Table name → how it is tallied. Kept apart are messages that waited for their due time, and
#: outbox rows that are not sent, which each scan reads again; a sent row is written only once.
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
    """Path of the tally of a data file, below the table's folder."""
    return f"_tallies/{TALLY.version}/{path}"


class Tallying:
    """Builds the tally of one file from its rows as they pass by."""

    def __init__(self, table: Table) -> None:
        self._audited = AUDITED[table.name]
        self._parts: list[Columns] = []

    def passing(self, batches: Iterable[pa.RecordBatch]) -> Iterable[pa.RecordBatch]:
        """The same batches, each counted."""
        for rows in batches:
            self.add(rows)
            yield rows

    def add(self, rows: pa.RecordBatch) -> None:
        """Count these rows."""
        if rows.num_rows:
            self._parts.append(_counted(rows, self._audited))

    def tally(self) -> pa.RecordBatch:
        """Everything that was added."""
        merged = folded_tally(sorted_tally(joined(self._parts), _KEY), _KEY)
        return pa.RecordBatch.from_arrays(
            [pa.array(merged[name]) for name in TALLY.names], schema=TALLY.arrow()
        )


def tally_columns(tally: pa.Table | pa.RecordBatch) -> Columns:
    """The columns of a tally that was read."""
    return {name: tally[name].to_numpy(zero_copy_only=False) for name in TALLY.names}


def joined(parts: Iterable[Columns]) -> Columns:
    """Several tallies one after the other; empty columns if there are none."""
    some = list(parts)
    if not some:
        kinds = {one.name: one.type.to_pandas_dtype() for one in TALLY.arrow()}
        return {name: np.empty(0, kinds.get(name, np.int64)) for name in (*_KEY, *kinds)}
    return {name: np.concatenate([one[name] for one in some]) for name in some[0]}


def sorted_tally(columns: Columns, key: tuple[str, ...]) -> Columns:
    """The rows sorted by a key, whose last name is the most significant."""
    order = np.lexsort([columns[name] for name in key])
    return {name: values[order] for name, values in columns.items()}


def folded_tally(columns: Columns, key: tuple[str, ...]) -> Columns:
    """Adjacent rows with the same key become one row."""
    begins = np.flatnonzero(begins_of(columns, key))
    folded = {name: columns[name][begins] for name in key}
    if not len(begins):
        return folded | {name: columns[name] for name in _FOLDS}
    return folded | {name: fold.reduceat(columns[name], begins) for name, fold in _FOLDS.items()}


def begins_of(columns: Columns, key: tuple[str, ...]) -> Numbers:
    """Rows whose key differs from that of the row before."""
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
    """64 bits of each row's counter and checksum, mixed as in SplitMix64 [Steele, Lea and Flood 2014]."""
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
