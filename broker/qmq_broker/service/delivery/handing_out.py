"""Which messages a pull gets: redeliveries that are due, then new ones, within its limits.

Decides only: reads the state of a group and the consume queue of its subject. Redeliveries go
first, but one place in four is kept for new messages if there are any, so a backlog of failing
messages slows the others down and never stops them. Suspects are delivered one by one, when it is
their turn (`suspects.py`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import itemgetter
from typing import Final

from qmq_broker.errors import BusyError
from qmq_broker.service.delivery.bodies import GroupQueue
from qmq_broker.service.delivery.filters import TagFilter
from qmq_broker.service.delivery.groups import GroupState
from qmq_broker.service.delivery.redelivery import Redelivery
from qmq_broker.service.limits import ServiceLimits
from qmq_broker.storage.queues.consume_queue import Place
from qmq_client.wire.deliveries import DeliveryRun
from qmq_client.wire.requests import PullRequest

#: One place of this many is kept for new messages.
NEW_SHARE: Final = 4
#: Entries read in one step: a pull of large messages stops long before its count is reached.
ENTRIES_PER_READ: Final = 512
#: Entries that one scan checks against a filter: about a millisecond.
SCANNED_MAX: Final = 4_096
_RECORD_BYTES: Final = itemgetter(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What a pull will be given: runs and, for each message, where its record is."""

    runs: tuple[DeliveryRun, ...]
    entries: list[Place]
    #: The next sequences, if they are lost for good and nothing comes before them.
    lost: tuple[int, int] | None = None
    #: How far the group gets with this; None if that is the last message in it.
    passed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """How much one pull may be given."""

    now_ms: int
    messages: int
    bytes: int
    #: Messages that the group may get beyond those in flight or waiting.
    new_messages: int
    #: Whether it is a suspect's turn: then it alone is given.
    is_for_suspect: bool = False


def room_for(
    state: GroupState,
    request: PullRequest,
    limits: ServiceLimits,
    now_ms: int,
    *,
    takes_new: bool = True,
) -> Room:
    """How much this pull may be given; raises `BusyError` if that is nothing."""
    log = state.consumer(request.consumer)
    room_messages = limits.in_flight_per_consumer - (0 if log is None else log.in_flight)
    if room_messages <= 0:
        raise BusyError(
            f"consumer {request.consumer} holds {limits.in_flight_per_consumer} messages: "
            "settle some before the next pull",
            retry_after_s=1.0,
        )
    if len(state.dead) >= limits.dead_letters_per_group:
        raise BusyError(
            f"group {state.group} has {len(state.dead)} dead letters",
            retry_after_s=60.0,
            field="dead letters of a group",
            limit=str(limits.dead_letters_per_group),
            value=str(len(state.dead)),
            remedy="Replay or purge some: qmq dead.",
        )
    return Room(
        now_ms=now_ms,
        messages=min(request.max_messages, limits.pull_messages, room_messages),
        bytes=min(request.max_bytes, limits.pull_bytes),
        new_messages=limits.unsettled_per_group - state.unsettled if takes_new else 0,
    )


class Turns:
    """Remembers, from pull to pull of one group, the places owed to new messages."""

    __slots__ = ("_owed_quarters",)

    def __init__(self) -> None:
        self._owed_quarters = 0

    def new_share(self, messages: int) -> int:
        """Places for new messages among the next `messages`, if there are redeliveries too."""
        share, self._owed_quarters = divmod(messages + self._owed_quarters, NEW_SHARE)
        return share


def select(state: GroupState, turns: Turns, queue: GroupQueue, room: Room) -> Selection:
    """The messages for one pull, perhaps none."""
    if room.is_for_suspect:
        suspect = state.redeliveries.suspect(room.now_ms)
        return _fit([] if suspect is None else [_again(suspect)], queue, room.bytes)
    fresh, passed = _fresh(state, queue, room)
    new_count = sum(run.count for run in fresh)
    due = [_again(run) for run in state.redeliveries.due(room.now_ms, room.messages)]
    due_count = sum(run.count for run in due)
    if due and new_count and due_count + new_count > room.messages:
        share = min(new_count, turns.new_share(room.messages))
        due = _head(due, room.messages - share)
        due_count = sum(run.count for run in due)
    fitting = _head(fresh, room.messages - due_count)
    selection = _fit(join_runs([*due, *fitting]), queue, room.bytes)
    if passed is None or fitting != fresh or len(selection.entries) < due_count + new_count:
        return selection
    return replace(selection, passed=passed)


def _again(run: Redelivery) -> DeliveryRun:
    return DeliveryRun(
        first_sequence=run.first, count=run.next - run.first, attempt=run.attempts + 1
    )


