"""Bugs of the broker, to be planted; which worlds can meet each of them is said in `planted.py`.

A bug is a function put in the place of another one, for the time of one test.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from qmq_broker.errors import DiskFullError
from qmq_broker.service.broker import Broker
from qmq_broker.service.delay.delayed import DelayChanges, OnCancelled
from qmq_broker.service.delay.near import Wheel
from qmq_broker.service.delay.releasing import Releaser
from qmq_broker.service.delivery import delivery
from qmq_broker.service.delivery.changes import Changes
from qmq_broker.service.delivery.journal import Journal
from qmq_broker.service.delivery.needed_log import NeededLog
from qmq_broker.service.delivery.registry import Group, Groups
from qmq_broker.service.intake import Intake
from qmq_broker.service.long_retries import LongRetryScheduler
from qmq_broker.service.serving import ServingState
from qmq_broker.storage import keepers
from qmq_broker.storage.files.keepers import Keeper
from qmq_broker.storage.ids.window import DedupeWindow
from qmq_broker.storage.logs.segmented_log import SegmentedLog
from qmq_broker.storage.schedule.cancelled import Cancelled
from qmq_broker.storage.schedule.schedule import Schedule
from qmq_broker.storage.schedule.states import DelayedState
from qmq_client.group import apply, picking
from qmq_client.group.actions import Action, Nacked, Skipped
from qmq_client.group.apply import apply_action
from qmq_client.group.history import NACKED
from qmq_client.group.key_queues import KeyQueues
from qmq_client.group.picking import Picked
from qmq_client.group.redelivery import Redelivery
from qmq_client.group.settling import Plan, plan_settlements
from qmq_client.group.state import GroupState
from qmq_client.group.suspects import Suspects
from qmq_client.wire.operations import DeadAnswer, DeadRequest
from qmq_client.wire.requests import PullRequest


def nothing_is_synced(monkeypatch: pytest.MonkeyPatch) -> None:
    def sync(self: SegmentedLog) -> None:
        self._durable = self._written_point()

    monkeypatch.setattr(SegmentedLog, "sync", sync)


def fewer_ids_are_known_than_is_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = DedupeWindow.__init__

    def begin_shorter(self: DedupeWindow, *, ids_max: int, age_ms: int) -> None:
        begin(self, ids_max=ids_max // 4, age_ms=age_ms)

    monkeypatch.setattr(DedupeWindow, "__init__", begin_shorter)


def late_settlements_are_called_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(*given: Any) -> Plan:
        outcome = plan_settlements(*given)
        outcome.stale.clear()
        return outcome

    monkeypatch.setattr(delivery, "plan_settlements", plan)


def groups_change_before_the_journal_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is decided is written with the next decision."""
    waiting: dict[int, tuple[Sequence[Action], GroupState]] = {}

    def write_later(self: Journal, actions: Sequence[Action], state: GroupState) -> None:
        if not actions:
            return
        if id(self) in waiting:
            self._store.actions.append(waiting.pop(id(self))[0])
            self.is_unsynced = True
        waiting[id(self)] = actions, state
        for action in actions:
            apply_action(state, action)

    monkeypatch.setattr(Journal, "write", write_later)


def at_most_once_is_answered_before_the_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Broker, "sync_actions", lambda self: None)


def pauses_are_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def apply_only(self: Changes, group: Group, actions: Sequence[Action], now_ms: int) -> None:
        for action in actions:
            apply_action(group.state, action)
        self._delivery.after_change(group, now_ms)

    monkeypatch.setattr(Changes, "_write", apply_only)


def attempts_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:

    def hand_out_as_first(
        state: GroupState, request: PullRequest, picked: Picked, epoch: int, now_ms: int
    ) -> list[Action]:
        picked.runs = tuple(msgspec.structs.replace(run, attempt=1) for run in picked.runs)
        return picking.hand_out(state, request, picked, epoch, now_ms)

    monkeypatch.setattr(delivery, "hand_out", hand_out_as_first)


def what_comes_back_untried_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def count(self: GroupState, action: Nacked) -> None:
        self._on_returned(action, NACKED, action.error)

    monkeypatch.setattr(GroupState, "_on_returned_untried", count)


