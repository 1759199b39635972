"""The journal of stored message ids, in `ids/`, which restores the dedupe window after a restart.

::

    content of a chunk (files/journal.py)    era 16, last stored at 8, number of subjects 4, subjects,
                                             columns; empty for no ids
    era                                      first offset 8, first stored at 8 (ms) of the generation
    subject                                  number of its runs 4, name length 1, name
    columns                                  n × instance 8, n × first counter 8,
                                             n × last counter 8, n × frame offset 8

A chunk holds runs of one generation of the window, those of each subject sorted by instance and counter, so that a
start takes whole columns instead of reading a million frames, and ends with the same window.
Derived: ids missing in the journal are read from the frames. Big-endian.
"""

from __future__ import annotations

import logging
import struct
import sys
from array import array
from itertools import chain
from typing import Final, NamedTuple

from qmq_broker.storage.files import layout
from qmq_broker.storage.files.disk_port import Disk
from qmq_broker.storage.files.journal import Journal
from qmq_broker.storage.ids.window import Added, DedupeWindow, Era, RunColumns

_log = logging.getLogger(__name__)
#: Runs of one chunk: sorting and writing them delays a commit by about two milliseconds.
CHUNK_RUNS: Final = 4096
#: Runs that may wait while the disk has no room for them; beyond that, the journal begins again.
WAITING_RUNS_MAX: Final = 1_000_000
#: Era, last stored at, number of subjects.
_FIXED: Final = struct.Struct(">QQQI")
#: For each subject: number of its runs, length of its name.
_SUBJECT: Final = struct.Struct(">IB")
_COLUMNS: Final = 4


class IdJournal:
    """The journal of one window. Belongs to the writer thread."""

    def __init__(self, disk: Disk, store_id: bytes, window: DedupeWindow) -> None:
        self._window = window
        self._journal = Journal(disk, layout.IDS, store_id)
        self._waiting: list[Added] = []
        self._waiting_runs = 0
        window.on_added = self._note

    @property
    def next_offset(self) -> int:
        """The window knows all frames below this."""
        return self._journal.next_offset

    def load(self, window_offset: int, log_next_offset: int) -> None:
        """Fill the window with the ids from `window_offset` on. Changes no file."""
        if self._window.is_empty_for_good:
            self._journal.disbelieve(log_next_offset)
            return
        for chunk in self._journal.read(window_offset, log_next_offset):
            found = decode_id_chunk(chunk.content)
            if found is None:
                self._journal.disbelieve(chunk.first_offset)
                return
            if found.columns:
                self._window.restore(
                    found.era, found.columns, last_stored_at_ms=found.last_stored_at_ms
                )

    def start(self) -> None:
        """Get ready to append. Requires: the commit log durably ends at the offset given to `load`."""
        self._journal.start()

    @property
    def is_chunk_due(self) -> bool:
        """Whether enough ids wait to write a chunk of them before the checkpoint."""
        return self._waiting_runs >= CHUNK_RUNS

    def write_some(self, durable_offset: int) -> bool:
        """Write one chunk; returns whether the journal then covers everything below
        `durable_offset`.

        Requires: the window knows exactly the frames below it. Raises `NoRoomError` with nothing
        lost, or `DiskError`.
        """
        if self._window.is_empty_for_good or durable_offset <= self.next_offset:
            return True
        if self._waiting_runs > WAITING_RUNS_MAX:
            self._begin_anew(durable_offset)
            return True
        taken = self._portion()
        is_last = len(taken) == len(self._waiting)
        next_offset = durable_offset if is_last else self._waiting[len(taken)].offset
        self._journal.append(next_offset, _content(taken))
        del self._waiting[: len(taken)]
        self._waiting_runs -= sum(map(_run_count, taken))
        self._journal.remove_below(self._window.first_offset or 0)
        return is_last

    def close(self) -> None:
        """Close the file. Safe to call twice."""
        self._journal.close()

    def _note(self, added: Added) -> None:
        self._waiting.append(added)
        self._waiting_runs += _run_count(added)

    def _portion(self) -> list[Added]:
        """The first waiting frames of one generation, with about `CHUNK_RUNS` runs."""
        runs = 0
        for count, one in enumerate(self._waiting):
            if runs >= CHUNK_RUNS or one.era != self._waiting[0].era:
                return self._waiting[:count]
            runs += _run_count(one)
        return self._waiting[:]

    def _begin_anew(self, offset: int) -> None:
        """Drop the waiting ids: a start reads frames until the window has moved past them."""
        _log.warning("journal of ids begins again: offset=%d runs=%d", offset, self._waiting_runs)
        self._waiting, self._waiting_runs = [], 0
        self._journal.restart(offset)


class IdChunk(NamedTuple):
    """The ids of one chunk."""

    era: Era
    #: When the last frame that holds one of these ids was stored.
    last_stored_at_ms: int
    #: Runs by subject.
    columns: dict[str, RunColumns]


def decode_id_chunk(content: bytes) -> IdChunk | None:
    """The ids of a chunk; None if the content is not valid."""
    if not content:
        return IdChunk(Era(0, 0), 0, {})
    try:
        *era, last_stored_at_ms, subject_count = _FIXED.unpack_from(content)
        position, counts = _FIXED.size, dict[str, int]()
        for _ in range(subject_count):
            count, name_bytes = _SUBJECT.unpack_from(content, position)
            position += _SUBJECT.size + name_bytes
            counts[content[position - name_bytes : position].decode("ascii")] = count
    except (struct.error, UnicodeDecodeError):
        return None
    column_bytes = 8 * sum(counts.values())
    if not column_bytes or len(content) != position + _COLUMNS * column_bytes:
        return None
    columns = [
        _words(content[first : first + column_bytes])
        for first in range(position, len(content), column_bytes)
    ]
    found, first = dict[str, RunColumns](), 0
    for subject, count in counts.items():
        found[subject] = RunColumns(*(column[first : first + count] for column in columns))
        first += count
    return IdChunk(Era(*era), last_stored_at_ms, found)


def _content(added: list[Added]) -> bytes:
    """Frames of one generation as the content of a chunk."""
    if not added:
        return b""
    runs: dict[str, list[tuple[int, int, int, int]]] = {}
    for one in added:
        for subject, some in one.ids.items():
            runs.setdefault(subject, []).extend(
                (run.instance, run.first_counter, run.next_counter - 1, one.offset) for run in some
            )
    in_order = chain.from_iterable(map(sorted, runs.values()))
    columns = array("Q", chain.from_iterable(zip(*in_order, strict=True)))
    if sys.byteorder == "little":
        columns.byteswap()
    table = [
        _SUBJECT.pack(len(some), len(subject)) + subject.encode("ascii")
        for subject, some in runs.items()
    ]
    fixed = _FIXED.pack(*added[0].era, added[-1].stored_at_ms, len(table))
    return b"".join((fixed, *table, columns.tobytes()))


def _run_count(added: Added) -> int:
    return sum(map(len, added.ids.values()))


def _words(data: bytes) -> array[int]:
    words = array("Q", data)
    if sys.byteorder == "little":
        words.byteswap()
    return words
