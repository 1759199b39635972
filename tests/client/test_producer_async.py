"""S11: in asynchronous code the same promises, and nothing blocks the event loop."""

from __future__ import annotations

import asyncio
import gc
import inspect
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from inspect import signature
from pathlib import Path

import pytest
from sqlalchemy.ext.asyncio import (
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)

from qmq_client.errors import ConfigurationError, InvalidMessageError
from qmq_client.message import Message
from qmq_client.options import ProducerOptions
from qmq_client.producer import Producer
from qmq_client.publishing.receipts import SendOutcome
from qmq_client.request_headers import request_headers
from qmq_client.transactional import transaction
from qmq_client.wire.delayed import Cancellation
from tests.client.publishing import WATCHDOG, GatedTransport, sweep
from tests.client.world import SUBJECT, World
from tests.kit.waiting import wait_for
from tests.services.databases import Database

DEADLINE_S = 60.0


@asynccontextmanager
async def a_world(folder: Path, database: Database) -> AsyncIterator[World]:
    world = World(folder, database=database, is_async=True)
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield world
    finally:
        await world.engine.dispose()
        world.close()


Story = Callable[[World], Awaitable[None]]


def tell(story: Story, folder: Path, database: Database) -> None:
    async def main() -> None:
        before = set(threading.enumerate())
        async with a_world(folder, database) as world:
            await story(world)
        # A connection of aiosqlite whose opening was cancelled still answers from its thread. Where the loop is
        # closed by then, the thread ends with an error, in the middle of another test.
        await asyncio.to_thread(
            wait_for, lambda: not connecting(before), lambda: connecting(before)
        )

    asyncio.run(main())


def connecting(before: set[threading.Thread]) -> list[threading.Thread]:
    """Threads of aiosqlite's connections that came about since."""
    new = set(threading.enumerate()) - before
    return [each for each in new if "_connection_worker_thread" in each.name]


def test_S11_send_now_stores_before_it_returns(tmp_path: Path, a_database: Database) -> None:
    async def story(world: World) -> None:
        with request_headers({"tenant": "7"}):
            message_id = await world.producer.send_now_async(Message(SUBJECT, "a"))
        ids = await world.producer.send_now_many_async([Message(SUBJECT, "b")] * 2)
        assert world.stored_ids() == {message_id, *ids}
        assert await world.producer.send_now_many_async([]) == []
        with pytest.raises(InvalidMessageError):
            await world.producer.send_now_many_async([Message(SUBJECT), Message("no name")])
        flushed = await world.producer.flush_async()
        assert (bool(flushed), flushed.accepted, world.stored_ids()) == (True, 3, set())
        assert world.broker.messages(SUBJECT)[0].headers == {"tenant": "7"}

    tell(story, tmp_path, a_database)


def test_S11_the_blocking_form_is_refused_on_an_asynchronous_engine(
    tmp_path: Path, sqlite_database: Database
) -> None:
    async def story(world: World) -> None:
        with pytest.raises(ConfigurationError, match="send_now_async"):
            world.producer.send_now(Message(SUBJECT, "a"))

    tell(story, tmp_path, sqlite_database)


def test_S11_the_awaited_form_works_with_a_blocking_engine(
    tmp_path: Path, sqlite_database: Database
) -> None:
    world = World(tmp_path, database=sqlite_database)
    message_id = asyncio.run(world.producer.send_now_async(Message(SUBJECT, "a")))
    assert world.stored_ids() == {message_id}
    world.close()


def test_S11_a_message_is_cancelled_in_the_transaction_it_was_sent_in_or_a_later_one(
    tmp_path: Path, a_database: Database
) -> None:
    async def story(world: World) -> None:
        producer = world.producer
        async with AsyncSession(world.engine) as session, session.begin():
            own = await world.send("own", session)
            await world.send("kept", session)
            assert await producer.cancel_async(own, session=session)
            assert not await producer.cancel_async(own, session=session)
        assert await producer.flush_async()
        assert world.sent() == ["kept"]
        world.broker.faults.is_unreachable = True
        earlier = await producer.send_now_async(Message(SUBJECT, "earlier"))
        assert not await producer.flush_async()
        async with transaction(world.engine):
            assert await producer.cancel_async(earlier)
        assert world.stored_ids() == set()
        async with AsyncSession(world.engine) as session, session.begin():
            sent = await world.send("of this session", session)
            assert await producer.cancel_async(sent, session=session)
        elsewhere = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'elsewhere.db'}")
        async with transaction(world.engine), transaction(elsewhere):
            assert await producer.cancel_async(await world.send("of the one that is here"))
        await elsewhere.dispose()
        assert world.stored_ids() == set()
        registry = async_scoped_session(async_sessionmaker(world.engine), asyncio.current_task)
        assert await producer.cancel_async(await world.send("own", registry), session=registry)
        await registry.commit()
        await registry.remove()
        assert world.stored_ids() == set()

    tell(story, tmp_path, a_database)