def suspects_come_with_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Redelivery, "is_suspect", False)


def others_come_behind_a_suspect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Suspects, "_has_suspect", lambda self, consumer: False)


def keys_have_no_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    add = KeyQueues.add

    def add_loose(self: KeyQueues, sequence: int, key: int, *, is_given: bool = False) -> None:
        add(self, sequence, 0, is_given=is_given)

    monkeypatch.setattr(KeyQueues, "add", add_loose)


def nothing_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picking, "record_expires_at_ms", lambda record: None)


def repeats_are_not_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DedupeWindow, "find", lambda self, runs: [])


def a_release_is_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    settle = Releaser._settle
    again: set[tuple[int, int]] = set()

    def settle_and_hold(self: Releaser, release: Any, placed: Any, done_ms: int) -> None:
        settle(self, release, placed, done_ms)
        name = (release.messages[0].bucket, release.messages[0].sequence)
        if name not in again:
            again.add(name)
            self._held.append((release.messages, release.is_overdue))

    monkeypatch.setattr(Releaser, "_settle", settle_and_hold)
    monkeypatch.setattr(Schedule, "unsettled", lambda self, frame, taken: frame)


def delayed_messages_are_due_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    take = Wheel.take
    monkeypatch.setattr(
        Wheel, "take", lambda self, now_ms, count_max: take(self, now_ms + 60_000, count_max)
    )


def cancellations_are_only_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(self: DelayChanges, places: Sequence[Cancelled], on_done: OnCancelled) -> None:
        states: list[DelayedState | None] = [DelayedState.CANCELLED] * len(places)
        self._writer.change(lambda: states, on_done)

    monkeypatch.setattr(DelayChanges, "cancel", answer)


def retention_asks_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        NeededLog, "first_offset", lambda self, since_ms: self._store.durable_offset
    )


def keepers_are_only_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keepers, "write_keepers", lambda *given: None)


def removed_keepers_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def end_for_now(self: keepers.Keepers, name: str) -> Keeper | None:
        found = self._by_name.get(name)
        self._by_name = {key: one for key, one in self._by_name.items() if key != name}
        return found

    monkeypatch.setattr(keepers.Keepers, "end", end_for_now)


def what_keepers_lose_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once they are past it."""
    moved = keepers._moved

    def moved_blindly(known: Keeper, *given: Any) -> Keeper:
        return msgspec.structs.replace(moved(known, *given), lost_bytes=0, lost_actions_bytes=0)

    monkeypatch.setattr(keepers, "_moved", moved_blindly)


def what_groups_lose_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    skip = apply._on_skipped

    def skip_silently(state: GroupState, action: Skipped) -> None:
        before = state.lost_count
        skip(state, action)
        state.lost_count = before

    monkeypatch.setattr(apply, "_on_skipped", skip_silently)


def room_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever was refused for want of room once is refused for ever."""
    check = Intake._check_room
    full: set[int] = set()

    def check_once(self: Intake, request_bytes: int) -> None:
        try:
            check(self, 2**40 if id(self) in full else request_bytes)
        except DiskFullError:
            full.add(id(self))
            raise

    monkeypatch.setattr(Intake, "_check_room", check_once)


def replays_are_only_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    def replay(
        self: Changes, request: DeadRequest, now_ms: int, count_max: int
    ) -> tuple[DeadAnswer, int | None]:
        _, sequences, has_more = self._dead(request, count_max)
        next_first = sequences[-1] + 1 if has_more else None
        return DeadAnswer(count=len(sequences), has_more=has_more), next_first

    monkeypatch.setattr(Changes, "replay_some", replay)


def consumers_of_a_broadcast_go_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    idle_ms = Groups._idle_ms
    monkeypatch.setattr(Groups, "_idle_ms", lambda self, request: min(200, idle_ms(self, request)))


def long_retries_never_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LongRetryScheduler, "redeliver", lambda self, now_ms: True)
    monkeypatch.setattr(LongRetryScheduler, "_redeliver_originals", lambda self, *times: None)


def a_read_only_broker_takes_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServingState, "check_takes_messages", lambda self: self.check_delivers())
