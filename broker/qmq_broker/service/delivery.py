"""Delivery: which consumer gets which message, and what becomes of it.

Consumers are not bound to partitions: a group has one cursor per subject and whoever pulls gets the
next messages (QMQ's idea). Every change is decided on the state, written to the action log, then
applied; a hand-out is in the log before the answer leaves, so a lost answer is a lease that ends.
Time comes in as `now_ms`; `step` ends leases and wakes pulls, bounded in each pass.

All of this belongs to the loop thread. Reading records may block it for a page fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from qmq_broker.errors import BusyError, NoRoomError, PoisonedError, StoreError
from qmq_broker.service.checks import LATEST, check_pull, check_settle
from qmq_broker.service.groups import GroupState
from qmq_broker.service.handing_out import Room, Selection, Turns, select
from qmq_broker.service.limits import ServiceLimits
from qmq_broker.service.redelivery import Backoff
from qmq_broker.service.restart import groups_at_end, new_state
from qmq_broker.service.settling import (
    Outcome,
    Stale,
    Terms,
    plan_ended_leases,
    plan_settlements,
)
from qmq_broker.service.snapshot import encode_groups
from qmq_broker.service.waiting import GroupKey, WaitingPulls
from qmq_broker.storage.actions import Action, GroupDefined, Pulled, Skipped
from qmq_broker.storage.store import Store
from qmq_client.wire.deliveries import DeliveriesHead
from qmq_client.wire.requests import PullRequest, SettleAnswer, SettleRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOut:
    """What one pull was given; its lease runs and it is in the action log."""

    head: DeliveriesHead
    #: Length of each record, in order.
    lengths: list[int]
    records: list[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounts:
    """What one pass of `Delivery.step` did."""

    leases_ended: int
    pulls_woken: int
    #: Whether there is more to do at once.
    is_unfinished: bool


class _Group:
    """A group's state and what is remembered about it in memory only."""

    __slots__ = ("next_due_ms", "state", "turns")

    def __init__(self, state: GroupState) -> None:
        self.state = state
        self.turns = Turns()
        #: The time for which the group stands in the schedule.
        self.next_due_ms: int | None = None

    @property
    def key(self) -> GroupKey:
        return self.state.subject, self.state.group