def test_S11_D4_a_message_that_the_broker_has_unknown_to_the_outbox_is_cancelled_in_both(
    tmp_path: Path, a_database: Database
) -> None:
    async def story(world: World) -> None:
        producer = world.producer
        for is_claimed in (False, True):
            world.broker.faults.lost_answers = 1
            sent = await producer.send_now_async(Message(SUBJECT, "x", delay=60))
            assert not await producer.flush_async()
            if is_claimed:
                world.make_due()
                assert world.store.claim(token=WATCHDOG, limit=10, lease_ms=60_000)
            assert await producer.cancel_async(sent) is Cancellation.CANCELLED
            assert world.stored_ids() == set()
        world.clock.advance(120_000)
        assert world.sent() == []

    tell(story, tmp_path, a_database)


def test_S11_receipts_of_an_asynchronous_session(tmp_path: Path, a_database: Database) -> None:
    async def story(world: World) -> None:
        async with AsyncSession(world.engine) as session, session.begin():
            # Nothing has begun yet: the message waits for the first statement or the commit.
            first = world.producer.receipt(await world.send("a", session), session=session)
            await session.connection()
            second = world.producer.receipt(await world.send("b", session), session=session)
        async with AsyncSession(world.engine) as session:
            undone = world.producer.receipt(await world.send("c", session), session=session)
            await session.rollback()
        await world.producer.flush_async()
        assert [await each for each in (first, second, undone)] == [
            SendOutcome.ACCEPTED, SendOutcome.ACCEPTED, SendOutcome.ROLLED_BACK,
        ]  # fmt: skip

    tell(story, tmp_path, a_database)


def test_S11_S6_a_transaction_run_again_sends_once(tmp_path: Path, a_database: Database) -> None:
    async def story(world: World) -> None:
        for run in range(4):
            world.clock.advance(1_000)
            async with AsyncSession(world.engine) as session, session.begin():
                await world.send(f"run {run}", session, dedupe_key="order-17-paid")
            if run % 2:
                assert await world.producer.flush_async()
        assert (world.sent(), world.stored_ids()) == (["run 0"], set())

    tell(story, tmp_path, a_database)


def test_S11_O4_messages_of_a_key_are_accepted_in_the_order_of_their_commits(
    tmp_path: Path, a_database: Database
) -> None:
    async def story(world: World) -> None:
        ordered, other = (world.make_producer(order_by_key=True) for _ in range(2))
        for i in range(6):
            async with AsyncSession(world.engine) as session, session.begin():
                message = Message(SUBJECT, f"{i}", key="k")
                await (other if i % 3 == 1 else ordered).send(message, session=session)
        assert (await ordered.flush_async()).accepted == 1  # the second is in other hands
        assert (await other.flush_async()).accepted == 5, "with what was given back behind it"
        for _ in range(10):
            world.make_due()
            sweep(world)
        assert world.sent() == [f"{i}" for i in range(6)]
        await ordered.close_async()
        await other.close_async()

    tell(story, tmp_path, a_database)


@pytest.mark.parametrize("way", ["flush", "close", "block"])
def test_S11_the_loop_continues_while_somebody_waits_for_the_broker(
    tmp_path: Path, sqlite_database: Database, way: str
) -> None:
    async def story(world: World) -> None:
        transport = GatedTransport(world.broker)
        producer = Producer(world.engine, transport, options=ProducerOptions())

        async def wait() -> None:
            if way == "flush":
                assert await producer.flush_async(DEADLINE_S)
            elif way == "close":
                await producer.close_async(DEADLINE_S)
            else:
                async with producer:
                    pass

        await producer.send_now_async(Message(SUBJECT, "a"))
        waiting = asyncio.ensure_future(wait())
        while not transport.arrived.is_set():
            await asyncio.sleep(0.001)
        assert not waiting.done()
        transport.go_on.set()  # were the loop blocked, nobody would come here
        await waiting
        assert world.sent() == ["a"]
        await producer.close_async()

    tell(story, tmp_path, sqlite_database)


# aiosqlite leaves a connection whose opening was cancelled to the collector, and Python 3.13 says so.
@pytest.mark.filterwarnings("ignore:unclosed database:ResourceWarning")
def test_S6_a_send_now_that_is_cancelled_is_sent_if_and_only_if_it_is_stored(
    tmp_path: Path, a_database: Database
) -> None:
    async def story(world: World) -> None:
        world.clock.advance(1)
        for turns in range(40):
            task = asyncio.ensure_future(
                world.producer.send_now_async(Message(SUBJECT, f"{turns}"))
            )
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
        stored = world.stored_ids()
        await world.producer.flush_async()
        assert world.sent_ids() == stored
        if world.stored_ids():
            world.make_due()
            sweep(world)
        assert len(world.sent()) == len(stored)

    tell(story, tmp_path, a_database)
    gc.collect()


def test_what_does_not_block_is_named_after_what_does_and_takes_the_same() -> None:
    twins = {name: value for name, value in vars(Producer).items() if _is_public_coroutine(name)}
    assert {"flush_async", "close_async", "cancel_async", "cancel_now_async"} <= set(twins)
    for name, twin in twins.items():
        blocking = getattr(Producer, name.removesuffix("_async"))
        assert not inspect.iscoroutinefunction(blocking), name
        assert list(signature(twin).parameters) == list(signature(blocking).parameters), name


def _is_public_coroutine(name: str) -> bool:
    return not name.startswith("_") and inspect.iscoroutinefunction(getattr(Producer, name))
