"""Converts the actions of one group into steps on sequences of messages.

The broker keeps the state of a group while it runs (`qmq_client/group/state.py`); it forgets
settled messages, and the fold does not. So this module uses the broker's actions, and its ranges
for held messages, but an action becomes steps instead of a state. An ack names pull sequences of a
consumer; here they are converted to the sequences of the messages. Messages that a group skips are
found here, too. A step covers a whole range: a million messages may be one step. `blocks.py`
applies steps to messages. A test runs both on random histories and compares.

Deliveries before the table of actions begins are unknown: its settlements are counted and otherwise ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, NamedTuple, get_args

import msgspec

from qmq_client.group.actions import (
    Acked,
    Action,
    BroughtBack,
    Configured,
    Dead,
    Ended,
    Expired,
    GroupDefined,
    Keyed,
    MovedBack,
    Nacked,
    Passed,
    Pulled,
    Replayed,
    SetAside,
    Skipped,
    Sought,
    kind_name,
)
from qmq_client.group.history import LEASE_ENDED
from qmq_client.group.leases import Lease
from qmq_client.group.ranges import Spans
from qmq_pipeline.tables.table import Column, Table

#: The kinds of steps; `blocks.py` defines their effects.
PULLED, ACKED, RETURNED, DEAD, LONG_RETRY, REDELIVERED = (
    "pulled",
    "acked",
    "returned",
    "dead",
    "long retry",
    "redelivered",
)
REPLAYED, WAITING, FILTERED, PASSED_OVER = "replayed", "waiting", "filtered", "passed over"
GIVEN_UP, GIVEN_UP_BY_FORCE, RESET = "given up", "deleted by force", "reset"
#: Reasons of messages that a group will never get although they were for it; the audit reports them.
BY_FORCE: Final = "deleted by force"
SOUGHT: Final = "skipped by a seek"
NEVER_GIVEN: Final = "skipped without a delivery"
Row = Mapping[str, Any]
#: The table in which steps pass from the tasks that find them to those that apply them; not stored.
STEPS: Final = Table(
    name="steps",
    layer="",
    version=1,
    key=("subject", "consumer_group", "action_offset", "action_number", "number"),
    columns=(
        Column("subject", "text", "the subject"),
        Column("consumer_group", "text", "the group"),
        Column("action_offset", "long", "offset of its action"),
        Column("action_number", "int", "the action's place in its frame"),
        Column("number", "int", "its place among the steps of the action"),
        Column(
            "op", "text", "kind of the step; `mark` for the state of the group after all of them"
        ),
        Column("first", "long", "first sequence"),
        Column("next", "long", "one after the last"),
        Column("at", "long", "microseconds since 1970"),
        Column("attempt", "int", "of a pull or dead letter"),
        Column(
            "reason", "text", "reason why the group does not get it; of `mark` the state as JSON"
        ),
        Column("error", "text", "error of the consumer"),
    ),
)


class Step(NamedTuple):
    """One step: an event for a range of sequences."""

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
    """The state of a group without its messages, from which the next fold continues. Stored as JSON."""

    #: First sequence for the group; None until an action gives it.
    first: int | None = None
    #: The group cursor: every message below was delivered to the group, or is not for it.
    come_to: int = 0
    #: One after the highest known sequence.
    next: int = 0
    has_ended: bool = False
    #: Tags of which a message must have at least one, and tags that it must have all; None if no action gives them.
    filter: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    #: Whether the filter has ever changed.
    was_refiltered: bool = False
    #: Settlements of deliveries that are older than the table.
    unmatched: int = 0
    #: Consumer → its deliveries that have not ended.
    held: dict[str, Spans[Lease]] = field(default_factory=dict)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> GroupMark:
        """Convert back from the result of `to_json`."""
        held: dict[str, Spans[Lease]] = {}
        for name, some in found["held"].items():
            held[name] = Spans()
            for one in some:
                held[name].add(_lease(*one))
        tags = found["filter"]
        known = None if tags is None else (tuple(tags[0]), tuple(tags[1]))
        return cls(**{**found, "held": held, "filter": known})

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        held = {
            name: [(one.first, one.next, one.first_sequence) for one in some]
            for name, some in self.held.items()
        }
        return {**values, "held": held}


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
        """The group is created, perhaps again after it ended; otherwise only a setting was changed."""
        first, mark = row["first_sequence"], self.mark
        if mark.first is None:
            mark.first = mark.come_to = mark.next = first
            mark.filter = ((), ())
        elif mark.has_ended:
            yield self._given_up(mark.come_to, first, row, "while the group did not exist")
            yield from self._begin_at(first, row)
            mark.filter = ((), ())
        mark.has_ended = False

    def configured(self, row: Row) -> Iterator[Step]:
        settings = msgspec.json.decode(row["action_json"], type=Configured).settings
        tags = (settings.any_tags, settings.all_tags)
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
        if row["attempt"] == 1:  # messages that it skipped before are not for it
            yield from self._come_to(first, row)
            self.mark.come_to = max(self.mark.come_to, after)
        held = self.mark.held.setdefault(row["consumer"], Spans())
        given = _lease(row["first_pull"], row["next_pull"], first)
        held.take(given.first, given.next)  # a hole in the log may hide that the group ended
        held.add(given)
        yield Step(PULLED, first, after, row["at"], row["attempt"])

    def acked(self, row: Row) -> Iterator[Step]:
        for first, after in self._handed_out(row):
            yield Step(ACKED, first, after, row["at"])

    def returned(self, row: Row) -> Iterator[Step]:
        said = row["error"] or (LEASE_ENDED if row["action"] == _EXPIRED else None)
        for first, after in self._handed_out(row):
            yield Step(RETURNED, first, after, row["at"], 0, None, said)

    def dead(self, row: Row) -> Iterator[Step]:
        yield self._step(DEAD, row, row["attempt"], row["reason"], row["error"])

    def long_retry(self, row: Row) -> Iterator[Step]:
        """Messages that waited for redelivery became long retries, with copies in the log."""
        yield self._step(LONG_RETRY, row)

    def redelivered(self, row: Row) -> Iterator[Step]:
        first = row["first_sequence"]
        yield Step(REDELIVERED, first, first + 1, row["at"])

    def skipped(self, row: Row) -> Iterator[Step]:
        """Messages were deleted by force; those in flight may still be settled, and long retries have copies."""
        mark, after = self.mark, row["next_sequence"]
        yield self._step(GIVEN_UP_BY_FORCE, row, 0, BY_FORCE)
        mark.first = after if mark.first is None else mark.first
        mark.come_to = max(mark.come_to, after)

    def sought(self, row: Row) -> Iterator[Step]:
        """The group was moved: it never gets skipped messages, and later ones count as new."""
        first, mark = row["first_sequence"], self.mark
        yield self._given_up(first if mark.first is None else mark.first, first, row, SOUGHT)
        mark.held.clear()
        yield from self._begin_at(first, row)

    def moved_back(self, row: Row) -> Iterator[Step]:
        """A start found these messages missing; other messages got their sequences, and are new to the group."""
        first, mark = row["next_sequence"], self.mark
        yield Step(RESET, first, mark.next, row["at"])
        mark.come_to, mark.next = min(mark.come_to, first), min(mark.next, first)
        mark.first = None if mark.first is None else min(mark.first, first)
        for consumer, held in list(mark.held.items()):
            for one in list(held):
                if one.next_sequence > first:
                    held.take(one.first + max(0, first - one.first_sequence), one.next)
            if not held:
                del mark.held[consumer]

    def passed(self, row: Row) -> Iterator[Step]:
        yield from self._come_to(row["next_sequence"], row)

    def keyed(self, row: Row) -> Iterator[Step]:
        chosen = msgspec.json.decode(row["action_json"], type=Keyed).sequences
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
        """Move the cursor up to here: skipped messages are not for the group, if it has a filter."""
        mark = self.mark
        if mark.first is None:
            mark.first = mark.come_to = after
        if mark.come_to < after:
            is_unfiltered = mark.filter == ((), ())
            op, reason = (PASSED_OVER, NEVER_GIVEN) if is_unfiltered else (FILTERED, None)
            yield Step(op, mark.come_to, after, row["at"], 0, reason)
            mark.come_to = after

    def _begin_at(self, first: int, row: Row) -> Iterator[Step]:
        """From here on the group gets all messages as if for the first time."""
        mark = self.mark
        mark.first = first if mark.first is None else min(mark.first, first)
        yield Step(RESET, first, mark.next, row["at"])
        mark.come_to = mark.next = first

    def _handed_out(self, row: Row) -> Iterator[tuple[int, int]]:
        """The runs of sequences for these pull sequences of a consumer, which no longer holds them afterwards."""
        first, after = row["first_pull"], row["next_pull"]
        held = self.mark.held.get(row["consumer"])
        found = [] if held is None else held.take(first, after)
        if held is not None and not held:
            del self.mark.held[row["consumer"]]
        self.mark.unmatched += after - first - sum(one.next - one.first for one in found)
        for one in found:
            yield one.first_sequence, one.next_sequence


def _lease(first: int, next_: int, first_sequence: int) -> Lease:
    """A lease without a deadline, which is not needed here."""
    return Lease(
        first=first, next=next_, first_sequence=first_sequence, attempt=1, token=0, until_ms=0
    )


_EXPIRED: Final = kind_name(Expired)
#: The handler of each kind of action; the other kinds change no message.
_KINDS: Final[Mapping[type[Action], Callable[[GroupSteps, Row], Iterator[Step]]]] = {
    GroupDefined: GroupSteps.defined,
    Configured: GroupSteps.configured,
    Ended: GroupSteps.ended,
    Pulled: GroupSteps.pulled,
    Acked: GroupSteps.acked,
    Nacked: GroupSteps.returned,
    Expired: GroupSteps.returned,
    Dead: GroupSteps.dead,
    Skipped: GroupSteps.skipped,
    Sought: GroupSteps.sought,
    Passed: GroupSteps.passed,
    Keyed: GroupSteps.keyed,
    Replayed: GroupSteps.replayed,
    SetAside: GroupSteps.long_retry,
    BroughtBack: GroupSteps.redelivered,
    MovedBack: GroupSteps.moved_back,
}
_APPLY: Final = {kind_name(kind): apply for kind, apply in _KINDS.items()}
#: Names of the kinds that change no message.
IDLE_KINDS: Final = tuple(kind_name(kind) for kind in get_args(Action) if kind not in _KINDS)
