"""What the tallies of both sides say about each id word: whether its rows must be read, and how many there are.

Only rows that may be a finding are read. In doubt a word counts as suspect: its rows then decide. A
word's outbox rows come from several scans, because each scan reads open rows again.
`tallies.AUDITED` tells them apart: a sent row is in one scan; the last scan has all open rows; and
a row that was open in an earlier scan, and is in neither of these, was gone before the next one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from qmq_pipeline.jobs.audit_window import Window
from qmq_pipeline.tables.columns import Numbers
from qmq_pipeline.tables.tallies import NEVER, Columns, begins_of, folded_tally, sorted_tally

#: Sides of a word. Outbox rows: sent; open at the last scan; open at an earlier scan. Messages:
#: stored at once; released when due; scheduled; cancelled.
SETTLED, OPEN, OPEN_ONCE, STORED, RELEASED, SCHEDULED, CANCELLED = range(7)
_WORD_KEY: Final = ("word", "producer")
_SIDES_KEY: Final = ("side", *_WORD_KEY)
#: Words whose ids are compared one by one in one step: 64 numbers each.
_WORDS_AT_ONCE: Final = 16_384
_BITS_OF_BYTE: Final = np.array([byte.bit_count() for byte in range(256)], np.uint8)
_LAST_TIME: Final = 2**63 - 1
#: Reasons to read rows; `audit_rows.py` has the queries for each.
REASONS: Final = (
    "unstored",
    "unlike",
    "late",
    "ghost",
    "copied",
    "released otherwise",
    "overdue",
    "revived",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Producers for which a missing row proves a ghost."""

    #: All producers, whether an outbox has rows of them or not.
    is_closed_world: bool
    #: Otherwise the producers in databases that keep their rows, in order …
    producers: Numbers
    #: … from this time on: that of their oldest row, microseconds since 1970.
    first_us: int


@dataclass(frozen=True, slots=True)
class _Side:
    bits: Numbers
    rows: Numbers
    contents: Numbers
    first_at: Numbers
    last_at: Numbers
    waited_us: Numbers

    @property
    def ids(self) -> Numbers:
        """The number of different ids."""
        bytes_ = _BITS_OF_BYTE[self.bits.view(np.uint8)].reshape(-1, self.bits.itemsize)
        counts: Numbers = bytes_.sum(axis=1, dtype=np.int64)
        return counts

    @property
    def is_single(self) -> Numbers:
        """Whether no id has two rows."""
        single: Numbers = self.rows == self.ids
        return single