def _fresh(
    state: GroupState, queue: GroupQueue, room: Room
) -> tuple[list[DeliveryRun], int | None]:
    """Messages that were never delivered, and how far the group gets with all of them.

    None if that is the last of them.
    """
    if state.lanes is not None:
        return _runs_of(state.lanes.ready(room.messages)), None
    new_count = max(0, min(queue.next_sequence - state.cursor, room.new_messages))
    if state.filter is not None:
        return _matching(state.cursor, state.filter, queue, min(new_count, room.messages))
    if not new_count:
        return [], None
    return [DeliveryRun(first_sequence=state.cursor, count=new_count, attempt=1)], None


def _matching(
    first: int, wanted: TagFilter, queue: GroupQueue, messages_max: int
) -> tuple[list[DeliveryRun], int | None]:
    """The next messages whose tag hash fits, and how far the scan went."""
    found: list[int] = []
    sequence, next_sequence = first, min(queue.next_sequence, first + SCANNED_MAX)
    while sequence < next_sequence and len(found) < messages_max:
        step = queue.entries(sequence, min(ENTRIES_PER_READ, next_sequence - sequence))
        if not step:
            break
        for number, entry in enumerate(step, start=sequence):
            # A lost one may have been for the group: it is counted where it is met.
            if not entry.record_bytes or wanted.may_match(entry.tag_hash):
                found.append(number)
        sequence += len(step)
    if len(found) > messages_max:
        return _runs_of(found[:messages_max]), None
    return _runs_of(found), sequence if sequence > first else None


def _runs_of(sequences: Sequence[int]) -> list[DeliveryRun]:
    return join_runs([DeliveryRun(first_sequence=one, count=1, attempt=1) for one in sequences])


def _head(runs: Sequence[DeliveryRun], messages: int) -> list[DeliveryRun]:
    head: list[DeliveryRun] = []
    for run in runs:
        count = min(run.count, messages)
        if count <= 0:
            break
        head.append(_first_of(run, count))
        messages -= count
    return head


def join_runs(runs: Sequence[DeliveryRun]) -> list[DeliveryRun]:
    """The same runs, with neighbours of the same attempt joined."""
    joined: list[DeliveryRun] = []
    for run in runs:
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.attempt == run.attempt
            and last.first_sequence + last.count == run.first_sequence
        ):
            joined[-1] = _first_of(last, last.count + run.count)
        else:
            joined.append(run)
    return joined


def _fit(runs: Sequence[DeliveryRun], queue: GroupQueue, bytes_max: int) -> Selection:
    """Cut to `bytes_max` of records, but give at least one message."""
    fitting: list[DeliveryRun] = []
    entries: list[Place] = []
    room_bytes = bytes_max
    for run in runs:
        fits, room_bytes = _fitting(run, queue, room_bytes, is_first=not entries)
        if fits:
            fitting.append(_first_of(run, len(fits)))
        entries += fits
        if len(fits) < run.count:
            if not entries:
                lost = _lost(queue, run.first_sequence, run.first_sequence + run.count)
                return Selection(runs=(), entries=[], lost=lost)
            break
    return Selection(runs=tuple(fitting), entries=entries)


def _fitting(
    run: DeliveryRun, queue: GroupQueue, room_bytes: int, *, is_first: bool
) -> tuple[list[Place], int]:
    """The first entries of `run` that fit, and the room left if all of it fits."""
    fits: list[Place] = []
    sequence, next_sequence = run.first_sequence, run.first_sequence + run.count
    while sequence < next_sequence:
        step = queue.places(sequence, min(ENTRIES_PER_READ, next_sequence - sequence))
        lengths = list(map(_RECORD_BYTES, step))
        count = _fitting_count(lengths, room_bytes, is_first=is_first)
        fits += step[:count]
        if not step or count < len(step):
            break
        is_first = False
        room_bytes -= sum(lengths)
        sequence += count
    return fits, room_bytes


def _fitting_count(lengths: list[int], room_bytes: int, *, is_first: bool) -> int:
    """How many of these records fit: none after a lost one; with `is_first`, at least one."""
    if 0 in lengths:
        lengths = lengths[: lengths.index(0)]
    if sum(lengths) <= room_bytes:
        return len(lengths)
    fitting = bisect_right(list(accumulate(lengths)), room_bytes)
    return max(fitting, 1) if is_first else fitting


def _lost(queue: GroupQueue, first: int, next_sequence: int) -> tuple[int, int] | None:
    """The lost sequences that begin at `first`, within one read of entries."""
    after = first
    for entry in queue.entries(first, min(ENTRIES_PER_READ, next_sequence - first)):
        if entry.record_bytes:
            break
        after += 1
    return (first, after) if after > first else None


def first_of(selection: Selection, messages: int) -> Selection:
    """The first messages of a selection."""
    runs = tuple(_head(selection.runs, messages))
    return Selection(runs=runs, entries=selection.entries[:messages])


def _first_of(run: DeliveryRun, count: int) -> DeliveryRun:
    if count == run.count:
        return run
    return DeliveryRun(first_sequence=run.first_sequence, count=count, attempt=run.attempt)
