"""Probes of an inbox: how often, by whom, and what they leave behind."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from itertools import pairwise

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from qmq_client.consumer import consumer
from qmq_client.consumer.counters import Counters
from qmq_client.consumer.outage import PROBE_BACKOFF, InboxOutage, InboxOutages, Prober
from qmq_client.inbox import Inbox
from qmq_client.inbox.async_inbox import AsyncInbox
from qmq_client.outbox.table import make_tables
from qmq_client.testing import FakeClock
from tests.client.consumer.kit import GROUP, SUBJECT, WAIT_S, Bench
from tests.client.consumer.shop import gone, make_engine, rows_in_inbox
from tests.kit.waiting import wait_for
from tests.services.databases import Database

PROBE_MS_MAX = PROBE_BACKOFF.max_ms


class Probed:
    """A database that consumers ask, and that is away unless said otherwise."""

    def __init__(self) -> None:
        self.is_away = True
        self.times = 0
        self.clock = FakeClock()
        self.outage = InboxOutage(self.clock)
        self.probers = [
            Prober(
                probe=self._probe,
                can_be_cancelled=False,
                consumer=f"orders/{number}",
                counters=Counters(),
            )
            for number in range(200)
        ]

    def _probe(self) -> None:
        self.times += 1
        if self.is_away:
            raise gone("BEGIN")

    def is_cause(self) -> set[bool]:
        """What all consumers hear after an error of their inboxes."""
        return {self.outage.is_cause(one) for one in self.probers}

    def pause_s(self) -> float:
        """The wait before the next pull of every consumer."""
        (pause_s,) = {self.outage.pause_s(one) for one in self.probers}
        return pause_s


def test_W8_probes_become_rarer_up_to_a_bound_and_the_next_outage_begins_again() -> None:
    probed = Probed()
    assert probed.is_cause() == {True}
    waits_s = []
    for _ in range(20):
        waits_s.append(probed.pause_s())
        probed.clock.advance(math.ceil(waits_s[-1] * 1_000))
    assert all(later > earlier / 2 for earlier, later in pairwise(waits_s))
    assert 0 < waits_s[0] <= 0.1
    assert 2.5 <= waits_s[-1] <= 5 == PROBE_MS_MAX / 1000
    probed.is_away = False
    assert probed.pause_s() == 0
    probed.is_away = True
    assert probed.is_cause() == {True}
    assert probed.pause_s() <= 0.1


def test_W8_of_all_consumers_of_an_inbox_one_probes_when_it_is_time_and_all_hear_of_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    probed = Probed()
    assert probed.is_cause() == {True}
    assert probed.times == 1
    waiting_s = probed.pause_s()
    assert probed.times == 1, "it has just been asked"
    probed.clock.advance(math.ceil(waiting_s * 1_000))
    probed.pause_s()
    assert probed.times == 2
    probed.is_away = False
    probed.clock.advance(PROBE_MS_MAX)
    assert probed.pause_s() == 0
    assert probed.times == 3
    events = [record.getMessage().split()[0] for record in caplog.records]
    assert events == ["inbox_unreachable", "inbox_reachable"]


def test_nobody_probes_in_peace() -> None:
    probed = Probed()
    assert probed.pause_s() == 0
    assert probed.times == 0


def test_C6_only_what_notes_in_one_table_in_one_way_is_away_together(
    sqlite_database: Database,
) -> None:
    shop = sa.create_engine(sqlite_database.url)
    sessions, others = sessionmaker(shop), sessionmaker(shop)
    elsewhere = make_tables(sa.MetaData(), prefix="other_")
    outages = InboxOutages(FakeClock())
    one = outages.of(Inbox(sessions, group=GROUP))
    assert outages.of(Inbox(sessions, group="mail")) is one
    assert outages.of(Inbox(others, group=GROUP)) is not one
    assert outages.of(Inbox(sessions, group=GROUP, tables=elsewhere)) is not one
    assert outages.of(None) is not one
    shop.dispose()


def test_C8_a_stop_does_not_wait_for_a_probe_that_hangs(
    bench: Bench, sqlite_database: Database
) -> None:
    shop = make_engine(sqlite_database.url)
    is_away, hangs, goes_on = threading.Event(), threading.Event(), threading.Event()

    def session() -> Session:
        if is_away.is_set() and threading.current_thread().name.startswith("qmq-pull"):
            hangs.set()
            assert goes_on.wait(WAIT_S)  # as a connect whose packets nobody answers
        if is_away.is_set():
            raise gone("BEGIN")
        return Session(shop)

    @consumer(SUBJECT, group=GROUP, inbox=session)
    def add(body: int, session: Session) -> None: ...

    consumers = bench.consumers(add)
    consumers.start()
    is_away.set()
    bench.put(1)
    wait_for(lambda: bench.counters(consumers).get("inbox_failures"))
    while not hangs.wait(0.01):
        bench.clock.advance(PROBE_MS_MAX)
    report = consumers.stop()
    is_away.clear()
    goes_on.set()
    wait_for(lambda: not any(one.is_alive() for one in consumers._threads.all()))
    assert report.is_clean
    shop.dispose()
    assert bench.broker.in_flight(SUBJECT, GROUP) == 0, "what comes back late pulls nothing"


def test_C8_a_stop_cancels_an_asynchronous_probe_that_hangs_and_waits_for_its_end(
    bench: Bench, sqlite_database: Database
) -> None:
    make_engine(sqlite_database.url).dispose()
    engine = create_async_engine(sqlite_database.async_url)
    is_away, hangs, has_let_go = threading.Event(), threading.Event(), threading.Event()

    class Stuck(AsyncSession):
        async def run_sync(self, *_: object) -> None:  # type: ignore[override]  # it ends by an error
            hangs.set()
            await asyncio.Event().wait()

        async def close(self) -> None:
            for _ in range(100):
                await asyncio.sleep(0)
            has_let_go.set()

    fails = iter(["BEGIN of the message", "first probe"])

    def session() -> AsyncSession:
        if not is_away.is_set():
            return AsyncSession(engine)
        if (failing := next(fails, "")) != "":
            raise gone(failing)
        return Stuck(engine)

    @consumer(SUBJECT, group=GROUP, inbox=session)
    async def add(body: int, session: AsyncSession) -> None: ...

    consumers = bench.consumers(add)
    consumers.start()
    is_away.set()
    bench.put(1)
    while not hangs.wait(0.01):
        bench.clock.advance(PROBE_MS_MAX)
    assert consumers._inbox_outages.pullers() == set()
    assert consumers.stop().is_clean
    assert has_let_go.is_set()


def test_C5_a_probe_notes_nothing(a_database: Database, engine: sa.Engine) -> None:
    Inbox(engine, group=GROUP).probe()
    asyncio.run(probe_async(a_database))
    assert rows_in_inbox(engine) == set()


async def probe_async(database: Database) -> None:
    inbox = AsyncInbox(create_async_engine(database.async_url), group=GROUP)
    await inbox.probe()
    await inbox.close()


def test_a_probe_fails_where_the_inbox_takes_no_ids_though_the_server_answers(
    sqlite_database: Database,
) -> None:
    engine = make_engine(sqlite_database.url)
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "CREATE TRIGGER full BEFORE INSERT ON qmq_inbox BEGIN SELECT RAISE(ABORT, 'full'); END"
        )
    with pytest.raises(sa.exc.IntegrityError, match="full"):
        Inbox(engine, group=GROUP).probe()
    engine.dispose()
