"""The next batches are claimed while one is sent: how many, on how many connections, and what of those
that are not sent."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import sqlalchemy as sa

from qmq_client.outbox.row import RowFilter
from qmq_client.outbox.table import create_tables
from qmq_client.publishing.ordering import order_batch
from qmq_client.settings.sections import DatabaseSection
from qmq_client.transport.memory import MemoryBroker
from qmq_watchdog.claiming import Claim
from qmq_watchdog.databases import CONNECTIONS_PER_RUN, Database, open_database
from qmq_watchdog.sweep import NOT_REACHED, Sweep, SweepOptions
from tests.kit.listening import listening
from tests.kit.waiting import DEADLINE_S
from tests.services.databases import Database as ServedDatabase
from tests.watchdog.executors import EagerExecutor, LateExecutor
from tests.watchdog.rows import DEAD_SENDER, OUTBOX, left, put_rows
from tests.watchdog.transports import HandClock, WatchedTransport

BATCH = SweepOptions(batch_rows=10)


def untouched(database: Database) -> int:
    """Rows that were never claimed."""
    with database.engine.connect() as connection:
        chosen = sa.select(sa.func.count()).where(OUTBOX.c.token == DEAD_SENDER)
        return connection.scalar(chosen) or 0


def test_two_claims_are_ahead_of_a_sweep_that_gets_on_well_and_never_more(
    database: Database, broker: MemoryBroker
) -> None:
    put_rows(database, 80)
    claimed: list[int] = []
    watched = WatchedTransport(broker, lambda: claimed.append(80 - untouched(database)))
    assert Sweep(database, watched, BATCH, executor=EagerExecutor).step().sent == 80
    # The one that is sent and, from the second on, one ahead of it; another when that was accepted.
    assert claimed == [10, 30, 50, 60, 70, 80, 80, 80]


def test_claims_ahead_take_no_more_than_a_sweep_may_send(
    database: Database, broker: MemoryBroker
) -> None:
    put_rows(database, 60)
    options = SweepOptions(batch_rows=10, rows_max=45)
    counts = Sweep(database, WatchedTransport(broker), options, executor=EagerExecutor).step()
    assert (counts.sent, untouched(database), len(left(database))) == (45, 15, 15)


def test_O3_all_that_was_claimed_ahead_and_is_not_sent_is_due_again_without_an_attempt(
    database: Database, broker: MemoryBroker
) -> None:
    put_rows(database, 60)
    sent: list[int] = []
    watched = WatchedTransport(broker, lambda: sent.append(len(sent)))
    counts = Sweep(database, watched, BATCH, executor=EagerExecutor).step(lambda: len(sent) == 3)
    assert (counts.sent, counts.claimed, untouched(database)) == (30, 30, 10)
    assert database.store.counts().due == 30
    rows = database.store.list_rows(RowFilter())
    assert {(row.attempts, row.last_error) for row in rows} == {(0, None), (0, NOT_REACHED)}


def test_W8_what_was_claimed_ahead_of_an_outage_is_not_due_again_at_once(
    database: Database, broker: MemoryBroker
) -> None:
    put_rows(database, 60)
    frames: list[int] = []

    def on_send() -> None:
        frames.append(len(frames))
        broker.faults.is_unreachable = len(frames) == 3

    watched = WatchedTransport(broker, on_send)
    counts = Sweep(database, watched, BATCH, executor=EagerExecutor).step()
    assert (counts.sent, counts.failed, untouched(database)) == (20, 10, 10)
    assert database.store.counts().due == untouched(database)


@pytest.mark.parametrize("request_s", [0.0, 1.0, 3.0, 4.5])
def test_no_claim_ends_while_it_waits_for_batches_before_it(
    database: Database, broker: MemoryBroker, request_s: float
) -> None:
    put_rows(database, 60)
    clock = HandClock()

    def on_send() -> None:
        clock.elapsed_s += request_s

    watched = WatchedTransport(broker, on_send)
    sweep = Sweep(database, watched, BATCH, clock=clock, executor=EagerExecutor)
    assert BATCH.lease_ms == 5_000
    counts = sweep.step()
    assert (counts.sent, counts.lost, left(database)) == (60, 0, set())


def test_W1_rows_of_a_claim_ahead_are_sent_although_the_one_before_was_not_full(
    database: Database, broker: MemoryBroker
) -> None:
    put_rows(database, 25)
    sent: list[int] = []

    def on_send() -> None:
        sent.append(len(sent))
        if len(sent) == 3:  # the five that are left; the claim behind it is under way
            put_rows(database, 3)

    watched = WatchedTransport(broker, on_send)
    counts = Sweep(database, watched, BATCH, executor=LateExecutor).step()
    assert (counts.sent, counts.claimed, left(database)) == (28, 28, set())


def test_W1_rows_of_a_claim_ahead_are_sent_although_the_one_before_was_empty(
    database: Database, broker: MemoryBroker
) -> None:
    put_rows(database, 20)
    found: list[int] = []

    class Watching(LateExecutor):
        def submit(self, work: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
            def watched() -> Any:
                result = work(*args, **options)
                if isinstance(result, Claim):
                    found.append(len(result.rows))
                    if found == [0]:
                        put_rows(database, 3)
                return result

            return super().submit(watched)

    counts = Sweep(database, WatchedTransport(broker), BATCH, executor=Watching).step()
    assert (found, counts.sent, left(database)) == ([0, 3], 23, set())


class HeldClaims(ThreadPoolExecutor):
    """Two threads whose claims, from a moment on, keep their connections until somebody wants a third."""

    def __init__(self) -> None:
        super().__init__(max_workers=2)
        self.is_holding = False
        self.let_go = threading.Event()
        self.held = threading.local()

    def submit(self, work: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        if work is order_batch:
            self.let_go.set()
        is_held = self.is_holding and work is not order_batch and "settle" not in work.__name__

        def held() -> Any:
            self.held.here = is_held
            return work(*args, **options)

        return super().submit(held)

    def on_checkout(self) -> None:
        if threading.current_thread() is threading.main_thread():
            if self.is_holding:
                self.let_go.set()
        elif self.held.here:
            assert self.let_go.wait(DEADLINE_S)


def test_a_sweep_has_two_connections_and_no_third_also_where_rows_are_held(
    a_server_database: ServedDatabase, broker: MemoryBroker
) -> None:
    create_tables(a_server_database.engine())
    database = open_database(DatabaseSection(name="shop", url=a_server_database.url), {})
    put_rows(database, 60)
    keyed = put_rows(database, 60)
    with database.engine.begin() as connection:
        chosen = sa.update(OUTBOX).where(OUTBOX.c.message_id.in_(keyed))
        connection.execute(chosen.values(ordering_key="order-17"))
    database.engine.dispose()
    beside = HeldClaims()
    in_use: set[object] = set()
    most: list[int] = []
    frames: list[int] = []

    def on_checkout(driver: Any, *_: Any) -> None:
        in_use.add(driver)
        most.append(len(in_use))
        beside.on_checkout()

    def on_checkin(driver: Any, _: Any) -> None:
        in_use.discard(driver)

    def on_send() -> None:
        frames.append(len(frames))
        beside.is_holding = len(frames) == 6  # the last one without a key

    try:
        watched = WatchedTransport(broker, on_send)
        with listening(sa.Pool, checkout=on_checkout, checkin=on_checkin):
            counts = Sweep(database, watched, BATCH, executor=lambda: beside).step()
    finally:
        database.close()
    assert counts.error is None
    assert beside.let_go.is_set()
    assert max(most) <= CONNECTIONS_PER_RUN
