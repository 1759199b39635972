"""What became of each message in one group: the group's actions, folded in order.

The broker keeps the same state while it runs (`service/delivery/groups.py`); this module
reconstructs it afterwards, with times. Sequences of a subject are dense, so the state is held in
arrays, one for each block of sequences with one element per message, and an action on a range is an
assignment to a slice. Blocks are loaded from the table when an action touches them, so a fold that
continues an earlier one costs only what came in since.

What was handed out before the table of actions begins is unknown here: its settlements are counted
and otherwise ignored.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa

from qmq_pipeline.fold.fold_block import (
    ACKED,
    DEAD,
    FILTERED,
    GIVEN_BACK,
    IN_FLIGHT,
    NONE,
    SET_ASIDE,
    SKIPPED,
    WAITING,
    Block,
    Texts,
)
from qmq_pipeline.fold.runs import RunList
from qmq_pipeline.tables.columns import Numbers

_OPEN: Final = (NONE, IN_FLIGHT, GIVEN_BACK, WAITING, SET_ASIDE)
_WITHOUT_COPY: Final = tuple(one for one in _OPEN if one != SET_ASIDE)
Row = Mapping[str, Any]
#: Number of a block → its rows in the table, if any.
Load = Callable[[int], pa.Table | None]


@dataclass(slots=True)
class GroupMark:
    """The state of a fold besides its blocks: where the next fold continues. Travels as JSON."""

    #: First sequence for the group; None as long as no action has told it.
    first: int | None = None
    #: How far the group has come: every message below was delivered to it, or is not for it.
    come_to: int = 0
    #: One behind the highest sequence that is known.
    next: int = 0
    has_ended: bool = False
    #: Settlements of hand-outs that are older than the table.
    unmatched: int = 0
    #: Consumer → hand-outs that have not ended: first and next pull sequence, first sequence.
    held: dict[str, list[tuple[int, int, int]]] = field(default_factory=dict)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> GroupMark:
        """Read what `to_json` wrote."""
        held = {name: [(a, b, c) for a, b, c in some] for name, some in found["held"].items()}
        return cls(**{**found, "held": held})

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def _nothing(_: int) -> pa.Table | None:
    return None


class GroupFold:
    """One (subject, group).

    Feed it the group's rows of `actions` in order, times in microseconds.
    """

    def __init__(
        self,
        subject: str,
        group: str,
        *,
        mark: GroupMark | None = None,
        block_sequences: int,
        load: Load = _nothing,
    ) -> None:
        self.subject = subject
        self.group = group
        self.mark = mark or GroupMark()
        #: Blocks with changes.
        self.changed: set[int] = set()
        #: Sequences with changes.
        self.touched = RunList()
        self._load = load
        self._length = block_sequences
        self._blocks: dict[int, Block] = {}
        self._texts = Texts()

    def add(self, row: Row) -> None:
        """Apply one action; kinds that change no message are ignored."""
        apply = _APPLY.get(row["action"])
        if apply is not None:
            apply(self, row)

    def batches(self, number: int) -> Iterator[pa.RecordBatch]:
        """Rows of the known messages of a block, in order of sequence."""
        yield from self._block(number).batches(self.subject, self.group, self._texts)

    # ---- the actions -------------------------------------------------------------------------

    def defined(self, row: Row) -> None:
        """The group begins, or begins again after it ended; otherwise only a setting was changed."""
        first = row["first_sequence"]
        mark = self.mark
        if mark.first is None:
            mark.first = mark.come_to = mark.next = first
        elif mark.has_ended:
            self._give_up(mark.come_to, first, row, "while the group was not there")
            self._begin_at(first)
        mark.has_ended = False

    def ended(self, row: Row) -> None:
        mark = self.mark
        if mark.first is not None:
            self._give_up(mark.first, mark.come_to, row, "the group ended")
        mark.held.clear()
        mark.has_ended = True

    def pulled(self, row: Row) -> None:
        first, after, at_us = row["first_sequence"], row["next_sequence"], row["at"]
        if row["attempt"] == 1:  # what it skipped on the way there is not for it
            self._come_to(first, row)
            self.mark.come_to = max(self.mark.come_to, after)
        held = self.mark.held.setdefault(row["consumer"], [])
        held.append((row["first_pull"], row["next_pull"], first))
        for state in self._slices(first, after):
            state["first_us"] = np.where(state["first_us"] == 0, at_us, state["first_us"])
            state["last_us"] = at_us
            state["settled_us"] = 0
            state["attempts"] = row["attempt"]
            state["outcome"] = IN_FLIGHT

    def acked(self, row: Row) -> None:
        for first, after in self._handed_out(row):
            for state in self._slices(first, after):
                state["settled_us"] = row["at"]
                state["outcome"] = ACKED

    def given_back(self, row: Row) -> None:
        said = row["error"] or ("lease ended" if row["action"] == "expired" else None)
        text = self._texts.number(None, said)
        for first, after in self._handed_out(row):
            for state in self._slices(first, after):
                # The log has the dead letter before the end of the hand-out that caused it.
                mask = state["outcome"] == IN_FLIGHT
                state["outcome"][mask] = GIVEN_BACK
                state["text"][mask] = text

    def dead(self, row: Row) -> None:
        text = self._texts.number(row["reason"], row["error"])
        for state in self._slices(row["first_sequence"], row["next_sequence"]):
            state["outcome"] = DEAD
            state["settled_us"] = row["at"]
            state["attempts"] = row["attempt"]
            state["text"] = text

    def set_aside(self, row: Row) -> None:
        """Messages that waited for redelivery were moved out of the way, as copies in the log."""
        for state in self._slices(row["first_sequence"], row["next_sequence"]):
            mask = state["outcome"] == GIVEN_BACK
            state["outcome"][mask] = SET_ASIDE
            state["aside_us"][mask] = row["at"]
            state["back_us"][mask] = 0

    def brought_back(self, row: Row) -> None:
        first = row["first_sequence"]
        for state in self._slices(first, first + 1):
            mask = state["outcome"] == SET_ASIDE
            state["outcome"][mask] = GIVEN_BACK
            state["back_us"][mask] = row["at"]

    def skipped(self, row: Row) -> None:
        """Messages that retention deleted by force; those set aside have copies, which come back."""
        mark, after = self.mark, row["next_sequence"]
        self._give_up(row["first_sequence"], after, row, "given up by force", _WITHOUT_COPY)
        mark.first = after if mark.first is None else mark.first
        mark.come_to = max(mark.come_to, after)

    def sought(self, row: Row) -> None:
        """The group continues elsewhere: it never gets what it skips, and what follows counts as new."""
        first, mark = row["first_sequence"], self.mark
        self._give_up(first if mark.first is None else mark.first, first, row, "sought past it")
        mark.held.clear()
        self._begin_at(first)

    def moved_back(self, row: Row) -> None:
        """A start found these messages gone; others got their sequences, and are new to the group."""
        first, mark = row["next_sequence"], self.mark
        for state in self._slices(first, mark.next):
            state[...] = 0
        mark.come_to, mark.next = min(mark.come_to, first), min(mark.next, first)
        mark.first = None if mark.first is None else min(mark.first, first)
        for consumer, held in list(mark.held.items()):
            kept = [(a, min(b, a + first - c), c) for a, b, c in held if c < first]
            mark.held[consumer] = kept
            if not kept:
                del mark.held[consumer]

    def passed(self, row: Row) -> None:
        self._come_to(row["next_sequence"], row)

    def keyed(self, row: Row) -> None:
        chosen = np.array(json.loads(row["action_json"])[5], np.int64)
        self._come_to(row["next_sequence"], row, chosen)

    def replayed(self, row: Row) -> None:
        for state in self._slices(row["first_sequence"], row["next_sequence"]):
            mask = state["outcome"] == DEAD
            state["outcome"][mask] = GIVEN_BACK
            state["settled_us"][mask] = 0

    # ---- ranges ------------------------------------------------------------------------------

    def _come_to(self, after: int, row: Row, chosen: Numbers | None = None) -> None:
        """The group has come up to here: what it was not given on the way, and is not `chosen`, is not for it."""
        mark = self.mark
        if mark.first is None:
            mark.first = mark.come_to = after if chosen is None else min(after, *chosen.tolist())
        for first, state in self._places(mark.come_to, after):
            fresh = state["outcome"] == NONE
            waiting = np.zeros(len(state), bool)
            if chosen is not None:
                here = chosen[(chosen >= first) & (chosen < first + len(state))]
                waiting[here - first] = True
            state["outcome"][fresh & waiting] = WAITING
            fresh &= ~waiting
            state["outcome"][fresh] = FILTERED
            state["settled_us"][fresh] = row["at"]
        mark.come_to = max(mark.come_to, after)

    def _begin_at(self, first: int) -> None:
        """From here on the group gets everything as if for the first time."""
        mark = self.mark
        mark.first = first if mark.first is None else min(mark.first, first)
        for state in self._slices(first, mark.next):
            state[...] = 0
        mark.come_to = mark.next = first

    def _give_up(
        self, first: int, after: int, row: Row, reason: str, kinds: tuple[int, ...] = _OPEN
    ) -> None:
        text = self._texts.number(reason, None)
        for state in self._slices(first, after):
            mask = np.isin(state["outcome"], kinds)
            state["outcome"][mask] = SKIPPED
            state["settled_us"][mask] = row["at"]
            state["text"][mask] = text

    def _handed_out(self, row: Row) -> Iterator[tuple[int, int]]:
        """The runs of sequences behind these pull sequences of a consumer, which are then no longer held."""
        held = self.mark.held.get(row["consumer"], [])
        here, after = row["first_pull"], row["next_pull"]
        place = max(0, bisect_right(held, here, key=lambda one: one[0]) - 1)
        kept: list[tuple[int, int, int]] = []
        last = place
        for first_pull, next_pull, first in held[place:]:
            if first_pull >= after:
                break
            last += 1
            begin, end = max(here, first_pull), min(after, next_pull)
            if begin >= end:
                kept.append((first_pull, next_pull, first))
                continue
            self.mark.unmatched += begin - here
            if first_pull < begin:
                kept.append((first_pull, begin, first))
            if end < next_pull:
                kept.append((end, next_pull, first + end - first_pull))
            here = end
            yield first + begin - first_pull, first + end - first_pull
        held[place:last] = kept
        if not held:
            self.mark.held.pop(row["consumer"], None)
        self.mark.unmatched += max(0, after - here)

    def _slices(self, first: int, after: int) -> Iterator[Numbers]:
        for _, state in self._places(first, after):
            yield state

    def _places(self, first: int, after: int) -> Iterator[tuple[int, Numbers]]:
        """The states of a range, block by block, each with its first sequence."""
        if first >= after:
            return
        self.mark.next = max(self.mark.next, after)
        self.touched.add(first, after)
        for number in range(first // self._length, (after - 1) // self._length + 1):
            begin = max(first, number * self._length)
            end = min(after, (number + 1) * self._length)
            self.changed.add(number)
            yield begin, self._block(number).slice(begin, end)

    def _block(self, number: int) -> Block:
        block = self._blocks.get(number)
        if block is None:
            block = self._blocks[number] = Block.of(self._load(number), self._texts)
        return block


_APPLY: Final[Mapping[str, Callable[[GroupFold, Row], None]]] = {
    "groupdefined": GroupFold.defined,
    "ended": GroupFold.ended,
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
    "setaside": GroupFold.set_aside,
    "broughtback": GroupFold.brought_back,
    "movedback": GroupFold.moved_back,
}
