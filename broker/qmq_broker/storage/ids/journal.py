"""Keeps the dedupe window over a restart: a journal of the stored ids, in `ids/`.

::

    content of a chunk (files/journal.py)    era 16, last stored at 8, columns; empty for no ids
    era                                      first offset 8, first stored at 8 (ms) of the generation
    columns                                  n × instance 8, n × first counter 8,
                                             n × last counter 8, n × frame offset 8

A chunk holds runs of one generation of the window, sorted by instance and counter, so that a start
takes whole columns instead of reading a million frames, and ends with the same window. Derived:
what the journal lacks is read from the frames. Big-endian.
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
#: Runs that may wait while the disk has no room for them; beyond that, the journal begins anew.
WAITING_RUNS_MAX: Final = 1_000_000
_ERA: Final = struct.Struct(">QQQ")
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
        """Fill the window with what is remembered from `window_offset` on. Changes no file."""
        if self._window.is_empty_for_good:
            self._journal.disbelieve(log_next_offset)
            return
        for chunk in self._journal.read(window_offset, log_next_offset):
            found = decode_id_chunk(chunk.content)
            if found is None:
                self._journal.disbelieve(chunk.first_offset)
                return
            if found.columns.instances:
                self._window.restore(
                    found.era, found.columns, last_stored_at_ms=found.last_stored_at_ms
                )

    def start(self) -> None:
        """Get ready to append. Requires: the commit log ends durably where it was said to end."""
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
        self._waiting_runs -= sum(len(one.runs) for one in taken)
        self._journal.remove_below(self._window.first_offset or 0)
        return is_last

    def close(self) -> None:
        """Close the file. Safe to call twice."""
        self._journal.close()

    def _note(self, added: Added) -> None:
        self._waiting.append(added)
        self._waiting_runs += len(added.runs)

    def _portion(self) -> list[Added]:
        """The first waiting frames of one generation, with about `CHUNK_RUNS` runs."""
        runs = 0
        for count, one in enumerate(self._waiting):
            if runs >= CHUNK_RUNS or one.era != self._waiting[0].era:
                return self._waiting[:count]
            runs += len(one.runs)
        return self._waiting[:]

    def _begin_anew(self, offset: int) -> None:
        """Forget what waits: a start reads frames until the window has moved past them."""
        _log.warning("journal of ids begins anew: offset=%d runs=%d", offset, self._waiting_runs)
        self._waiting, self._waiting_runs = [], 0
        self._journal.restart(offset)


class IdChunk(NamedTuple):
    """The ids of one chunk."""

    era: Era
    #: When the last frame that holds one of these ids was stored.
    last_stored_at_ms: int
    columns: RunColumns


def decode_id_chunk(content: bytes) -> IdChunk | None:
    """The ids of a chunk; None if the content is not valid."""
    if not content:
        return IdChunk(Era(0, 0), 0, RunColumns(*[array("Q")] * _COLUMNS))
    column_bytes, rest_bytes = divmod(len(content) - _ERA.size, _COLUMNS)
    if column_bytes <= 0 or rest_bytes or column_bytes % 8:
        return None
    first_offset, first_stored_at_ms, last_stored_at_ms = _ERA.unpack_from(content)
    columns = []
    for first in range(_ERA.size, len(content), column_bytes):
        column = array("Q", content[first : first + column_bytes])
        if sys.byteorder == "little":
            column.byteswap()
        columns.append(column)
    era = Era(first_offset, first_stored_at_ms)
    return IdChunk(era, last_stored_at_ms, RunColumns(*columns))


def _content(added: list[Added]) -> bytes:
    """Frames of one generation as the content of a chunk."""
    if not added:
        return b""
    runs = sorted(
        (run.instance, run.first_counter, run.next_counter - 1, one.offset)
        for one in added
        for run in one.runs
    )
    words = array("Q", chain.from_iterable(zip(*runs, strict=True)))
    if sys.byteorder == "little":
        words.byteswap()
    return _ERA.pack(*added[0].era, added[-1].stored_at_ms) + words.tobytes()