class Delivery:
    """All groups of the broker over one store."""

    def __init__(
        self,
        store: Store,
        limits: ServiceLimits,
        *,
        draw: Callable[[], float],
        on_poisoned: Callable[[str], None],
        backoff: Backoff | None = None,
    ) -> None:
        """`draw` gives numbers from 0 … 1; `on_poisoned` is told when the action log fails."""
        self._store = store
        self._limits = limits
        self._draw = draw
        self._on_poisoned = on_poisoned
        self._backoff = backoff or Backoff()
        self._groups: dict[GroupKey, _Group] = {}
        self._schedule: list[tuple[int, GroupKey]] = []
        self.waiting = WaitingPulls(limits.waiting_pulls)
        #: Whether actions were written since the action log was last synced.
        self.is_unsynced = False

    def snapshot(self, now_ms: int) -> tuple[int, bytes]:
        """Where all groups are, and the offset of the action log at which they are there."""
        return self._store.actions.log.written_offset, encode_groups(self.groups(), now_ms)

    def start(self, now_ms: int) -> int:
        """Stand where the action log ends; returns how many actions were replayed."""
        actions = self._store.actions
        states, count = groups_at_end(actions.snapshot, actions.replay(), now_ms)
        for state in states:
            queue = self._store.queue(state.subject)
            state.clamp(0 if queue is None else queue.next_sequence)
            group = self._groups[state.subject, state.group] = _Group(state)
            self._reschedule(group, now_ms)
        return count

    def needed_offset(self, dead_since_ms: int) -> int:
        """Where the first message stands that some group may still be given."""
        offset = self._store.durable_offset
        for group in self._groups.values():
            queue = self._store.queue(group.state.subject)
            first = group.state.first_needed(dead_since_ms)
            if queue is not None and (entries := queue.entries(first, 1)):
                offset = min(offset, entries[0].physical_offset)
        return offset

    def groups(self) -> list[GroupState]:
        """The state of every group, to be read only."""
        return [group.state for group in self._groups.values()]

    def group(self, subject: str, name: str) -> GroupState | None:
        """The state of one group, to be read only."""
        group = self._groups.get((subject, name))
        return None if group is None else group.state

    def settle(self, request: SettleRequest, now_ms: int) -> SettleAnswer:
        """Take outcomes; they are in the action log on return."""
        check_settle(request, self._limits)
        outcome = self._settle(request, now_ms)
        return SettleAnswer(settled=outcome.settled, stale=tuple(outcome.stale))

    def begin_pull(self, request: PullRequest, now_ms: int) -> tuple[Stale, ...]:
        """Check a pull and take the settlements that it carries; returns what was refused.

        Called once for each request, before the first `pull`.
        """
        check_pull(request, self._limits)
        return tuple(self._settle(request, now_ms).stale) if request.settlements else ()

    def pull(
        self, request: PullRequest, now_ms: int, stale: tuple[Stale, ...] = ()
    ) -> HandOut | None:
        """Hand out what there is for this request, or return None.

        Requires: `begin_pull` accepted the request. Raises `BusyError` over a bound.
        """
        group = self._group_for(request, now_ms)
        self._end_leases(group, now_ms)
        selection = self._select(group, request, now_ms)
        if not selection.entries:
            self._reschedule(group, now_ms)
            return None
        state = group.state
        records = self._store.read_records(selection.entries, subject=state.subject)
        first_pull_sequence = state.next_pull_sequence(request.consumer)
        self._write(
            [
                Pulled(
                    at_ms=now_ms,
                    subject=state.subject,
                    group=state.group,
                    consumer=request.consumer,
                    token=self._store.epoch,
                    first_pull_sequence=first_pull_sequence,
                    runs=selection.runs,
                    lease_until_ms=now_ms + request.lease_ms,
                )
            ],
            group,
        )
        self._reschedule(group, now_ms)
        if self._has_more(state, now_ms):
            self.waiting.wake_group(group.key)
        return HandOut(
            head=DeliveriesHead(
                subject=state.subject,
                token=self._store.epoch,
                lease_ms=request.lease_ms,
                first_pull_sequence=first_pull_sequence,
                runs=selection.runs,
                stale=stale,
            ),
            lengths=[len(record) for record in records],
            records=records,
        )

    def nothing(self, request: PullRequest, stale: tuple[Stale, ...]) -> HandOut:
        """The answer to a pull that got nothing."""
        return HandOut(
            head=DeliveriesHead(
                subject=request.subject,
                token=self._store.epoch,
                lease_ms=request.lease_ms,
                first_pull_sequence=0,
                runs=(),
                stale=stale,
            ),
            lengths=[],
            records=[],
        )

    def on_visible(self, subjects: Iterable[str]) -> int:
        """Messages of these subjects became durable; returns how many pulls were woken."""
        return sum(self.waiting.wake_subject(subject) for subject in subjects)

    def step(self, now_ms: int) -> StepCounts:
        """One bounded pass: end leases whose time has come and wake pulls for what is due."""
        leases_ended = pulls_woken = 0
        due: list[_Group] = []
        while self._is_due(now_ms) and len(due) < self._limits.groups_per_pass:
            due_ms, key = heappop(self._schedule)
            group = self._groups[key]
            if group.next_due_ms == due_ms:
                group.next_due_ms = None
                due.append(group)
        for group in due:
            leases_ended += self._end_leases(group, now_ms)
            self._reschedule(group, now_ms)
            if self._has_more(group.state, now_ms):
                pulls_woken += self.waiting.wake_group(group.key)
        return StepCounts(
            leases_ended=leases_ended,
            pulls_woken=pulls_woken,
            is_unfinished=self._is_due(now_ms),
        )

    def _settle(self, request: SettleRequest | PullRequest, now_ms: int) -> Outcome:
        group = self._groups.get((request.subject, request.group))
        if group is None:
            nobody = GroupState(
                subject=request.subject, group=request.group, first_sequence=0, max_attempts=1
            )
            return plan_settlements(
                nobody, request.consumer, request.settlements, self._terms(now_ms)
            )
        self._end_leases(group, now_ms)
        outcome = plan_settlements(
            group.state, request.consumer, request.settlements, self._terms(now_ms)
        )
        self._write(outcome.actions, group)
        log = group.state.consumer(request.consumer)
        if log is not None:
            log.last_seen_ms = now_ms
        self._reschedule(group, now_ms)
        if self._has_more(group.state, now_ms):
            self.waiting.wake_group(group.key)
        return outcome

    def _select(self, group: _Group, request: PullRequest, now_ms: int) -> Selection:
        state, limits = group.state, self._limits
        queue = self._store.queue(request.subject)
        if queue is None:
            return Selection(runs=(), entries=[])
        self._skip_what_is_gone(group, queue.first_sequence, now_ms)
        log = state.consumer(request.consumer)
        room_messages = limits.in_flight_per_consumer - (0 if log is None else log.in_flight)
        if log is not None:
            log.last_seen_ms = now_ms
        if room_messages <= 0:
            raise BusyError(
                f"consumer {request.consumer} holds {limits.in_flight_per_consumer} messages: "
                "settle some before the next pull",
                retry_after_s=1.0,
            )
        if len(state.dead) >= limits.dead_letters_per_group:
            raise BusyError(
                f"group {state.group} has {len(state.dead)} dead letters", retry_after_s=60.0
            )
        room = Room(
            now_ms=now_ms,
            messages=min(request.max_messages, limits.pull_messages, room_messages),
            bytes=min(request.max_bytes, limits.pull_bytes),
            new_messages=limits.unsettled_per_group - state.in_flight - state.waiting,
        )
        selection = select(state, group.turns, queue, room)
        while selection.lost is not None:
            self._skip(group, *selection.lost, now_ms)
            selection = select(state, group.turns, queue, room)
        return selection

    def _skip_what_is_gone(self, group: _Group, first_sequence: int, now_ms: int) -> None:
        """Pass over what was given up by force before this group got it."""
        state = group.state
        waiting = next(state.redeliveries.runs(), None)
        first = state.cursor if waiting is None else min(state.cursor, waiting.first)
        if first < first_sequence:
            self._skip(group, first, first_sequence, now_ms)

    def _skip(self, group: _Group, first: int, next_sequence: int, now_ms: int) -> None:
        state = group.state
        self._write([Skipped(now_ms, state.subject, state.group, first, next_sequence)], group)

    def _group_for(self, request: PullRequest, now_ms: int) -> _Group:
        key = (request.subject, request.group)
        group = self._groups.get(key)
        if group is None:
            self._check_room_for_group()
            queue = self._store.queue(request.subject)
            is_latest = request.start == LATEST and queue is not None
            first_sequence = queue.next_sequence if is_latest and queue is not None else 0
            if queue is not None and not is_latest:
                first_sequence = queue.first_sequence
            defined = _definition(request, first_sequence, now_ms)
            group = _Group(new_state(defined))
            self._write([defined], group)
            self._groups[key] = group
        elif group.state.max_attempts != request.max_attempts:
            self._write([_definition(request, group.state.cursor, now_ms)], group)
        self._check_room_for_consumer(group.state, request.consumer, now_ms)
        return group

    def _check_room_for_group(self) -> None:
        if len(self._groups) >= self._limits.groups:
            raise BusyError(f"there are {len(self._groups)} groups already", retry_after_s=60.0)

    def _check_room_for_consumer(self, state: GroupState, consumer: str, now_ms: int) -> None:
        limit = self._limits.consumers_per_group
        if state.consumer(consumer) is not None or state.consumer_count < limit:
            return
        state.forget_idle_consumers(now_ms - self._limits.consumer_idle_ms)
        if state.consumer_count >= limit:
            raise BusyError(
                f"group {state.group} has {state.consumer_count} consumers", retry_after_s=60.0
            )

    def _end_leases(self, group: _Group, now_ms: int) -> int:
        ended = group.state.ended_leases(now_ms, self._limits.leases_ended_per_pass)
        if ended:
            self._write(plan_ended_leases(group.state, ended, self._terms(now_ms)), group)
        return len(ended)

    def _write(self, actions: Sequence[Action], group: _Group) -> None:
        """Journal first: in the action log, then in the state."""
        if not actions:
            return
        try:
            self._store.actions.append(actions)
        except NoRoomError:
            raise
        except (StoreError, OSError) as error:
            reason = f"action log: {type(error).__name__}: {error}"
            self._on_poisoned(reason)
            raise PoisonedError(reason) from error
        self.is_unsynced = True
        try:
            for action in actions:
                group.state.apply(action)
        except Exception as error:
            # Log and state disagree now: only a replay of the log can mend that.
            self._on_poisoned(f"state of group {group.key}: {type(error).__name__}: {error}")
            raise

    def _is_due(self, now_ms: int) -> bool:
        return bool(self._schedule) and self._schedule[0][0] <= now_ms

    def _has_more(self, state: GroupState, now_ms: int) -> bool:
        due_ms = state.redeliveries.next_due_ms()
        if due_ms is not None and due_ms <= now_ms:
            return True
        queue = self._store.queue(state.subject)
        return queue is not None and state.cursor < queue.next_sequence

    def _reschedule(self, group: _Group, now_ms: int) -> None:
        """Put the group into the schedule for its next event, unless it stands there earlier."""
        events = [group.state.next_deadline_ms()]
        retry_at_ms = group.state.redeliveries.next_due_ms()
        if retry_at_ms is not None and retry_at_ms > now_ms:
            events.append(retry_at_ms)
        due_ms = min((event for event in events if event is not None), default=None)
        if due_ms is not None and (group.next_due_ms is None or due_ms < group.next_due_ms):
            group.next_due_ms = due_ms
            heappush(self._schedule, (due_ms, group.key))

    def _terms(self, now_ms: int) -> Terms:
        return Terms(now_ms=now_ms, backoff=self._backoff, draw=self._draw)


def _definition(request: PullRequest, first_sequence: int, now_ms: int) -> GroupDefined:
    return GroupDefined(
        at_ms=now_ms,
        subject=request.subject,
        group=request.group,
        first_sequence=first_sequence,
        max_attempts=request.max_attempts,
    )
