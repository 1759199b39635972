"""What became of each message at one group: the actions of the group, folded in their order.

The broker keeps the same state while it runs (`service/delivery/groups.py`); this is the view afterwards, with
times. Sequences of a subject are dense, so the state is a few arrays with one place for each message,
and an action on a range is an assignment to a slice. Memory: about 35 bytes for each message that the
group was given.

What was handed out before the table of actions begins is not known here: acks of it are counted, and
left out.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from qmq_pipeline.columns import Numbers
from qmq_pipeline.schemas import DELIVERIES

#: Names of the outcomes, by the number that the arrays hold.
OUTCOMES: Final = (
    "",
    "in flight",
    "given back",
    "acked",
    "dead",
    "skipped",
    "filtered",
    "waiting",
)
_NONE, _IN_FLIGHT, _GIVEN_BACK, _ACKED, _DEAD, _SKIPPED, _FILTERED, _WAITING = range(len(OUTCOMES))
BATCH_ROWS: Final = 50_000
_FIRST_ROOM: Final = 1024
_TIME: Final = pa.timestamp("us", tz="UTC")
_STATE: Final = np.dtype(
    [
        ("first_us", "i8"),
        ("last_us", "i8"),
        ("settled_us", "i8"),
        ("attempts", "i4"),
        ("text", "i4"),
        ("outcome", "i1"),
    ]
)
Row = Mapping[str, Any]


class _Pull(NamedTuple):
    """Messages that one consumer was given under consecutive numbers."""

    first: int
    next: int
    first_sequence: int


class GroupFold:
    """One (subject, group). Feed it the group's rows of `actions` in order, times in microseconds."""

    def __init__(self, subject: str, group: str) -> None:
        self.subject = subject
        self.group = group
        #: Settlements of hand-outs that are older than the table.
        self.unmatched = 0
        self._base: int | None = None
        self._state = np.zeros(0, _STATE)
        self._next = 0
        self._pulls: dict[str, list[_Pull]] = {}
        self._texts: list[tuple[str | None, str | None]] = [(None, None)]
        self._text_numbers = {self._texts[0]: 0}

    def add(self, row: Row) -> None:
        """Let one action happen; kinds that change no message are passed over."""
        apply = _APPLY.get(row["action"])
        if apply is not None:
            apply(self, row)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """A row for each message that something happened to, in order of sequence."""
        state = self._state[: self._next - (self._base or 0)]
        for first in range(0, len(state), BATCH_ROWS):
            some = state[first : first + BATCH_ROWS]
            places = np.flatnonzero(some["outcome"])
            if len(places):
                yield self._batch(some[places], places + first + (self._base or 0))

    def pulled(self, row: Row) -> None:
        first, after = row["first_sequence"], row["next_sequence"]
        pulls = self._pulls.setdefault(row["consumer"], [])
        pulls.append(_Pull(row["first_pull"], row["next_pull"], first))
        state = self._slice(first, after)
        at_us = row["at"]
        state["first_us"] = np.where(state["first_us"] == 0, at_us, state["first_us"])
        state["last_us"] = at_us
        state["settled_us"] = 0
        state["attempts"] = row["attempt"]
        state["outcome"] = _IN_FLIGHT

    def acked(self, row: Row) -> None:
        for state in self._handed_out(row):
            state["settled_us"] = row["at"]
            state["outcome"] = _ACKED

    def given_back(self, row: Row) -> None:
        text = self._text(
            None, row["error"] or ("lease ended" if row["action"] == "expired" else None)
        )
        for state in self._handed_out(row):
            # A dead letter is said before the hand-out that ended it.
            mask = state["outcome"] == _IN_FLIGHT
            state["outcome"][mask] = _GIVEN_BACK
            state["text"][mask] = text

    def dead(self, row: Row) -> None:
        state = self._slice(row["first_sequence"], row["next_sequence"])
        state["outcome"] = _DEAD
        state["settled_us"] = row["at"]
        state["attempts"] = row["attempt"]
        state["text"] = self._text(row["reason"], row["error"])

    def skipped(self, row: Row) -> None:
        self._give_up(row["first_sequence"], row["next_sequence"], row, "given up by force")

    def sought(self, row: Row) -> None:
        """The group goes on elsewhere; what it held, and what it jumps over, it does not get."""
        self._give_up(
            self._base or 0, max(self._next, row["first_sequence"]), row, "sought past it"
        )

    def passed(self, row: Row) -> None:
        self._filter(row, frozenset())

    def keyed(self, row: Row) -> None:
        chosen = json.loads(row["action_json"])
        self._filter(row, frozenset(chosen[5]))

    def replayed(self, row: Row) -> None:
        state = self._slice(row["first_sequence"], row["next_sequence"])
        mask = state["outcome"] == _DEAD
        state["outcome"][mask] = _GIVEN_BACK
        state["settled_us"][mask] = 0

    def defined(self, row: Row) -> None:
        if self._base is None:
            self._base = self._next = row["first_sequence"]

    def _filter(self, row: Row, chosen: frozenset[int]) -> None:
        """What the group was not given up to here, and will not be, is not for it."""
        if self._base is None:
            return
        state = self._slice(self._base, max(self._base, row["next_sequence"]))
        mask = state["outcome"] == _NONE
        kept = [one - self._base for one in chosen if 0 <= one - self._base < len(mask)]
        waiting = np.zeros(len(mask), bool)
        waiting[kept] = True
        state["outcome"][mask & waiting] = _WAITING
        mask &= ~waiting
        state["outcome"][mask] = _FILTERED
        state["settled_us"][mask] = row["at"]

    def _give_up(self, first: int, after: int, row: Row, reason: str) -> None:
        state = self._slice(max(first, self._base or 0), after)
        mask = np.isin(state["outcome"], (_NONE, _IN_FLIGHT, _GIVEN_BACK, _WAITING))
        state["outcome"][mask] = _SKIPPED
        state["settled_us"][mask] = row["at"]
        state["text"][mask] = self._text(reason, None)

    def _handed_out(self, row: Row) -> Iterator[Numbers]:
        """The states of the messages that these pull sequences of a consumer stand for."""
        pulls = self._pulls.get(row["consumer"], [])
        here, after = row["first_pull"], row["next_pull"]
        place = max(0, bisect_right(pulls, here, key=lambda pull: pull.first) - 1)
        for pull in pulls[place:]:
            if pull.first >= after or here >= after:
                break
            first, end = max(here, pull.first), min(after, pull.next)
            if first < end:
                self.unmatched += first - here
                sequence = pull.first_sequence - pull.first
                yield self._slice(sequence + first, sequence + end)
                here = end
        self.unmatched += max(0, after - here)

    def _slice(self, first: int, after: int) -> Numbers:
        if self._base is None:
            self._base = self._next = first
        if first < self._base:  # it was sought back to before where the table of actions begins
            grown = np.zeros(self._base - first + len(self._state), _STATE)
            grown[self._base - first :] = self._state
            self._state, self._base = grown, first
        self._next = max(self._next, after)
        needed = self._next - self._base
        if needed > len(self._state):
            grown = np.zeros(max(needed, 2 * len(self._state), _FIRST_ROOM), _STATE)
            grown[: len(self._state)] = self._state
            self._state = grown
        return self._state[first - self._base : max(first, after) - self._base]

    def _text(self, reason: str | None, error: str | None) -> int:
        pair = (reason or None, error or None)
        number = self._text_numbers.get(pair)
        if number is None:
            number = self._text_numbers[pair] = len(self._texts)
            self._texts.append(pair)
        return number

    def _batch(self, state: Numbers, sequences: Numbers) -> pa.RecordBatch:
        texts = pa.array(state["text"])
        reasons = pa.array([one[0] for one in self._texts], pa.string())
        errors = pa.array([one[1] for one in self._texts], pa.string())
        names = pa.array(OUTCOMES)
        count = len(state)
        return pa.RecordBatch.from_arrays(
            [
                pa.repeat(pa.scalar(self.subject), count),
                pa.repeat(pa.scalar(self.group), count),
                pa.array(sequences.astype(np.int64)),
                _times(state["first_us"]),
                _times(state["last_us"]),
                pa.array(np.ascontiguousarray(state["attempts"])),
                _times(state["settled_us"]),
                names.take(pa.array(state["outcome"].astype(np.int32))),
                reasons.take(texts),
                errors.take(texts),
            ],
            schema=DELIVERIES.arrow(),
        )


_APPLY: Final[Mapping[str, Callable[[GroupFold, Row], None]]] = {
    "groupdefined": GroupFold.defined,
    "pulled": GroupFold.pulled,
    "acked": GroupFold.acked,
    "nacked": GroupFold.given_back,
    "expired": GroupFold.given_back,
    "dead": GroupFold.dead,
    "skipped": GroupFold.skipped,
    "sought": GroupFold.sought,
    "passed": GroupFold.passed,
    "keyed": GroupFold.keyed,
    "replayed": GroupFold.replayed,
}


def _times(microseconds: Numbers) -> pa.Array:
    values = np.ascontiguousarray(microseconds)
    return pa.array(values, mask=values == 0).view(_TIME)
