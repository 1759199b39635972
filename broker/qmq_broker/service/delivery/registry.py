"""The groups of a broker: created at their first pull, checked against their settings, ended when unused.

`qmq_client/group/settings.py` defines the settings that a pull may change; changing the tags is a separate request.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush
from typing import Final

import msgspec
from msgspec import UNSET

from qmq_broker.errors import (
    BusyError,
    ConsumerReplacedError,
    GroupConflictError,
    being_removed,
)
from qmq_broker.service.delivery.budget import Budget
from qmq_broker.service.delivery.journal import Journal
from qmq_broker.service.delivery.waiting import GroupKey
from qmq_broker.service.limits import ServiceLimits
from qmq_broker.storage.store import Store
from qmq_client.group.actions import (
    Action,
    Configured,
    Ended,
    GroupDefined,
    GroupSettings,
    Owned,
)
from qmq_client.group.apply import new_state
from qmq_client.group.picking import Picker
from qmq_client.group.settings import backoff_kept, conflict_of, settings_of
from qmq_client.group.state import GroupState
from qmq_client.wire.deliveries import DeliveryRun
from qmq_client.wire.groups import Instances, group_of, replaced_text
from qmq_client.wire.requests import BroadcastMember, PullRequest
from qmq_client.wire.start import Start, StartKind, parse_start


def position_of(store: Store, subject: str, start: Start) -> int:
    """The sequence of this start position, limited to messages that are durable and not about to be deleted.

    Messages that retention is about to delete count as deleted, even if a group needs them. The
    position is found by binary search, which may block for a few reads.
    """
    queue = store.queue(subject)
    if queue is None:
        return 0
    if start.kind is StartKind.LATEST:
        return queue.next_sequence
    first = queue.sequence_at(store.retention.spared_offset)
    match start.kind:
        case StartKind.SEQUENCE:
            wanted = start.number
        case StartKind.TIME:
            wanted = queue.sequence_at(store.offset_at(start.number))
        case _:
            wanted = first
    return min(max(wanted, first), queue.next_sequence)


#: Outdated visits are removed from the schedule only above this many entries.
_ENTRIES_MIN: Final = 1024


class Group:
    """The state of a group, with facts that are only in memory."""

    __slots__ = (
        "asked_at_ms",
        "given",
        "given_again",
        "instances",
        "leases_ended",
        "next_due_ms",
        "picker",
        "seen_ms",
        "state",
    )

    def __init__(self, picker: Picker, seen_ms: int) -> None:
        self.state = picker.state
        self.picker = picker
        #: The processes of a broadcast consumer.
        self.instances = Instances()
        #: The time at which the group is scheduled.
        self.next_due_ms: int | None = None
        #: When the group last pulled; the time of the start if it has not pulled since.
        self.seen_ms = seen_ms
        #: When a consumer last asked for messages; 0 if none has asked since the start.
        self.asked_at_ms = 0
        #: Deliveries since the start, redeliveries among them, and messages whose lease ended by
        #: itself.
        self.given = self.given_again = self.leases_ended = 0

    def note_seen(self, consumer: str, now_ms: int) -> None:
        """Record that this consumer pulled or settled."""
        self.seen_ms = self.asked_at_ms = now_ms
        log = self.state.consumer(consumer)
        if log is not None:
            log.last_seen_ms = now_ms

    def note_given(self, runs: Iterable[DeliveryRun]) -> None:
        """Count the messages delivered to one pull."""
        for run in runs:
            self.given += run.count
            if run.attempt > 1:
                self.given_again += run.count

    @property
    def key(self) -> GroupKey:
        return self.state.subject, self.state.group


class Groups:
    """All groups, and the times at which they have work to do.

    Belongs to the loop thread.
    """

    def __init__(
        self,
        store: Store,
        limits: ServiceLimits,
        journal: Journal,
        budget: Budget,
    ) -> None:
        self._store = store
        self._pool = budget.pool
        self._budget = budget
        self._limits = limits
        self._journal = journal
        self._groups: dict[GroupKey, Group] = {}
        self._schedule: list[tuple[int, GroupKey]] = []
        #: Groups that end if they do not pull.
        self._mortal: dict[GroupKey, Group] = {}
        #: A new group uses no pull sequence below this: an earlier group of its name may have used
        #: it, and a late ack for that group would count for the new one.
        self._pull_floor = 0
        #: Subjects that are being removed: no group is created on them.
        self.closing: set[str] = set()

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups.values())

    def find(self, subject: str, name: str) -> Group | None:
        """The group of this name, as listings name it."""
        return self._groups.get((subject, name))

    def restore(self, state: GroupState, now_ms: int) -> Group:
        """Add a group that existed before the start."""
        group = self._group(state, now_ms)
        idle_ms = state.settings.idle_ms
        if idle_ms:
            # The log holds deliveries, and pulls without messages not more often than
            # `_noted_every_ms`: consumers that pulled without a message get time to pull again.
            grace_ms = min(idle_ms, self._limits.ephemeral_idle_ms)
            seen_ms = max((log.last_seen_ms for _, log in state.consumers()), default=0)
            seen_ms = max(seen_ms, state.seen_ms) + _noted_every_ms(idle_ms)
            group.seen_ms = min(now_ms, max(seen_ms, now_ms - idle_ms + grace_ms))
            self._mortal[group.key] = group
        self._groups[group.key] = group
        self._budget.note(state)
        return group

    def for_pull(self, request: PullRequest, now_ms: int, owner: str = "") -> Group:
        """The group of this pull, created if missing; raises `ServiceError` if that is refused.

        A new group counts against the share of the token named `owner`.
        """
        key = (request.subject, group_of(request))
        group = self._groups.get(key)
        if group is None:
            group = self._make(request, key, now_ms, owner)
        else:
            self._agree(group.state, request, now_ms)
        if not group.instances.admits(request, now_ms):
            raise ConsumerReplacedError(replaced_text(request), value=request.consumer)
        group.note_seen(request.consumer, now_ms)
        self._check_room_for_consumer(group.state, request.consumer, now_ms)
        return group

    def own(self, defined: GroupDefined) -> Group:
        """A group of the broker's own, created if missing."""
        group = self._groups.get((defined.subject, defined.group))
        if group is None:
            state = new_state(defined, self._pool)
            self._journal.write([defined], state)
            group = self.restore(state, defined.at_ms)
        return group

    def end(self, group: Group, now_ms: int) -> None:
        """Remove a group; a later pull for it creates it again."""
        state = group.state
        self._journal.write([Ended(now_ms, state.subject, state.group)], state)
        self._budget.forget(state)
        state.dead.forget(0)
        logs = [log.next_pull_sequence for _, log in state.consumers()]
        self._pull_floor = max(self._pull_floor, state.next_pull_floor, *logs)
        del self._groups[group.key]
        self._mortal.pop(group.key, None)

    def end_idle(self, now_ms: int) -> int:
        """End broadcast consumers that were not seen for too long; returns how many."""
        idle = [
            group
            for group in self._mortal.values()
            if group.seen_ms + group.state.settings.idle_ms <= now_ms
        ]
        for group in idle[: self._limits.groups_per_pass]:
            self.end(group, now_ms)
        return min(len(idle), self._limits.groups_per_pass)

    def schedule(self, group: Group, due_ms: int | None) -> None:
        """Visit the group at this time, unless it is scheduled earlier."""
        if due_ms is not None and (group.next_due_ms is None or due_ms < group.next_due_ms):
            group.next_due_ms = due_ms
            heappush(self._schedule, (due_ms, group.key))
            if len(self._schedule) > _ENTRIES_MIN + 4 * len(self._groups):
                self._schedule = [
                    (one.next_due_ms, one.key)
                    for one in self._groups.values()
                    if one.next_due_ms is not None
                ]
                heapify(self._schedule)

    def is_due(self, now_ms: int) -> bool:
        """Whether some group is due for a visit."""
        return bool(self._schedule) and self._schedule[0][0] <= now_ms

    def take_due(self, now_ms: int) -> list[Group]:
        """Groups that are due for a visit, a bounded number; they leave the schedule."""
        due: list[Group] = []
        while self.is_due(now_ms) and len(due) < self._limits.groups_per_pass:
            due_ms, key = heappop(self._schedule)
            group = self._groups.get(key)
            if group is not None and group.next_due_ms == due_ms:
                group.next_due_ms = None
                due.append(group)
        return due

    def _group(self, state: GroupState, seen_ms: int) -> Group:
        unsettled_max = self._limits.unsettled_per_group
        return Group(Picker(state, self._journal.write, unsettled_max=unsettled_max), seen_ms)

    def _make(self, request: PullRequest, key: GroupKey, now_ms: int, owner: str) -> Group:
        self._budget.check_new_group(owner)
        subject, name = key
        if subject in self.closing:
            raise being_removed(subject)
        defined = GroupDefined(
            at_ms=now_ms,
            subject=subject,
            group=name,
            first_sequence=position_of(self._store, subject, parse_start(request.start)),
            max_attempts=request.max_attempts,
        )
        state = new_state(defined, self._pool)
        self._budget.check_room(owner, state.memory_bytes)
        group = self._group(state, now_ms)
        group.state.next_pull_floor = self._pull_floor
        actions: list[Action] = [defined]
        if owner:
            actions.append(Owned(now_ms, subject, name, owner))
        settings = settings_of(request, self._idle_ms(request))
        if settings != GroupSettings():
            actions.append(Configured(now_ms, subject, name, settings))
        self._journal.write(actions, group.state)
        self._groups[key] = group
        if settings.idle_ms:
            self._mortal[key] = group
        return group

    def _idle_ms(self, request: PullRequest) -> int:
        if request.broadcast is UNSET:
            return 0
        limits = self._limits
        broadcast = request.broadcast
        kind = broadcast.kind if isinstance(broadcast, BroadcastMember) else broadcast
        return limits.named_idle_ms if kind == "named" else limits.ephemeral_idle_ms

    def _agree(self, state: GroupState, request: PullRequest, now_ms: int) -> None:
        """Refuse a pull that conflicts with the group's settings; record the settings that it may change."""
        has = state.settings
        conflict = conflict_of(has, request)
        if conflict is not None:
            field, limit, value = conflict
            raise GroupConflictError(
                subject=state.subject, group=state.group, field=field, limit=limit, value=value
            )
        subject, name = state.subject, state.group
        actions: list[Action] = []
        if state.max_attempts != request.max_attempts:
            cursor, attempts = state.cursor, request.max_attempts
            actions.append(GroupDefined(now_ms, subject, name, cursor, attempts))
        if request.backoff is not UNSET or request.broadcast is not UNSET:
            settings = msgspec.structs.replace(
                has,
                backoff=backoff_kept(request.backoff) or has.backoff,
                idle_ms=self._idle_ms(request),
            )
            noted_ms = state.seen_ms + _noted_every_ms(settings.idle_ms)
            is_kept = settings.idle_ms > self._limits.ephemeral_idle_ms
            if settings != has or (is_kept and noted_ms <= now_ms):
                actions.append(Configured(now_ms, subject, name, settings))
        self._journal.write(actions, state)

    def _check_room_for_consumer(self, state: GroupState, consumer: str, now_ms: int) -> None:
        limit = self._limits.consumers_per_group
        if state.consumer(consumer) is not None or state.consumer_count < limit:
            return
        state.forget_idle_consumers(now_ms - self._limits.consumer_idle_ms)
        if state.consumer_count >= limit:
            raise BusyError(
                f"group {state.group} has {state.consumer_count} consumers; allowed: {limit}",
                retry_after_s=60.0,
                field="consumers of a group",
                limit=str(limit),
                value=str(state.consumer_count),
                remedy="Run fewer consumers, or some of them in another group.",
            )


def _noted_every_ms(idle_ms: int) -> int:
    """How often a group with this idle limit records in the action log that it pulls.

    Each day for a named broadcast consumer, which is kept for seven days: it may get no message for
    longer, and snapshots depend on the amount of actions, not on time.
    """
    return idle_ms // 7
