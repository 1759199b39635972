"""Whose transaction a call belongs to: named or scoped, never guessed; and a send that nobody awaits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from qmq_client import Message, NoTransactionError, Producer, transaction, transactional
from qmq_client.testing import MemoryTransport
from tests.client.world import SUBJECT, Order, World, a_world, add
from tests.conftest import MakeDatabase
from tests.kit.waiting import DEADLINE_S
from tests.services.drivers import Driver, drivers

Call = Callable[[Producer, str], object]
CALLS: Final[dict[str, Call]] = {
    "send": lambda producer, _: producer.send(Message(SUBJECT, "a")),
    "send_many": lambda producer, _: producer.send_many([Message(SUBJECT, "a")]),
    "receipt": lambda producer, message_id: producer.receipt(message_id),
}


@pytest.mark.parametrize("name", CALLS)
def test_S4_S8_the_only_open_session_of_a_thread_is_nobodys(world: World, name: str) -> None:
    with Session(world.engine) as session:
        message_id = world.send("b", session)
        with pytest.raises(NoTransactionError, match="session="):
            CALLS[name](world.producer, message_id)
        session.rollback()
    assert world.outcome() == ([], [], set())


def test_S2_a_message_is_withdrawn_by_the_transaction_that_sends_it(world: World) -> None:
    with Session(world.engine) as session:
        message_id = world.send("a", session)
        assert world.producer.cancel(message_id, session=session)
        add(world, session, "b")
        session.commit()
    assert world.outcome() == (["b"], ["b"], set())


@pytest.mark.parametrize("is_registry", [True, False], ids=["scoped_session", "function"])
def test_S1_S2_a_producer_asks_whom_it_was_told_to_ask(world: World, is_registry: bool) -> None:
    registry = scoped_session(sessionmaker(world.engine))
    asked: Any = registry if is_registry else registry.__call__
    with Producer(world.engine, MemoryTransport(world.broker), session=asked) as producer:
        for label, ending in (("undone", "rollback"), ("a", "commit")):
            registry.execute(sa.insert(Order).values(label=label))
            producer.send(Message(SUBJECT, label))
            getattr(registry, ending)()
        registry.remove()
        assert producer.flush(DEADLINE_S)
    assert world.outcome() == (["a"], ["a"], set())


def test_S1_S2_the_innermost_scope_counts_before_whom_the_producer_was_told_to_ask(
    world: World,
) -> None:
    registry = scoped_session(sessionmaker(world.engine))
    with Producer(world.engine, MemoryTransport(world.broker), session=registry) as producer:

        @transactional(producer)
        def place() -> None:
            producer.send(Message(SUBJECT, "outer"))
            registry.rollback()  # not this one

        place()
        with transaction(world.engine):
            producer.send(Message(SUBJECT, "inner"))
            registry.rollback()
        registry.remove()
        assert producer.flush(DEADLINE_S)
    assert world.outcome() == ([], ["inner", "outer"], set())


def test_S4_a_task_does_not_find_the_session_of_another_one(
    make_database: MakeDatabase, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"database": make_database("sqlite"), "is_async": True}
    with a_world(tmp_path, background=True, real_clock=True, **options) as world:

        async def main() -> None:
            entered, left = asyncio.Event(), asyncio.Event()

            @transactional(world.producer)
            async def place() -> None:
                entered.set()
                await left.wait()

            placing = asyncio.create_task(place())
            await entered.wait()
            with pytest.raises(NoTransactionError, match="session="):
                await world.producer.send(Message(SUBJECT, "a"))
            left.set()
            await placing
            await world.engine.dispose()

        asyncio.run(main())
        assert world.stored_ids() == set()


@pytest.fixture(params=drivers(is_async=True), ids=str)
def async_world(
    request: pytest.FixtureRequest, make_database: MakeDatabase, tmp_path: Path
) -> Iterator[World]:
    """With a publisher's thread, by each asynchronous driver."""
    driver: Driver = request.param
    options: dict[str, Any] = {"background": True, "real_clock": True, "driver": driver}
    with a_world(tmp_path, database=make_database(driver.kind), **options) as world:
        yield world


class Complaints(logging.Handler):
    """Keeps what is logged as an error."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def run(world: World, work: Callable[[AsyncSession], Awaitable[None]]) -> list[logging.LogRecord]:
    """Run it in a session; what was logged as an error meanwhile."""
    complaints = Complaints()

    async def main() -> None:
        async with AsyncSession(world.engine) as session:
            await work(session)
        await world.engine.dispose()

    logger = logging.getLogger("qmq")
    logger.addHandler(complaints)
    try:
        asyncio.run(main())
    finally:
        logger.removeHandler(complaints)
    assert world.producer.flush(DEADLINE_S)
    return complaints.records


def test_S11_an_awaited_send_is_written_at_once_and_not_complained_of(async_world: World) -> None:
    async def work(session: AsyncSession) -> None:
        message_id = await world.producer.send(Message(SUBJECT, "a"), session=session)
        ids = await world.producer.send_many([Message(SUBJECT, "b")] * 2, session=session)
        query = sa.text("SELECT count(*) FROM qmq_outbox")
        with session.no_autoflush:
            assert await session.scalar(query) == 3
        assert len({message_id, *ids}) == 3
        await session.commit()

    world = async_world
    assert run(world, work) == []
    assert world.outcome()[1:] == (["a", "b", "b"], set())


def test_S11_a_send_may_be_awaited_in_a_task_of_its_own(async_world: World) -> None:
    async def work(session: AsyncSession) -> None:
        sent = asyncio.create_task(world.producer.send(Message(SUBJECT, "a"), session=session))
        assert len(await sent) == 32
        async with asyncio.TaskGroup() as group:
            messages = [Message(SUBJECT, "b")] * 2
            both = group.create_task(world.producer.send_many(messages, session=session))
        assert len(both.result()) == 2
        await session.commit()
        for turns in (0, 1):  # cancelled before it begins, and then
            sent = asyncio.create_task(world.producer.send(Message(SUBJECT, "c"), session=session))
            for _ in range(turns):
                await asyncio.sleep(0)
            sent.cancel()
            with suppress(asyncio.CancelledError):
                await sent
            await (session.rollback() if turns else session.commit())

    world = async_world
    assert run(world, work) == []
    assert world.outcome()[1:] == (["a", "b", "b"], set())


@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_S1_S2_S11_a_send_that_nobody_awaits_goes_with_its_transaction_and_is_logged(
    async_world: World, ending: str
) -> None:
    async def work(session: AsyncSession) -> None:
        ids.append(world.producer.send(Message(SUBJECT, "a"), session=session))
        session.add(Order(label="a"))
        if ending == "rollback":
            await session.flush()
        await getattr(session, ending)()

    world, ids = async_world, list[str]()
    (record,) = run(world, work)
    assert ids[0] in record.getMessage()
    assert "await" in record.getMessage()
    there = ["a"] if ending == "commit" else []
    assert world.outcome() == (there, there, set())


def test_S2_S11_a_send_with_a_connection_that_nobody_awaits_is_not_written_and_logged(
    async_world: World,
) -> None:
    async def work(session: AsyncSession) -> None:
        connection = await session.connection()
        world.producer.send(Message(SUBJECT, "a"), session=connection)
        await session.commit()

    world = async_world
    (record,) = run(world, work)
    assert "never awaited" in record.getMessage()
    assert world.outcome() == ([], [], set())
