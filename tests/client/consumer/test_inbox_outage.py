"""A database of an inbox that is away: its messages wait for it, however long that takes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from qmq_client.consumer import consumer
from qmq_client.testing import drain
from tests.client.consumer.kit import GROUP, SUBJECT, Bench
from tests.client.consumer.shop import count_of
from tests.services.databases import Database

ADD_ONE = sa.text("UPDATE tally SET n = n + 1")
ATTEMPTS_MAX = 2
HOUR_MS = 3_600_000


def plain_handler(engine: sa.Engine, is_away: threading.Event) -> Callable[..., Any]:
    @consumer(
        SUBJECT,
        group=GROUP,
        inbox=lambda: opened(Session, engine, is_away),
        max_attempts=ATTEMPTS_MAX,
    )
    def handler(body: int, session: Session) -> None:
        session.execute(ADD_ONE)

    return handler


def async_handler(database: Database, is_away: threading.Event) -> Callable[..., Any]:
    engine = create_async_engine(database.async_url)

    @consumer(
        SUBJECT,
        group=GROUP,
        inbox=lambda: opened(AsyncSession, engine, is_away),
        max_attempts=ATTEMPTS_MAX,
    )
    async def handler(body: int, session: AsyncSession) -> None:
        await session.execute(ADD_ONE)

    return handler


def opened(kind: Callable[[Any], Any], engine: object, is_away: threading.Event) -> Any:
    if is_away.is_set():
        raise sa.exc.OperationalError("BEGIN", {}, ConnectionError("nobody answers"))
    return kind(engine)


@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
def test_C4_an_outage_of_the_database_makes_no_dead_letters(
    bench: Bench, a_database: Database, engine: sa.Engine, is_async: bool
) -> None:
    is_away = threading.Event()
    handler = async_handler(a_database, is_away) if is_async else plain_handler(engine, is_away)
    consumers = bench.consumers(handler)
    bench.put(1)
    is_away.set()
    for _ in range(3 * ATTEMPTS_MAX):
        drain(consumers)
        bench.clock.advance(HOUR_MS)
    assert bench.broker.dead_letters(SUBJECT, GROUP) == []
    assert bench.counters(consumers)["nacked"] == 3 * ATTEMPTS_MAX
    is_away.clear()
    drain(consumers)
    consumers.stop()
    assert count_of(engine) == 1
    assert bench.broker.lag(SUBJECT, GROUP) == 0