class Words:
    """All id words of the log and its outboxes."""

    def __init__(self, tallies: Columns, window: Window) -> None:
        """`tallies`: those of all files, with the side of each row."""
        self._rows_of_files = sorted_tally(tallies, _SIDES_KEY)
        is_new = begins_of(self._rows_of_files, _WORD_KEY)
        #: The word of each row.
        self._places = np.cumsum(is_new) - 1
        self._columns = folded_tally(self._rows_of_files, _SIDES_KEY)
        self._window = window
        self.producer = self._rows_of_files["producer"][is_new]
        self.word = self._rows_of_files["word"][is_new]
        self._side_places = np.cumsum(begins_of(self._columns, _WORD_KEY)) - 1
        settled, again, once = (self._side(side) for side in (SETTLED, OPEN, OPEN_ONCE))
        self._rows = _both(settled, again)
        gone = once.bits & ~self._rows.bits
        self._committed = self._rows.bits | gone
        #: Rows about which tallies cannot tell what became of them.
        self._is_unsure = (
            (gone != 0) | ((settled.bits & again.bits) != 0) | ~settled.is_single | ~again.is_single
        )
        self._first_committed = np.minimum(self._rows.first_at, once.first_at)
        self._last_committed = np.maximum(self._rows.last_at, once.last_at)
        self._stored, self._released = self._side(STORED), self._side(RELEASED)
        self._scheduled = self._side(SCHEDULED)
        self._messages = _both(self._stored, self._released)

    def suspects(self, kept: Kept, *, late_us: int, can_ghosts_be_told: bool) -> dict[str, Numbers]:
        """Reason → a mask of the words whose rows must be read for it."""
        rows, messages, scheduled = self._committed, self._messages, self._scheduled
        known = messages.bits | scheduled.bits
        is_row_judged = (rows != 0) & self._may_be_judged(
            self._first_committed, self._last_committed
        )
        is_message_judged = (messages.bits != 0) & self._may_be_judged(
            messages.first_at, messages.last_at
        )
        is_copied = ~messages.is_single
        is_release_like = self._is_release_like()
        contents = messages.contents ^ np.where(
            (scheduled.bits & messages.bits) == 0, scheduled.contents, 0
        )
        is_unlike = (
            self._is_unsure
            | is_copied
            | ~is_release_like
            | (rows != known)
            | (contents != self._rows.contents)
        )
        is_late = (
            self._is_any_late(late_us)
            | (self._released.waited_us > late_us)
            | ((self._released.bits != 0) & ~scheduled.is_single)
            | is_copied
        )
        waiting = scheduled.bits & ~messages.bits
        is_overdue = _lateness(self._window.next_ms * 1000, scheduled.first_at) > late_us
        cancelled = self._side(CANCELLED).bits
        is_ghost = (messages.bits & ~rows) != 0 if can_ghosts_be_told else _no(rows)
        return {
            "unstored": is_row_judged & ((rows & ~known) != 0),
            "unlike": is_row_judged & (known != 0) & is_unlike,
            "late": is_row_judged & (messages.bits != 0) & is_late,
            "ghost": is_message_judged & is_ghost & self._is_kept(kept),
            "copied": is_message_judged & is_copied,
            "released otherwise": is_message_judged & ~is_release_like,
            "overdue": ((waiting & ~cancelled) != 0) & is_overdue,
            "revived": is_message_judged & ((cancelled & messages.bits) != 0),
        }

    def committed(self) -> tuple[int, Numbers]:
        """Number of judged outbox rows, and the words whose rows must be read to count the rest."""
        has_rows = self._committed != 0
        first, last = self._first_committed, self._last_committed
        is_whole = has_rows & self._is_judged(first, last) & ~self._is_unsure
        is_cut = has_rows & self._may_be_judged(first, last) & ~is_whole
        return int(self._rows.ids[is_whole].sum()), is_cut

    def stored(self, known: Numbers) -> tuple[int, int, Numbers]:
        """Number of judged messages, how many have a producer that is not `known`, and the words to be counted."""
        messages = self._messages
        has_rows = messages.bits != 0
        is_whole = has_rows & self._is_judged(messages.first_at, messages.last_at)
        is_cut = has_rows & self._may_be_judged(messages.first_at, messages.last_at) & ~is_whole
        is_foreign = is_whole & ~np.isin(self.producer, known)
        return int(messages.rows[is_whole].sum()), int(messages.rows[is_foreign].sum()), is_cut

    def _is_any_late(self, late_us: int) -> Numbers:
        """Words with a message without delay that may have been stored too long after its row was made."""
        is_late = _lateness(self._stored.last_at, self._first_committed) > late_us
        doubtful = np.flatnonzero(is_late)
        for first in range(0, len(doubtful), _WORDS_AT_ONCE):
            some = doubtful[first : first + _WORDS_AT_ONCE]
            is_late[some] = (self._id_lateness(some) > late_us).any(axis=1)
        return is_late

    def _id_lateness(self, some: Numbers) -> Numbers:
        """The longest delay possible for each id of these words, which are sorted."""
        begin, end = np.searchsorted(self._places, (some[0], some[-1] + 1))
        near = {name: values[begin:end] for name, values in self._rows_of_files.items()}
        places = np.minimum(np.searchsorted(some, self._places[begin:end]), len(some) - 1)
        is_wanted = some[places] == self._places[begin:end]
        made = np.full((len(some), 64), _LAST_TIME, np.int64)
        stored = np.full((len(some), 64), NEVER, np.int64)
        for times, is_side, name, fold in (
            (made, near["side"] <= OPEN_ONCE, "first_at", np.minimum),
            (stored, near["side"] == STORED, "last_at", np.maximum),
        ):
            rows = np.flatnonzero(is_wanted & is_side)
            bits = np.unpackbits(near["bits"][rows].view(np.uint8), bitorder="little")
            of_row, bit = np.nonzero(bits.reshape(-1, 64))
            fold.at(times, (places[rows][of_row], bit), near[name][rows][of_row])
        return _lateness(stored, made)

    def _is_release_like(self) -> Numbers:
        """Whether the scheduled messages were released all or none, with unchanged contents."""
        scheduled, released = self._scheduled, self._released
        is_none = (scheduled.bits & self._messages.bits) == 0
        is_every = (
            (scheduled.bits == released.bits)
            & ((scheduled.bits & self._stored.bits) == 0)
            & (scheduled.contents == released.contents)
        )
        like: Numbers = scheduled.is_single & (is_none | is_every)
        return like

    def _is_kept(self, kept: Kept) -> Numbers:
        if kept.is_closed_world:
            return ~_no(self.producer)
        is_known = np.isin(self.producer, kept.producers)
        is_since: Numbers = self._messages.last_at >= kept.first_us
        return is_known & is_since

    def _is_judged(self, first_us: Numbers, last_us: Numbers) -> Numbers:
        """Whether everything between these times is judged."""
        window, first, last = self._window, first_us // 1000, last_us // 1000
        judged: Numbers = (first >= window.first_ms) & (last < window.next_ms)
        for begin, end in window.gaps:
            judged &= (last < begin) | (first >= end)
        return judged

    def _may_be_judged(self, first_us: Numbers, last_us: Numbers) -> Numbers:
        """Whether anything between these times may be judged."""
        window, first, last = self._window, first_us // 1000, last_us // 1000
        may: Numbers = (last >= window.first_ms) & (first < window.next_ms)
        for begin, end in window.gaps:
            may &= ~((first >= begin) & (last < end))
        return may

    def _side(self, side: int) -> _Side:
        is_here = self._columns["side"] == side
        places = self._side_places[is_here]
        nothing = {"first_at": _LAST_TIME, "last_at": NEVER, "waited_us": NEVER}
        found = []
        for name in _Side.__slots__:
            values = np.full(len(self.word), nothing.get(name, 0), np.int64)
            values[places] = self._columns[name][is_here]
            found.append(values)
        return _Side(*found)


def _both(one: _Side, other: _Side) -> _Side:
    return _Side(
        one.bits | other.bits,
        one.rows + other.rows,
        one.contents ^ other.contents,
        np.minimum(one.first_at, other.first_at),
        np.maximum(one.last_at, other.last_at),
        np.maximum(one.waited_us, other.waited_us),
    )


def _lateness(last_us: Numbers | int, first_us: Numbers) -> Numbers:
    """The time between two times; 0 if one is missing."""
    is_there = (last_us != NEVER) & (first_us != _LAST_TIME)
    lateness: Numbers = np.where(is_there, last_us, 0) - np.where(is_there, first_us, 0)
    return lateness


def _no(values: Numbers) -> Numbers:
    return np.zeros(len(values), np.bool_)
