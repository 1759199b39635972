"""The tallies of all judged files: reads them, has missing ones made, merges them, and finds the files of a word.

All of this runs in the driver without Spark: a tally has about sixty bytes for 64 dense ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from qmq_pipeline.jobs.audit_window import Window, judged_ranges
from qmq_pipeline.jobs.audit_words import (
    CANCELLED,
    OPEN,
    OPEN_ONCE,
    RELEASED,
    SETTLED,
    STORED,
    Words,
)
from qmq_pipeline.jobs.audit_words import SCHEDULED as WAITING
from qmq_pipeline.jobs.ingest_outbox import last_scans
from qmq_pipeline.sources.tasks import run_tasks
from qmq_pipeline.tables.columns import Numbers
from qmq_pipeline.tables.lake import Lake
from qmq_pipeline.tables.schemas import CANCELLED as CANCELLED_TABLE
from qmq_pipeline.tables.schemas import MESSAGES, OUTBOX, SCHEDULED
from qmq_pipeline.tables.table import Table
from qmq_pipeline.tables.tallies import Columns, id_words, joined

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_WORK: Final = "qmq_pipeline.work.tallies.tally_piece"
#: Threads that read tallies: in an object store each read costs a round trip.
_READERS: Final = 16


@dataclass(slots=True)
class TalliedFile:
    """One data file and what it holds."""

    table: Table
    path: str
    #: The side (see `audit_words.py`) of its ordinary rows, and that of the rows kept apart.
    sides: tuple[int, int]
    #: The database, for files of an outbox.
    database: str = ""
    tally: Columns = field(default_factory=dict)


class WordSet:
    """A set of id words; tells which rows belong to it."""

    def __init__(self, producers: Numbers, words: Numbers) -> None:
        self.producers = producers
        self.words = words
        self._known_producers = np.unique(producers)
        self._known_words = np.unique(words)
        self._known = np.unique(self._places(producers, words))

    def __len__(self) -> int:
        return len(self.words)

    def has(self, producers: Numbers, words: Numbers) -> Numbers:
        """A mask: which of these rows belong to one of the words."""
        if not len(self):
            return np.zeros(len(words), np.bool_)
        is_known = _is_in(producers, self._known_producers) & _is_in(words, self._known_words)
        is_known[is_known] = _is_in(self._places(producers[is_known], words[is_known]), self._known)
        return is_known

    def _places(self, producers: Numbers, words: Numbers) -> Numbers:
        """One number per pair. Requires: both parts are known."""
        places = np.searchsorted(self._known_producers, producers) * len(self._known_words)
        found: Numbers = places + np.searchsorted(self._known_words, words)
        return found


class Tallies:
    """The tallies of all judged files, merged."""

    def __init__(self, files: Sequence[TalliedFile], window: Window) -> None:
        self._files = files
        self._window = window
        sides = [np.empty(0, np.int64), *(_sides(one) for one in files)]
        every = joined(one.tally for one in files)
        self.words = Words({**every, "side": np.concatenate(sides)}, window)

    @classmethod
    def read(cls, get_spark: Callable[[], SparkSession], lake: Lake, window: Window) -> Tallies:
        """Read the tallies of all committed files that are judged; workers make the missing ones."""
        files = list(_judged_files(lake, window))
        missing = _read_tallies(lake, files)
        if missing:
            run_tasks(get_spark(), _WORK, [_piece(lake, one) for one in missing])
            missing = _read_tallies(lake, missing)
        if missing:
            raise RuntimeError(f"the tally of {missing[0].path} was written and cannot be read")
        return cls(files, window)

    def producers(self, databases: Sequence[str] | None = None) -> tuple[Numbers, int]:
        """The producers in these outboxes, or in all, in order; and the time of the oldest row, in microseconds."""
        some = [
            one.tally
            for one in self._files
            if one.table is OUTBOX and (databases is None or one.database in databases)
        ]
        if not some:
            return np.empty(0, np.int64), 0
        first_us = min((int(one["first_at"].min()) for one in some if len(one["word"])), default=0)
        return np.unique(np.concatenate([one["producer"] for one in some])), first_us

    def files_with(self, table: Table, words: WordSet) -> set[str]:
        """Paths of the table's files that hold one of these words."""
        return {
            one.path
            for one in self._files
            if one.table is table and words.has(one.tally["producer"], one.tally["word"]).any()
        }

    def count_committed(self, lake: Lake, words: WordSet) -> int:
        """Number of judged messages with these words in the outboxes; the newest row of each counts."""
        names = ("database", "producer", "counter", "created_at", "scanned_at")
        rows = self._rows(lake, OUTBOX, words, names)
        database = rows["database"].combine_chunks().dictionary_encode().indices.to_numpy()
        producer, counter, created_us, scanned_us = (_longs(rows[name]) for name in names[1:])
        order = np.lexsort((scanned_us, counter, producer, database))
        keys = np.stack((database[order], producer[order], counter[order]))
        is_newest = np.ones(len(order), np.bool_)
        is_newest[:-1] = (keys[:, 1:] != keys[:, :-1]).any(axis=0)
        return int(self._is_judged(created_us[order[is_newest]]).sum())

    def count_stored(self, lake: Lake, words: WordSet, known: Numbers) -> tuple[int, int]:
        """Number of judged messages with these words, and how many of them have a producer that is not `known`."""
        rows = self._rows(lake, MESSAGES, words, ("producer", "counter", "stored_at"))
        is_judged = self._is_judged(_longs(rows["stored_at"]))
        producers = _longs(rows["producer"])[is_judged]
        return len(producers), int((~np.isin(producers, known)).sum())

    def _is_judged(self, times_us: Numbers) -> Numbers:
        times, places = np.unique(times_us // 1000, return_inverse=True)
        judged = np.array([self._window.is_judged(one) for one in times.tolist()], np.bool_)
        return judged[places]

    def _rows(self, lake: Lake, table: Table, words: WordSet, names: Sequence[str]) -> pa.Table:
        """These columns of all rows with these words."""
        found = []
        for path in sorted(self.files_with(table, words)):
            for batch in lake.read_file(table, path, names):
                is_wanted = words.has(_longs(batch["producer"]), id_words(_longs(batch["counter"])))
                found.append(batch.filter(pa.array(is_wanted)).select(list(names)))
        return pa.Table.from_batches(found, table.arrow(names))


def _judged_files(lake: Lake, window: Window) -> Iterator[TalliedFile]:
    sides = {SCHEDULED.name: (WAITING, WAITING), CANCELLED_TABLE.name: (CANCELLED, CANCELLED)}
    for table in (SCHEDULED, CANCELLED_TABLE):
        for one in lake.ranges(table):
            for file in one.files:
                yield TalliedFile(table, file.path, sides[table.name])
    for one in judged_ranges(lake.ranges(MESSAGES), window):
        for file in one.files:
            yield TalliedFile(MESSAGES, file.path, (STORED, RELEASED))
    scans = last_scans(lake)
    for commit in lake.commits(OUTBOX):
        told: dict[str, Any] = {}
        for one in commit.ranges:
            told |= one.notes
        for one in commit.ranges:
            is_last = told.get("scanned_at_ms") == scans.get(one.source)
            open_side = OPEN if is_last else OPEN_ONCE
            for file in one.files:
                yield TalliedFile(OUTBOX, file.path, (SETTLED, open_side), one.source)


def _read_tallies(lake: Lake, files: Sequence[TalliedFile]) -> list[TalliedFile]:
    """Read the tallies that exist; the files without one."""
    with ThreadPoolExecutor(_READERS) as readers:
        tallies = list(readers.map(lambda one: lake.read_tally(one.table, one.path), files))
    missing = []
    for one, tally in zip(files, tallies, strict=True):
        if tally is None:
            missing.append(one)
        else:
            one.tally = tally
    return missing


def _piece(lake: Lake, file: TalliedFile) -> dict[str, Any]:
    return {"tables": lake.root, "table": file.table.name, "path": file.path}


def _sides(file: TalliedFile) -> Numbers:
    plain, apart = file.sides
    sides: Numbers = np.where(file.tally["is_apart"], apart, plain).astype(np.int64)
    return sides


def _is_in(values: Numbers, known: Numbers) -> Numbers:
    """Which values are in `known`, which is sorted."""
    places = np.minimum(np.searchsorted(known, values), len(known) - 1)
    found: Numbers = known[places] == values
    return found


def _longs(column: pa.ChunkedArray | pa.Array) -> Numbers:
    numbers: Numbers = column.cast(pa.int64()).to_numpy()
    return numbers
