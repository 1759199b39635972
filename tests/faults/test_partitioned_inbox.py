"""F13: the line between a consumer and the database of its inbox is cut in the middle of an effect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from qmq_client.consumer import consumer
from qmq_client.consumer.outage import PROBE_BACKOFF
from tests.client.consumer.kit import GROUP, SUBJECT, Bench
from tests.client.consumer.shop import ADD, count_of, make_engine
from tests.faults.proxy import Proxy
from tests.kit.waiting import wait_for
from tests.services.databases import Database


@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
def test_F13_C4_C5_a_consumer_cut_off_from_its_database_in_an_effect_waits_and_has_it_once(
    a_server_database: Database, is_async: bool
) -> None:
    """The line is cut between handler and commit. There is one attempt, and the outage costs none."""
    truth = make_engine(a_server_database.url)
    bench = Bench()
    bench.put(1)
    with Proxy(sa.make_url(a_server_database.url).port or 0) as line:

        def cut() -> None:
            if not failures():
                line.cut()

        def failures() -> int:
            return bench.counters(consumers).get("inbox_failures", 0)

        url = sa.make_url(a_server_database.async_url if is_async else a_server_database.url)
        behind = url.set(port=line.port)
        inbox: Any = create_async_engine(behind) if is_async else sa.create_engine(behind)
        consumers = bench.consumers((adding_async if is_async else adding)(inbox, cut))
        with consumers:
            wait_for(lambda: failures() >= 1)
            bench.clock.advance(PROBE_BACKOFF.max_ms)
            wait_for(lambda: failures() >= 2)
            assert bench.counters(consumers)["pulled"] == 1
            line.heal()
            bench.clock.advance(PROBE_BACKOFF.max_ms)
            wait_for(lambda: bench.broker.lag(SUBJECT, GROUP) == 0)
    assert count_of(truth) == 1
    assert bench.broker.dead_letters(SUBJECT, GROUP) == []
    truth.dispose()
    if not is_async:  # the consumer does of an asynchronous one's connections
        inbox.dispose()


def adding(inbox: Any, then: Callable[[], None]) -> Callable[..., Any]:
    @consumer(SUBJECT, group=GROUP, inbox=inbox, max_attempts=1)
    def add(body: int, session: Session) -> None:
        session.execute(ADD, {"count": 1})
        then()

    return add


def adding_async(inbox: Any, then: Callable[[], None]) -> Callable[..., Any]:
    @consumer(SUBJECT, group=GROUP, inbox=inbox, max_attempts=1)
    async def add(body: int, session: AsyncSession) -> None:
        await session.execute(ADD, {"count": 1})
        then()

    return add
