"""The actions of one group, as steps on sequences: what the group did with which messages.

The broker keeps the same state while it runs (`qmq_client/group/state.py`). An ack names pull sequences of a
consumer; here it becomes the sequences that were pulled. What a group passes on its way is found here, too. A step
says nothing of single messages: a range of a million is one step. `blocks.py` applies steps to messages.

What was handed out before the table of actions begins is unknown: its settlements are counted and otherwise ignored.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, NamedTuple

from qmq_pipeline.tables.table import Column, Table

#: What a step does; `blocks.py` has the meaning of each.
PULLED, ACKED, GIVEN_BACK, DEAD, SET_ASIDE, BROUGHT_BACK = (
    "pulled",
    "acked",
    "given back",
    "dead",
    "set aside",
    "brought back",
)
REPLAYED, WAITING, FILTERED, PASSED_OVER = "replayed", "waiting", "filtered", "passed over"
GIVEN_UP, GIVEN_UP_BY_FORCE, RESET = "given up", "given up by force", "reset"
#: Reasons of messages that a group will never get although they were for it; the audit reports them.
BY_FORCE: Final = "given up by force"
SOUGHT: Final = "sought past it"
NEVER_GIVEN: Final = "passed over without a delivery"
Row = Mapping[str, Any]
#: Steps on their way from the tasks that find them to those that apply them; no files.
STEPS: Final = Table(
    name="steps",
    layer="",
    version=1,
    key=("subject", "consumer_group", "action_offset", "action_number", "number"),
    columns=(
        Column("subject", "text", "the subject"),
        Column("consumer_group", "text", "the group"),
        Column("action_offset", "long", "the action that it comes from"),
        Column("action_number", "int", "the action's place in its frame"),
        Column("number", "int", "its place among the steps of the action"),
        Column("op", "text", "what it does; `mark` for the state of the group behind all of them"),
        Column("first", "long", "first sequence"),
        Column("next", "long", "one behind the last"),
        Column("at", "long", "microseconds since 1970"),
        Column("attempt", "int", "of a pull or dead letter"),
        Column("reason", "text", "why the group does not get it; of `mark` the state as JSON"),
        Column("error", "text", "what the consumer said"),
    ),
)


class Step(NamedTuple):
    """What happened to the sequences of a range."""

    op: str
    first: int
    next: int
    #: Microseconds since 1970.
    at: int
    attempt: int = 0
    reason: str | None = None
    error: str | None = None


@dataclass(slots=True)
class GroupMark:
    """The state of a group besides that of its messages: where the next fold continues. Travels as JSON."""

    #: First sequence for the group; None as long as no action has told it.
    first: int | None = None
    #: How far the group has come: every message below was delivered to it, or is not for it.
    come_to: int = 0
    #: One behind the highest sequence that is known.
    next: int = 0
    has_ended: bool = False
    #: Tags of which a message must have any, and all; None if the actions do not tell.
    filter: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    #: Whether the filter was ever another one.
    was_refiltered: bool = False
    #: Settlements of hand-outs that are older than the table.
    unmatched: int = 0
    #: Consumer → hand-outs that have not ended: first and next pull sequence, first sequence.
    held: dict[str, list[tuple[int, int, int]]] = field(default_factory=dict)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> GroupMark:
        """Read what `to_json` wrote."""
        held = {name: [(a, b, c) for a, b, c in some] for name, some in found["held"].items()}
        tags = found["filter"]
        known = None if tags is None else (tuple(tags[0]), tuple(tags[1]))
        return cls(**{**found, "held": held, "filter": known})

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


class GroupSteps:
    """The steps of one (subject, group). Feed it the group's rows of `actions` in order, times in microseconds."""

    def __init__(self, mark: GroupMark | None = None) -> None:
        self.mark = mark or GroupMark()

    def of(self, row: Row) -> Iterator[Step]:
        """The steps of one action; none for kinds that change no message."""
        apply = _APPLY.get(row["action"])
        if apply is None:
            return
        for step in apply(self, row):
            if step.first < step.next:
                self.mark.next = max(self.mark.next, step.next)
                yield step

    # ---- the actions -------------------------------------------------------------------------

    def defined(self, row: Row) -> Iterator[Step]:
        """The group begins, or begins again after it ended; otherwise only a setting was changed."""
        first, mark = row["first_sequence"], self.mark
        if mark.first is None:
            mark.first = mark.come_to = mark.next = first
            mark.filter = ((), ())
        elif mark.has_ended:
            yield self._given_up(mark.come_to, first, row, "while the group was not there")
            yield from self._begin_at(first, row)
            mark.filter = ((), ())
        mark.has_ended = False

    def configured(self, row: Row) -> Iterator[Step]:
        settings = json.loads(row["action_json"])[4]
        tags = (
            tuple(settings[0] if settings else ()),
            tuple(settings[1] if len(settings) > 1 else ()),
        )
        mark = self.mark
        has_come = mark.first is not None and mark.come_to > mark.first
        mark.was_refiltered |= tags != mark.filter and has_come
        mark.filter = tags
        return iter(())

    def ended(self, row: Row) -> Iterator[Step]:
        mark = self.mark
        if mark.first is not None:
            yield self._given_up(mark.first, mark.come_to, row, "the group ended")
        mark.held.clear()
        mark.has_ended = True

    def pulled(self, row: Row) -> Iterator[Step]:
        first, after = row["first_sequence"], row["next_sequence"]
        if row["attempt"] == 1:  # what it skipped on the way there is not for it
            yield from self._come_to(first, row)
            self.mark.come_to = max(self.mark.come_to, after)
        held = self.mark.held.setdefault(row["consumer"], [])
        held.append((row["first_pull"], row["next_pull"], first))
        yield Step(PULLED, first, after, row["at"], row["attempt"])

    def acked(self, row: Row) -> Iterator[Step]:
        for first, after in self._handed_out(row):
            yield Step(ACKED, first, after, row["at"])

    def given_back(self, row: Row) -> Iterator[Step]:
        said = row["error"] or ("lease ended" if row["action"] == "expired" else None)
        for first, after in self._handed_out(row):
            yield Step(GIVEN_BACK, first, after, row["at"], 0, None, said)

    def dead(self, row: Row) -> Iterator[Step]:
        yield self._step(DEAD, row, row["attempt"], row["reason"], row["error"])

    def set_aside(self, row: Row) -> Iterator[Step]:
        """Messages that waited for redelivery were moved out of the way, as copies in the log."""
        yield self._step(SET_ASIDE, row)

    def brought_back(self, row: Row) -> Iterator[Step]:
        first = row["first_sequence"]
        yield Step(BROUGHT_BACK, first, first + 1, row["at"])

    def skipped(self, row: Row) -> Iterator[Step]:
        """Messages that retention deleted by force; those set aside have copies, which come back."""
        mark, after = self.mark, row["next_sequence"]
        yield self._step(GIVEN_UP_BY_FORCE, row, 0, BY_FORCE)
        mark.first = after if mark.first is None else mark.first
        mark.come_to = max(mark.come_to, after)

    def sought(self, row: Row) -> Iterator[Step]:
        """The group continues elsewhere: it never gets what it skips, and what follows counts as new."""
        first, mark = row["first_sequence"], self.mark
        yield self._given_up(first if mark.first is None else mark.first, first, row, SOUGHT)
        mark.held.clear()
        yield from self._begin_at(first, row)

    def moved_back(self, row: Row) -> Iterator[Step]:
        """A start found these messages gone; others got their sequences, and are new to the group."""
        first, mark = row["next_sequence"], self.mark
        yield Step(RESET, first, mark.next, row["at"])
        mark.come_to, mark.next = min(mark.come_to, first), min(mark.next, first)
        mark.first = None if mark.first is None else min(mark.first, first)
        for consumer, held in list(mark.held.items()):
            kept = [(a, min(b, a + first - c), c) for a, b, c in held if c < first]
            mark.held[consumer] = kept
            if not kept:
                del mark.held[consumer]

    def passed(self, row: Row) -> Iterator[Step]:
        yield from self._come_to(row["next_sequence"], row)

    def keyed(self, row: Row) -> Iterator[Step]:
        chosen = json.loads(row["action_json"])[5]
        mark = self.mark
        if mark.first is None:
            mark.first = mark.come_to = min([row["next_sequence"], *chosen])
        for one in chosen:
            if one >= mark.come_to:
                yield Step(WAITING, one, one + 1, row["at"])
        yield from self._come_to(row["next_sequence"], row)

    def replayed(self, row: Row) -> Iterator[Step]:
        yield self._step(REPLAYED, row)

    # ---- ranges ------------------------------------------------------------------------------

    def _step(
        self,
        op: str,
        row: Row,
        attempt: int = 0,
        reason: str | None = None,
        error: str | None = None,
    ) -> Step:
        return Step(
            op, row["first_sequence"], row["next_sequence"], row["at"], attempt, reason, error
        )

    def _given_up(self, first: int, after: int, row: Row, reason: str) -> Step:
        return Step(GIVEN_UP, first, after, row["at"], 0, reason)

    def _come_to(self, after: int, row: Row) -> Iterator[Step]:
        """The group has come up to here: what it was not given on the way is not for it, if it has a filter."""
        mark = self.mark
        if mark.first is None:
            mark.first = mark.come_to = after
        if mark.come_to < after:
            is_unfiltered = mark.filter == ((), ())
            op, reason = (PASSED_OVER, NEVER_GIVEN) if is_unfiltered else (FILTERED, None)
            yield Step(op, mark.come_to, after, row["at"], 0, reason)
            mark.come_to = after

    def _begin_at(self, first: int, row: Row) -> Iterator[Step]:
        """From here on the group gets everything as if for the first time."""
        mark = self.mark
        mark.first = first if mark.first is None else min(mark.first, first)
        yield Step(RESET, first, mark.next, row["at"])
        mark.come_to = mark.next = first

    def _handed_out(self, row: Row) -> Iterator[tuple[int, int]]:
        """The runs of sequences behind these pull sequences of a consumer, which are then no longer held."""
        held = self.mark.held.get(row["consumer"], [])
        here, after = row["first_pull"], row["next_pull"]
        place = max(0, bisect_right(held, here, key=lambda one: one[0]) - 1)
        kept: list[tuple[int, int, int]] = []
        found: list[tuple[int, int]] = []
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
            found.append((first + begin - first_pull, first + end - first_pull))
        held[place:last] = kept
        if not held:
            self.mark.held.pop(row["consumer"], None)
        self.mark.unmatched += max(0, after - here)
        yield from found


_APPLY: Final[Mapping[str, Callable[[GroupSteps, Row], Iterator[Step]]]] = {
    "groupdefined": GroupSteps.defined,
    "configured": GroupSteps.configured,
    "ended": GroupSteps.ended,
    "pulled": GroupSteps.pulled,
    "acked": GroupSteps.acked,
    "nacked": GroupSteps.given_back,
    "expired": GroupSteps.given_back,
    "dead": GroupSteps.dead,
    "skipped": GroupSteps.skipped,
    "sought": GroupSteps.sought,
    "passed": GroupSteps.passed,
    "keyed": GroupSteps.keyed,
    "replayed": GroupSteps.replayed,
    "setaside": GroupSteps.set_aside,
    "broughtback": GroupSteps.brought_back,
    "movedback": GroupSteps.moved_back,
}
