"""Asynchronous handlers with an asynchronous inbox: the same promises, nothing blocks their loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import (
    AsyncEngine,
    AsyncSession,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.pool import StaticPool

from qmq_client import Message, Producer, current_session
from qmq_client.consumer import consumer
from qmq_client.errors import AutocommitError, ConfigurationError, OutboxMissingError
from qmq_client.inbox.async_inbox import AsyncInbox
from qmq_client.outbox.table import DEFAULT_TABLES
from qmq_client.testing import drain
from tests.client.consumer.kit import GROUP, SUBJECT, WAIT_S, Bench
from tests.client.consumer.shop import count_of, rows_in_inbox
from tests.services.databases import Database

ADD_ONE = sa.text("UPDATE tally SET n = n + 1")


@pytest.fixture
def async_engine(a_database: Database, engine: sa.Engine) -> AsyncEngine:
    """For the loop of the handlers; who makes consumers with it stops them."""
    return create_async_engine(a_database.async_url)


def drained(bench: Bench, *handlers: Callable[..., Any]) -> dict[str, int]:
    """Handle what is there, then stop: connections belong to the loop, and go before it."""
    consumers = bench.consumers(*handlers)
    drain(consumers)
    consumers.stop()
    return bench.counters(consumers)


def test_C5_an_async_effect_and_its_inbox_row_are_there_together(
    bench: Bench, engine: sa.Engine, async_engine: AsyncEngine
) -> None:
    @consumer(SUBJECT, group=GROUP, inbox=async_sessionmaker(async_engine))
    async def handler(body: int, session: AsyncSession) -> None:
        assert current_session() is session
        await session.execute(ADD_ONE)

    put = bench.put(*range(3))
    assert drained(bench, handler)["acked"] == 3
    assert count_of(engine) == 3
    assert rows_in_inbox(engine) == {(GROUP, bytes.fromhex(one)) for one in put}


def test_C5_an_async_duplicate_is_acked_without_its_effect(
    bench: Bench, engine: sa.Engine, async_engine: AsyncEngine
) -> None:
    @consumer(SUBJECT, group=GROUP, inbox=async_engine, batch_size=10)
    async def handler(bodies: list[int], session: AsyncSession) -> None:
        await session.execute(sa.text("UPDATE tally SET n = n + :count"), {"count": len(bodies)})

    message = Message(SUBJECT, 5, message_id="ab" * 16)
    bench.broker.put(message, Message(SUBJECT, 6))
    bench.broker._crc_by_id.clear()  # the dedupe window has passed
    bench.broker.put(message)
    counted = drained(bench, handler)
    assert (counted["acked"], counted["duplicates"], count_of(engine)) == (3, 1, 2)


async def fail(session: AsyncSession) -> None:
    raise ValueError("no")


async def commit_by_text(session: AsyncSession) -> None:
    await session.execute(sa.text("COMMIT"))


async def commit(session: AsyncSession) -> None:
    await session.commit()


async def swallow(session: AsyncSession) -> None:
    with suppress(sa.exc.DBAPIError):
        await session.execute(sa.text("INSERT INTO tally VALUES (NULL)"))


@pytest.mark.parametrize("ending", [fail, commit_by_text, commit], ids=lambda one: one.__name__)
def test_C5_an_async_handler_that_fails_or_ends_the_transaction_is_not_acked(
    bench: Bench, engine: sa.Engine, async_engine: AsyncEngine, ending: Callable[..., Any]
) -> None:
    @consumer(SUBJECT, group=GROUP, inbox=async_sessionmaker(async_engine), max_attempts=2)
    async def handler(body: int, session: AsyncSession) -> None:
        await ending(session)
        await session.execute(ADD_ONE)

    bench.put(1)
    counted = drained(bench, handler)
    assert (counted["nacked"], counted.get("acked", 0), count_of(engine)) == (1, 0, 0)


def test_C5_an_error_that_an_async_handler_swallowed_voids_nothing_in_silence(
    bench: Bench, a_database: Database, engine: sa.Engine, async_engine: AsyncEngine
) -> None:
    @consumer(SUBJECT, group=GROUP, inbox=async_sessionmaker(async_engine), max_attempts=2)
    async def handler(body: int, session: AsyncSession) -> None:
        await session.execute(ADD_ONE)
        await swallow(session)

    bench.put(1)
    counted = drained(bench, handler)
    is_stored = a_database.kind != "postgresql"
    assert counted.get("acked", 0) == count_of(engine) == len(rows_in_inbox(engine)) == is_stored


def test_S11_the_loop_continues_while_an_inbox_waits_for_the_database(
    bench: Bench, engine: sa.Engine, async_engine: AsyncEngine
) -> None:
    """Two handlers meet inside their transactions: neither could while the other held the loop."""
    met: list[int] = []
    done = threading.Semaphore(0)
    everybody = asyncio.Barrier(2)
    has_one_writer = engine.dialect.name == "sqlite"  # then the other waits for its begin

    @consumer(SUBJECT, group=GROUP, inbox=async_sessionmaker(async_engine), concurrency=2)
    async def handler(body: int, session: AsyncSession) -> None:
        if not has_one_writer:
            async with asyncio.timeout(WAIT_S):
                await everybody.wait()
        await session.execute(ADD_ONE)
        met.append(body)
        done.release()

    bench.put(1, 2)
    with bench.consumers(handler):
        assert done.acquire(timeout=WAIT_S)
        assert done.acquire(timeout=WAIT_S)
    assert sorted(met) == [1, 2]
    assert count_of(engine) == 2


def test_C5_what_an_async_handler_sends_is_sent_once_with_its_effect(
    bench: Bench, engine: sa.Engine, async_engine: AsyncEngine
) -> None:
    producer = Producer(async_engine, bench.transport)
    calls: list[int] = []

    @consumer(SUBJECT, group=GROUP, inbox=async_sessionmaker(async_engine))
    async def handler(body: int, session: AsyncSession) -> None:
        calls.append(body)
        producer.send(Message("replies", len(calls)))
        await session.execute(ADD_ONE)
        if len(calls) == 1:
            raise ValueError("no")

    bench.put(1)
    consumers = bench.consumers(handler)
    drain(consumers)
    bench.clock.advance(60_000)
    drain(consumers)
    consumers.stop()
    assert producer.flush(WAIT_S)
    producer.close()
    assert [one.body for one in bench.broker.messages("replies")] == [2]
    assert count_of(engine) == 1


def test_an_async_connection_that_commits_by_itself_is_refused_and_leaves_no_loop(
    bench: Bench, async_engine: AsyncEngine
) -> None:
    autocommit = async_engine.execution_options(isolation_level="AUTOCOMMIT")

    @consumer(SUBJECT, group=GROUP, inbox=autocommit)
    async def handler(body: int) -> None: ...

    consumers = bench.consumers(handler)
    with pytest.raises(AutocommitError):
        consumers.start()
    assert not consumers._async_calls.is_running


def test_a_missing_table_is_reported_before_an_async_consumer_starts(
    bench: Bench, a_database: Database
) -> None:
    @consumer(SUBJECT, group=GROUP, inbox=create_async_engine(a_database.async_url))
    async def handler(body: int) -> None: ...

    with pytest.raises(OutboxMissingError, match="qmq_inbox"):
        bench.consumers(handler).start()


def test_an_async_inbox_wants_an_async_handler(bench: Bench) -> None:
    @consumer(SUBJECT, group=GROUP, inbox=create_async_engine("sqlite+aiosqlite:///never.db"))
    def handler(body: int) -> None: ...

    with pytest.raises(ConfigurationError, match="async def"):
        bench.consumers(handler)


def test_in_memory_async_handlers_take_turns(bench: Bench) -> None:
    memory = create_async_engine("sqlite+aiosqlite://", poolclass=StaticPool)

    @consumer(SUBJECT, group=GROUP, inbox=AsyncInbox(memory, group=GROUP), batch_size=1)
    async def handler(body: int, session: AsyncSession) -> None:
        (before,) = (await session.execute(sa.text("SELECT n FROM tally"))).one()
        await session.execute(sa.text("UPDATE tally SET n = :n"), {"n": before + 1})

    async def prepare() -> None:
        async with memory.begin() as connection:
            await connection.run_sync(DEFAULT_TABLES.inbox.create)
            await connection.execute(sa.text("CREATE TABLE tally (n INTEGER)"))
            await connection.execute(sa.text("INSERT INTO tally VALUES (0)"))

    async def count() -> int:
        async with memory.connect() as connection:
            found = (await connection.execute(sa.text("SELECT n FROM tally"))).scalar_one()
        await memory.dispose()
        return int(found)

    asyncio.run(prepare())
    bench.put(*range(20))
    assert drained(bench, handler)["acked"] == 20
    assert asyncio.run(count()) == 20


def test_an_async_purge_forgets_old_ids(
    a_database: Database, engine: sa.Engine, async_engine: AsyncEngine
) -> None:
    inbox = AsyncInbox(async_engine, group=GROUP)

    async def purge() -> tuple[int, int]:
        async with inbox.open([number.to_bytes(16) for number in range(1_500)]) as work:
            assert len(work.new) == 1_500
        none = await inbox.purge(timedelta(hours=1))
        async with async_engine.begin() as connection:
            await connection.execute(sa.text("UPDATE qmq_inbox SET received_at_ms = 0"))
        some = await inbox.purge(timedelta(hours=1), rows_max=1_100)
        await inbox.close()
        return none, some

    assert asyncio.run(purge()) == (0, 1_100)
    assert len(rows_in_inbox(engine)) == 400
