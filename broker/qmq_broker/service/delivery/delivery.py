"""Delivery: selects messages for the pulls of consumers, and applies their settlements.

Consumers are not bound to partitions: a group has one cursor per subject, and each pull gets
the next messages (QMQ's idea). Every change is decided on the state, written to the action log,
then applied. A delivery is in the log before the answer leaves, so a lost answer is merely a lease
that ends. Time is an argument, `now_ms`; `step` ends leases and wakes pulls in bounded passes.

All of this is owned by the loop thread. Reading records may block it for a page fault.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from qmq_broker.errors import BusyError, DiskError, NoRoomError
from qmq_broker.service.delivery.bodies import group_queue
from qmq_broker.service.delivery.budget import Budget
from qmq_broker.service.delivery.checks import check_pull, check_settle, ranges_of
from qmq_broker.service.delivery.journal import Journal
from qmq_broker.service.delivery.letter_pool import LetterPool
from qmq_broker.service.delivery.needed_log import NeededLog
from qmq_broker.service.delivery.registry import Group, Groups
from qmq_broker.service.delivery.slices import in_slices
from qmq_broker.service.delivery.snapshot import content_of, groups_at_end, image_of
from qmq_broker.service.delivery.subject_shares import SubjectShares
from qmq_broker.service.delivery.waiting import GroupKey, WaitingPulls
from qmq_broker.service.limits import ServiceLimits
from qmq_broker.storage.files.snapshots import GroupsContent
from qmq_broker.storage.store import Store
from qmq_client.group.actions import Action, MovedBack
from qmq_client.group.apply import must_move_back
from qmq_client.group.picking import Picked, Room, hand_out
from qmq_client.group.settings import backoff_of
from qmq_client.group.settling import (
    ERROR_CHARACTERS_MAX,
    ERROR_CHARACTERS_MIN,
    Plan,
    Stale,
    Terms,
    plan_ended_leases,
    plan_settlements,
)
from qmq_client.group.state import GroupState
from qmq_client.wire.backoff import ExponentialBackoff
from qmq_client.wire.deliveries import DeliveriesHead, Records
from qmq_client.wire.groups import group_of
from qmq_client.wire.names import COPIES
from qmq_client.wire.requests import PullRequest, SettleAnswer, Settlement, SettleRequest

_log = logging.getLogger(__name__)
#: Pause before leases are ended again after the action log had no room.
NO_ROOM_PAUSE_MS: Final = 1_000
#: Actions that a start replays before it removes unused pages.
_REPLAYED_PER_STEP: Final = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOut:
    """The messages delivered to one pull: written to the action log, with a running lease."""

    head: DeliveriesHead
    records: Records
    #: Whether it is already acked (at most once): made durable before the answer, so that no
    #: message is delivered twice.
    is_final: bool = False


@dataclass(slots=True, kw_only=True)
class Settled:
    """The outcome of the settlements of one request so far."""

    count: int = 0
    stale: list[Stale] = field(default_factory=list)
    has_begun: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounts:
    """Counts of one pass of `Delivery.step`."""

    leases_ended: int
    pulls_woken: int
    #: Whether more work is due now.
    is_unfinished: bool


class Delivery:
    """All groups of the broker over one store."""

    def __init__(
        self,
        store: Store,
        limits: ServiceLimits,
        *,
        draw: Callable[[], float],
        on_poisoned: Callable[[str], None],
        backoff: ExponentialBackoff | None = None,
    ) -> None:
        """`draw` returns random numbers from 0 … 1; `on_poisoned` is called if the action log fails."""
        self._store = store
        self._limits = limits
        self._draw = draw
        self._backoff = backoff or ExponentialBackoff()
        bytes_max = min(limits.dead_letters_memory_bytes, limits.groups_bytes // 4)
        #: The dead letters in memory.
        self.pool = LetterPool(store.letters, store.refusals, bytes_max=bytes_max)
        #: The memory of all groups.
        self.budget = Budget(limits, self.pool)
        self.journal = Journal(store, self.budget, on_poisoned)
        self.registry = Groups(store, limits, self.journal, self.budget)
        #: The tokens that created subjects.
        self.subject_shares = SubjectShares(limits, self.journal)
        self.needed_log = NeededLog(store, self.registry)
        self.waiting = WaitingPulls(limits.waiting_pulls, self._is_held_back)

    def snapshot(self, now_ms: int) -> tuple[int, Callable[[], GroupsContent]]:
        """The offset of the action log, and a function that encodes all groups at that offset, in any thread."""
        image = image_of(self.groups(), now_ms, self.subject_shares.owners)
        return self._store.actions.log.written_offset, partial(content_of, image)

    def start(self, now_ms: int) -> int:
        """Restore the groups from the action log; returns how many actions were replayed.

        Groups whose cursor is beyond the log's end are moved back, durably: new messages will get
        those sequences. Raises `NoRoomError` if the action log has no room for that.
        """
        actions = self._store.actions
        replayed = self._replayed(actions.replay())
        states, owners, count = groups_at_end(actions.snapshot, replayed, now_ms, self.pool)
        actions.forget_snapshot()
        there = {*self._store.subjects(), *self._store.schedule.pending_by_subject()}
        self.subject_shares.restore({one: its for one, its in owners.items() if one in there})
        for state in states:
            self._move_back(state, now_ms)
        if self.journal.is_unsynced:
            actions.sync()
        for state in states:
            self._reschedule(self.registry.restore(state, now_ms), now_ms)
        return count

    def _replayed(self, actions: Iterator[Action]) -> Iterator[Action]:
        """Yield these actions; pages that they make unused are removed meanwhile."""
        for count, action in enumerate(actions):
            if count % _REPLAYED_PER_STEP == 0:
                self.pool.step()
            yield action

    def _move_back(self, state: GroupState, now_ms: int) -> None:
        queue, copies = self._store.queue(state.subject), self._store.queue(COPIES)
        next_sequence = 0 if queue is None else queue.next_sequence
        next_copy = 0 if copies is None else copies.next_sequence
        if must_move_back(state, next_sequence, next_copy):
            where = (now_ms, state.subject, state.group)
            self.journal.write([MovedBack(*where, next_sequence, next_copy)], state)
            _log.warning(
                "group moved back, messages that it knew are gone: group=%s subject=%s next_sequence=%d",
                *(state.group, state.subject, next_sequence),
            )

    def groups(self) -> list[GroupState]:
        """The state of every group, read-only."""
        return [group.state for group in self.registry]

    def group(self, subject: str, name: str) -> GroupState | None:
        """The state of one group, read-only."""
        group = self.registry.find(subject, name)
        return None if group is None else group.state

    def skip_what_is_gone(self, group: Group, now_ms: int) -> None:
        """Count the messages that this group has lost by force, as its next pull would do."""
        if (queue := self._store.queue(group.state.subject)) is not None:
            group.picker.skip_what_is_gone(queue.first_sequence, now_ms)

    def settle(self, request: SettleRequest, now_ms: int) -> SettleAnswer:
        """Apply settlements; they are in the action log on return."""
        check_settle(request, self._limits)
        settled = Settled()
        for part in self.slices(request, settled):
            self.settle_slice(request, part, now_ms, settled)
        return SettleAnswer(settled=settled.count, stale=tuple(settled.stale))

    def check_settle(self, request: SettleRequest) -> None:
        """Raise `InvalidMessageError` for invalid settlements, before the first slice."""
        check_settle(request, self._limits)

    def slices(
        self, request: SettleRequest | PullRequest, settled: Settled
    ) -> Iterator[Settlement]:
        """Its settlements in portions; each is applied by one `settle_slice`."""
        group = self.registry.find(request.subject, group_of(request))
        state = None if group is None else group.state
        return in_slices(
            request.settlements,
            state,
            request.consumer,
            lambda token, part: settled.stale.append((token, *part)),
        )

    def settle_slice(
        self, request: SettleRequest | PullRequest, part: Settlement, now_ms: int, settled: Settled
    ) -> None:
        """Apply one portion; it is in the action log on return, and counted in `settled`.

        If the log has no room for a later portion, it is refused as stale; earlier ones count.
        """
        try:
            plan = self._settle(request, (part,), now_ms)
        except NoRoomError:
            if not settled.has_begun:
                raise
            settled.stale += [(part.token, *each) for each in ranges_of(part)]
            return
        settled.has_begun = True
        settled.count += plan.settled
        settled.stale += plan.stale

    def check_pull(self, request: PullRequest) -> None:
        """Raise `InvalidMessageError` for an invalid pull."""
        check_pull(request, self._limits)

    def begin_pull(self, request: PullRequest, now_ms: int) -> tuple[Stale, ...]:
        """Check a pull and apply the settlements it carries; returns those that were refused.

        Call it once for each request, before the first `pull`.
        """
        check_pull(request, self._limits)
        settled = Settled()
        for part in self.slices(request, settled):
            self.settle_slice(request, part, now_ms, settled)
        return tuple(settled.stale)

    def pull(
        self,
        request: PullRequest,
        now_ms: int,
        stale: tuple[Stale, ...] = (),
        *,
        owner: str = "",
    ) -> HandOut | None:
        """Deliver the available messages to this request; None for none.

        A group that it creates counts against the share of the token named `owner`. Requires:
        `begin_pull` accepted the request. Raises `BusyError` over a bound.
        """
        group = self.registry.for_pull(request, now_ms, owner)
        self._end_leases(group, now_ms)
        picked = self._pick(group, request, now_ms)
        if not picked.runs:
            self._reschedule(group, now_ms, is_unfinished=picked.is_unfinished)
            self._check_budget(group.state)
            return None
        state = group.state
        first_pull_sequence = state.next_pull_sequence(request.consumer)
        self.journal.write(
            hand_out(state, request, picked, self._store.hand_out_token, now_ms), state
        )
        group.note_given(picked.runs)
        self.after_change(group, now_ms)
        return HandOut(
            head=DeliveriesHead(
                subject=state.subject,
                token=self._store.hand_out_token,
                lease_ms=request.lease_ms,
                first_pull_sequence=first_pull_sequence,
                runs=picked.runs,
                stale=stale,
            ),
            records=picked.records,
            is_final=request.at_most_once is True,
        )

    def nothing(self, request: PullRequest, stale: tuple[Stale, ...]) -> HandOut:
        """The answer to a pull that got no message."""
        return HandOut(
            head=DeliveriesHead(
                subject=request.subject,
                token=self._store.hand_out_token,
                lease_ms=request.lease_ms,
                first_pull_sequence=0,
                runs=(),
                stale=stale,
            ),
            records=Records.of([]),
        )

    def on_visible(self, subjects: Iterable[str]) -> int:
        """Messages of these subjects became durable; returns how many pulls were woken."""
        return sum(self.waiting.wake_subject(subject) for subject in subjects)

    def step(self, now_ms: int) -> StepCounts:
        """One bounded pass: end expired leases and wake pulls for due messages."""
        leases_ended = pulls_woken = 0
        self.pool.step()
        for group in self.registry.take_due(now_ms):
            try:
                leases_ended += self._end_leases(group, now_ms)
            except (NoRoomError, DiskError) as error:
                self._store.refusals.note("ends_of_leases", error)
                self.registry.schedule(group, now_ms + NO_ROOM_PAUSE_MS)
                continue
            self._reschedule(group, now_ms)
            if self._has_more(group.state, now_ms):
                pulls_woken += self.waiting.wake_group(group.key)
        return StepCounts(
            leases_ended=leases_ended,
            pulls_woken=pulls_woken,
            is_unfinished=self.registry.is_due(now_ms),
        )

    def after_change(self, group: Group, now_ms: int) -> None:
        """The group was changed: reschedule it, and wake a pull if it has something to deliver."""
        self._reschedule(group, now_ms)
        if self._has_more(group.state, now_ms):
            self.waiting.wake_group(group.key)

    def _settle(
        self, request: SettleRequest | PullRequest, settlements: Sequence[Settlement], now_ms: int
    ) -> Plan:
        name = group_of(request)
        group = self.registry.find(request.subject, name)
        if group is None:
            unknown = GroupState(
                subject=request.subject, group=name, first_sequence=0, max_attempts=1
            )
            terms = self._terms(unknown, now_ms)
            return plan_settlements(unknown, request.consumer, settlements, terms)
        group.note_seen(request.consumer, now_ms)
        if settlements:
            group.instances.seen(now_ms)
        self._end_leases(group, now_ms)
        plan = plan_settlements(
            group.state, request.consumer, settlements, self._terms(group.state, now_ms)
        )
        self.journal.write(plan.actions, group.state)
        self.after_change(group, now_ms)
        return plan

    def _pick(self, group: Group, request: PullRequest, now_ms: int) -> Picked:
        state = group.state
        takes_new = self.budget.refusal(state.owner) is None
        room = room_for(state, request, self._limits, now_ms, takes_new=takes_new)
        queue = group_queue(self._store, state)
        picked = group.picker.pick(queue, request.consumer, request.lease_ms, room)
        if picked.is_held_back and self._has_more(state, now_ms):
            self.waiting.wake_group(group.key)  # for another consumer
        return picked

    def _check_budget(self, state: GroupState) -> None:
        """Raise `BusyError` if the group gets no messages for lack of memory."""
        refusal = self.budget.refusal(state.owner)
        queue = self._store.queue(state.subject)
        has_new = queue is not None and state.cursor < queue.next_sequence
        if refusal is not None and has_new and not state.is_paused:
            raise refusal

    def _is_held_back(self, key: GroupKey, consumer: str) -> bool:
        group = self.registry.find(*key)
        return group is not None and group.picker.suspects.is_held_back(consumer)

    def _end_leases(self, group: Group, now_ms: int) -> int:
        state = group.state
        count_max = state.dead.changed_at_once(self._limits.leases_ended_per_pass)
        ended = state.deadlines.ended(now_ms, count_max)
        if ended:
            terms = self._terms(state, now_ms)
            self.journal.write(plan_ended_leases(state, ended, terms), state)
            group.leases_ended += sum(lease.next - lease.first for _, lease in ended)
        return len(ended)

    def _has_more(self, state: GroupState, now_ms: int) -> bool:
        if state.is_paused:
            return False
        due_ms = state.redeliveries.next_due_ms()
        if due_ms is not None and due_ms <= now_ms:
            return True
        if state.by_key is not None and state.by_key.ready_count:
            return True
        queue = self._store.queue(state.subject)
        return queue is not None and state.cursor < queue.next_sequence

    def _reschedule(self, group: Group, now_ms: int, *, is_unfinished: bool = False) -> None:
        """Schedule the next event of the group."""
        state = group.state
        events = [state.deadlines.next_ms(), now_ms if is_unfinished else None]
        events.append(group.picker.suspects.look(now_ms))
        retry_at_ms = state.redeliveries.next_due_ms()
        if retry_at_ms is not None and retry_at_ms > now_ms:
            events.append(retry_at_ms)
        due_ms = min((event for event in events if event is not None), default=None)
        self.registry.schedule(group, due_ms)

    def _terms(self, state: GroupState, now_ms: int) -> Terms:
        has_room = self.budget.refusal(state.owner) is None
        return Terms(
            now_ms=now_ms,
            backoff=backoff_of(state.settings, self._backoff),
            draw=self._draw,
            held_ms=self._limits.held_ms,
            error_characters=ERROR_CHARACTERS_MAX if has_room else ERROR_CHARACTERS_MIN,
        )


def room_for(
    state: GroupState,
    request: PullRequest,
    limits: ServiceLimits,
    now_ms: int,
    *,
    takes_new: bool = True,
) -> Room:
    """The limits of this pull; raises `BusyError` if it may get no message."""
    log = state.consumer(request.consumer)
    room_messages = limits.in_flight_per_consumer - (0 if log is None else log.in_flight)
    if room_messages <= 0:
        raise BusyError(
            f"consumer {request.consumer} holds {limits.in_flight_per_consumer - room_messages} unsettled "
            f"messages; allowed: {limits.in_flight_per_consumer}",
            retry_after_s=1.0,
            field="unsettled messages of a consumer",
            limit=str(limits.in_flight_per_consumer),
            value=str(limits.in_flight_per_consumer - room_messages),
            remedy="Settle some before the next pull.",
        )
    if len(state.dead) >= limits.dead_letters_per_group:
        raise BusyError(
            f"group {state.group} has {len(state.dead)} dead letters; "
            f"allowed: {limits.dead_letters_per_group}",
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
