"""Bugs to be planted in the product: each breaks one promise at one seam, and the worlds must find it.

A bug is a function put in the place of another one, for the time of one test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import pytest
import sqlalchemy as sa

from qmq_broker.service.broker import Broker
from qmq_broker.service.delay.changes import DelayChanges, OnCancelled
from qmq_broker.service.delay.releasing import Delay
from qmq_broker.service.delay.wheel import Wheel
from qmq_broker.service.delivery import delivery, picking
from qmq_broker.service.delivery.changes import Changes
from qmq_broker.service.delivery.groups import GroupState
from qmq_broker.service.delivery.journal import Journal
from qmq_broker.service.delivery.lanes import KeyLanes
from qmq_broker.service.delivery.moves import apply_action
from qmq_broker.service.delivery.picking import Picked
from qmq_broker.service.delivery.registry import Group
from qmq_broker.service.delivery.settling import Outcome, plan_settlements
from qmq_broker.storage.logs.actions import Action
from qmq_broker.storage.logs.dedupe_window import DedupeWindow
from qmq_broker.storage.logs.segmented_log import SegmentedLog
from qmq_broker.storage.schedule.cancelled import Cancelled
from qmq_broker.storage.schedule.fates import Fate
from qmq_broker.storage.schedule.schedule import Schedule
from qmq_client.consumer.delivery import ACKED, Received
from qmq_client.consumer.work import Work
from qmq_client.inbox.dialect import Noted
from qmq_client.inbox.sqlite import SqliteInboxDialect
from qmq_client.outbox.database import sqlite
from qmq_client.outbox.database.claiming import Wanted
from qmq_client.outbox.database.driver import driver_of
from qmq_client.outbox.relay.store import OutboxStore
from qmq_client.outbox.row import OutboxRow
from qmq_client.outbox.transaction.handoff import HandoffQueue, HandOver
from qmq_client.publishing import publish, publisher
from qmq_client.publishing.ordering import Turns
from qmq_client.wire.requests import PullRequest
from qmq_watchdog import sweep
from tests.crash.planted_writing import messages_visible_before_the_sync
from tests.simulation.plan import Kind, Plan, Trouble

Plant = Callable[[pytest.MonkeyPatch], None]


def nothing_is_synced(monkeypatch: pytest.MonkeyPatch) -> None:
    def sync(self: SegmentedLog) -> None:
        self._durable = self._written_point()

    monkeypatch.setattr(SegmentedLog, "sync", sync)


def what_a_busy_broker_refuses_is_taken_for_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    def put_off(self: publish._Batch, rows: Sequence[OutboxRow], error: str) -> None:
        self.sent += [row.message_id for row in rows]
        self.unreachable = False

    monkeypatch.setattr(publish._Batch, "put_off", put_off)


def rows_are_removed_whoever_owns_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def remove(
        self: OutboxStore,
        connection: sa.Connection,
        message_ids: Sequence[bytes],
        token: bytes,
        keep_ms: int | None,
    ) -> int:
        outbox = self._outbox
        return connection.execute(
            sa.delete(outbox).where(outbox.c.message_id.in_(message_ids))
        ).rowcount

    monkeypatch.setattr(OutboxStore, "_remove", remove)


def rows_are_claimed_before_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def wanted(now_ms: str, keys: Sequence[str], placeholder: str) -> Wanted:
        return Wanted("state = 0 ORDER BY due_at_ms", ())

    monkeypatch.setattr(sqlite, "wanted_rows", wanted)


def unproven_commits_are_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    put = HandoffQueue.put

    def put_as_certain(self: HandoffQueue, handed: HandOver) -> None:
        certain = HandOver(
            rows=handed.rows,
            token=handed.token,
            written_at_s=handed.written_at_s,
            is_certain=True,
        )
        put(self, certain)

    monkeypatch.setattr(HandoffQueue, "put", put_as_certain)


def rows_pass_earlier_ones_of_their_key(monkeypatch: pytest.MonkeyPatch) -> None:
    def turns_of(rows: Sequence[OutboxRow], *_: Any, **__: Any) -> Turns:
        return Turns(free=list(rows))

    monkeypatch.setattr(publisher, "turns_of", turns_of)
    monkeypatch.setattr(sweep, "turns_of", turns_of)


def late_settlements_are_called_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(*given: Any) -> Outcome:
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
    hand_out = delivery._hand_out

    def hand_out_as_first(
        state: GroupState, request: PullRequest, picked: Picked, epoch: int, now_ms: int
    ) -> list[Action]:
        picked.runs = tuple(msgspec.structs.replace(run, attempt=1) for run in picked.runs)
        return hand_out(state, request, picked, epoch, now_ms)

    monkeypatch.setattr(delivery, "_hand_out", hand_out_as_first)


def keys_have_no_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    add = KeyLanes.add

    def add_loose(self: KeyLanes, sequence: int, key: int, *, is_given: bool = False) -> None:
        add(self, sequence, 0, is_given=is_given)

    monkeypatch.setattr(KeyLanes, "add", add_loose)


def nothing_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picking, "record_expires_at_ms", lambda record: None)


def repeats_are_not_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DedupeWindow, "find", lambda self, runs: [])


def a_release_is_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    settle = Delay._settle
    again: set[tuple[int, int]] = set()

    def settle_and_hold(self: Delay, release: Any, outcome: Any, now_ms: int, now_s: float) -> None:
        settle(self, release, outcome, now_ms, now_s)
        name = (release.messages[0].bucket, release.messages[0].sequence)
        if name not in again:
            again.add(name)
            self._held.append((release.messages, release.is_overdue))

    monkeypatch.setattr(Delay, "_settle", settle_and_hold)
    monkeypatch.setattr(Schedule, "unsettled", lambda self, frame, taken: frame)


def delayed_messages_are_due_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    take = Wheel.take
    monkeypatch.setattr(
        Wheel, "take", lambda self, now_ms, count_max: take(self, now_ms + 60_000, count_max)
    )


def cancellations_are_only_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(self: DelayChanges, places: Sequence[Cancelled], on_done: OnCancelled) -> None:
        self._tell(on_done, [Fate.CANCELLED] * len(places))

    monkeypatch.setattr(DelayChanges, "cancel", answer)


def the_inbox_commits_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    insert = SqliteInboxDialect.insert

    def insert_and_commit(
        self: SqliteInboxDialect, connection: sa.Connection, group: str, ids: Sequence[bytes]
    ) -> Noted:
        noted = insert(self, connection, group, ids)
        driver = driver_of(connection)
        driver.commit()
        driver.execute("BEGIN IMMEDIATE")
        driver.execute("SAVEPOINT qmq_inbox")
        return noted

    monkeypatch.setattr(SqliteInboxDialect, "insert", insert_and_commit)


def outcomes_are_noted_before_the_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Work.run

    def ack_and_run(self: Work, batch: Sequence[Received]) -> None:
        self.note(batch, ACKED)
        run(self, batch)

    monkeypatch.setattr(Work, "run", ack_and_run)


class Bug(NamedTuple):
    """One bug, and which worlds can meet it at all."""

    plant: Plant
    suits: Callable[[Plan], bool] = lambda plan: True


def with_trouble(*wanted: Trouble) -> Callable[[Plan], bool]:
    """Worlds in which one of these goes wrong."""
    return lambda plan: any(trouble in plan.troubles for trouble in wanted)


def with_group(kind: Kind, *wanted: Trouble) -> Callable[[Plan], bool]:
    """Worlds with such a group, in which one of these goes wrong."""
    return lambda plan: (
        any(group.kind is kind for group in plan.groups)
        and (not wanted or with_trouble(*wanted)(plan))
    )


BUGS: dict[str, Bug] = {
    "answered before the sync": Bug(nothing_is_synced),
    "visible before it is durable": Bug(
        messages_visible_before_the_sync, with_trouble(Trouble.SLOW_DISK)
    ),
    "the publisher deletes on 503 and silence": Bug(what_a_busy_broker_refuses_is_taken_for_sent),
    "rows are deleted without their token": Bug(rows_are_removed_whoever_owns_them),
    "the sweep ignores due times": Bug(rows_are_claimed_before_their_time),
    "an unproven commit is believed": Bug(
        unproven_commits_are_believed, with_trouble(Trouble.COMMITS)
    ),
    "rows pass earlier ones of their key": Bug(
        rows_pass_earlier_ones_of_their_key, lambda plan: plan.is_ordered
    ),
    "leases are not fenced": Bug(late_settlements_are_called_taken),
    "applied before the journal": Bug(groups_change_before_the_journal_knows),
    "at most once before its sync": Bug(
        at_most_once_is_answered_before_the_sync, with_group(Kind.ONCE, Trouble.HAND_OUT_CUT)
    ),
    "pauses are forgotten": Bug(pauses_are_not_written, with_trouble(Trouble.PAUSE)),
    "attempts are not counted": Bug(
        attempts_are_not_counted, lambda plan: plan.poison_rest is not None
    ),
    "keys have no lanes": Bug(keys_have_no_lanes, with_group(Kind.ORDERED)),
    "expired messages are given": Bug(nothing_expires, lambda plan: plan.has_expiry),
    "repeats are stored": Bug(repeats_are_not_recognised),
    "delayed messages are released twice": Bug(a_release_is_done_again),
    "delayed messages are early": Bug(delayed_messages_are_due_at_once),
    "cancellations are only answered": Bug(
        cancellations_are_only_answered, lambda plan: plan.has_delays
    ),
    "the inbox row in another transaction": Bug(the_inbox_commits_by_itself),
    "acked before it is handled": Bug(outcomes_are_noted_before_the_handler),
}
