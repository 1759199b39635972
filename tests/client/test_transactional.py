"""`@transactional` and `transaction`: commit at the end, roll back on an error, nest, tell apart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

from qmq_client.current import current_session
from qmq_client.errors import ConfigurationError, NoTransactionError
from qmq_client.message import Message
from qmq_client.options import ProducerOptions
from qmq_client.outbox.table import create_tables
from qmq_client.producer import Producer
from qmq_client.testing import MemoryBroker, MemoryTransport
from qmq_client.transactional import transaction, transactional
from tests.client.world import SUBJECT, Base, Order, World, a_world, open_engine
from tests.services.databases import Database


class RefusedError(Exception):
    """A business rule."""


def note(world: World, label: str) -> None:
    """A business row and a message with the same label, on the current session."""
    current_session().execute(sa.insert(Order).values(label=label))
    world.send(label)


def outcome(world: World) -> tuple[list[str], list[str]]:
    assert world.producer.flush()
    return sorted(world.committed_orders()), sorted(world.sent())


def test_it_commits_at_the_return_and_gives_back_what_the_function_returns(world: World) -> None:
    @transactional(world.producer)
    def place(label: str, *, fee: int) -> str:
        """Place an order."""
        note(world, label)
        return f"{label}{fee}"

    assert place("a", fee=3) == "a3"
    assert (place.__name__, place.__doc__) == ("place", "Place an order.")
    assert outcome(world) == (["a"], ["a"])


def test_an_error_rolls_back(world: World) -> None:
    @transactional(world.producer)
    def place() -> None:
        note(world, "a")
        raise RefusedError

    with pytest.raises(RefusedError):
        place()
    assert outcome(world) == ([], [])
    with pytest.raises(NoTransactionError):
        current_session()


def test_nested_it_is_a_savepoint(world: World) -> None:
    @transactional(world.producer)
    def inner(label: str) -> None:
        note(world, label)
        if label == "bad":
            raise RefusedError

    @transactional(world.producer)
    def outer() -> None:
        note(world, "outer")
        inner("good")
        with pytest.raises(RefusedError):
            inner("bad")

    outer()
    assert outcome(world) == (["good", "outer"], ["good", "outer"])


def test_a_savepoint_falls_with_the_outer_transaction(world: World) -> None:
    inner = transactional(world.producer)(lambda: note(world, "inner"))

    @transactional(world.producer)
    def outer() -> None:
        inner()
        raise RefusedError

    with pytest.raises(RefusedError):
        outer()
    assert outcome(world) == ([], [])


def test_requires_new_is_a_transaction_of_its_own(world: World) -> None:
    sessions: list[Session] = []

    @transactional(world.producer, requires_new=True)
    def audit() -> None:
        sessions.append(current_session())

    @transactional(world.producer, requires_new=True)
    def place() -> None:
        sessions.append(current_session())

    place()
    audit()
    assert sessions[0] is not sessions[1]

    def inside() -> None:
        audit()

    with Session(world.engine) as session, session.begin():
        session.execute(sa.select(Order))  # reads only: SQLite has one writer at a time
        inside()
    assert len(sessions) == 3


def test_inside_a_core_transaction_it_is_a_savepoint_of_that(world: World) -> None:
    inner = transactional(world.producer)(lambda: note(world, "inner"))
    with transaction(world.engine) as connection:
        assert current_session() is connection
        note(world, "core")
        inner()
    assert outcome(world) == (["core", "inner"], ["core", "inner"])


def test_a_core_transaction_rolls_back_on_an_error(world: World) -> None:
    def place() -> None:
        with transaction(world.engine):
            note(world, "a")
            raise RefusedError

    with pytest.raises(RefusedError):
        place()
    assert outcome(world) == ([], [])


def test_a_task_that_outlives_the_transaction_is_refused(world: World) -> None:
    async def main() -> None:
        @transactional(world.producer)
        def start() -> asyncio.Task[None]:
            return asyncio.get_running_loop().create_task(late())

        async def late() -> None:
            with pytest.raises(NoTransactionError, match="has ended"):
                world.send("late")

        await start()

    asyncio.run(main())
    assert outcome(world) == ([], [])


def test_tasks_do_not_see_each_others_sessions(world: World) -> None:
    async def main() -> None:
        opened, done = asyncio.Event(), asyncio.Event()

        async def owner() -> None:
            with Session(world.engine) as session, session.begin():
                session.execute(sa.select(Order))
                opened.set()
                await done.wait()

        async def other() -> None:
            await opened.wait()
            with pytest.raises(NoTransactionError, match="Pass `session=`"):
                world.send("astray")
            done.set()

        await asyncio.gather(owner(), other())

    asyncio.run(main())
    assert outcome(world) == ([], [])


def test_a_coroutine_needs_an_asynchronous_engine(world: World) -> None:
    @transactional(world.producer)
    async def place() -> None:
        raise AssertionError

    with pytest.raises(ConfigurationError, match="place"):
        asyncio.run(place())


def test_an_async_session_keeps_the_same_promises(tmp_path: Path) -> None:
    pytest.importorskip("greenlet")
    pytest.importorskip("aiosqlite")
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

    path = tmp_path / "shop.sqlite"
    setup = open_engine(path)
    Base.metadata.create_all(setup)
    create_tables(setup)
    setup.dispose()
    broker = MemoryBroker()
    engine = create_async_engine(f"sqlite+aiosqlite:///{path}")

    async def main(producer: Producer) -> None:
        @transactional(producer)
        async def place(label: str) -> None:
            session: AsyncSession = current_session()
            await session.execute(sa.insert(Order).values(label=label))
            producer.send(Message(SUBJECT, label))
            if label == "bad":
                raise RefusedError

        @transactional(producer)
        async def outer() -> None:
            await place("good")
            with pytest.raises(RefusedError):
                await place("bad")

        await outer()
        with pytest.raises(RefusedError):
            await place("bad")
        async with AsyncSession(engine) as session:
            producer.send(Message(SUBJECT, "x"), session=session)
            await session.commit()
            await session.connection()
            producer.send(Message(SUBJECT, "undone"), session=session)
            await session.rollback()
        await engine.dispose()

    options: Any = ProducerOptions(background=False)
    with Producer(engine, MemoryTransport(broker), options=options) as producer:
        asyncio.run(main(producer))
        assert producer.flush()
    assert [message.body for message in broker.messages(SUBJECT)] == ["good", "x"]


def test_a_decorator_without_its_producer_is_refused() -> None:
    def place() -> None:
        raise AssertionError("never called")

    for wrong in (place, "shop.db"):
        with pytest.raises(ConfigurationError, match="@transactional\\(producer\\)"):
            transactional(wrong)  # type: ignore[arg-type]  # the mistakes


def test_S1_what_would_run_after_its_commit_is_refused(world: World) -> None:
    def open_till() -> Iterator[int]:  # as a framework's dependency
        yield 1

    async def open_till_later() -> AsyncIterator[int]:
        yield 1

    for function in (open_till, open_till_later):
        with pytest.raises(ConfigurationError, match=r"open_till.*after the commit"):
            transactional(world.producer)(function)


@pytest.mark.parametrize("is_outer_kept", [True, False])
@pytest.mark.parametrize("is_inner_kept", [True, False])
def test_S1_S2_what_requires_a_new_transaction_goes_by_its_own_end(
    a_server_database: Database, tmp_path: Path, is_outer_kept: bool, is_inner_kept: bool
) -> None:
    with a_world(tmp_path, database=a_server_database) as world:

        @transactional(world.producer, requires_new=True)
        def inner() -> None:
            note(world, "inner")
            if not is_inner_kept:
                raise RefusedError

        @transactional(world.producer)
        def outer() -> None:
            note(world, "outer")
            with nullcontext() if is_inner_kept else pytest.raises(RefusedError):
                inner()
            assert world.committed_orders() == ({"inner"} if is_inner_kept else set())
            if not is_outer_kept:
                raise RefusedError

        with nullcontext() if is_outer_kept else pytest.raises(RefusedError):
            outer()
        kept = ["inner"] * is_inner_kept + ["outer"] * is_outer_kept
        assert outcome(world) == (kept, kept)


@pytest.mark.parametrize("is_inner_kept", [True, False])
def test_S1_S2_S11_the_same_of_asynchronous_functions(
    a_server_database: Database, tmp_path: Path, is_inner_kept: bool
) -> None:
    with a_world(tmp_path, database=a_server_database, is_async=True) as world:

        async def write(label: str) -> None:
            await current_session().execute(sa.insert(Order).values(label=label))
            world.send(label)

        @transactional(world.producer, requires_new=True)
        async def inner() -> None:
            await write("inner")
            if not is_inner_kept:
                raise RefusedError

        @transactional(world.producer)
        async def outer() -> None:
            await write("outer")
            with nullcontext() if is_inner_kept else pytest.raises(RefusedError):
                await inner()
            if is_inner_kept:
                raise RefusedError

        async def main() -> None:
            with pytest.raises(RefusedError) if is_inner_kept else nullcontext():
                await outer()
            await world.engine.dispose()

        asyncio.run(main())
        kept = ["inner"] if is_inner_kept else ["outer"]
        assert outcome(world) == (kept, kept)


def test_on_sqlite_a_new_transaction_inside_another_is_refused_by_name(world: World) -> None:
    inner = transactional(world.producer, requires_new=True)(lambda: note(world, "inner"))

    @transactional(world.producer)
    def outer() -> None:
        note(world, "outer")
        with pytest.raises(ConfigurationError, match="one writer at a time"):
            inner()

    outer()
    assert outcome(world) == (["outer"], ["outer"])


@pytest.mark.parametrize("what", ["producer", "url"])
def test_a_transaction_of_what_is_no_engine_is_refused_by_name(world: World, what: str) -> None:
    given: Any = world.producer if what == "producer" else "sqlite:///shop.db"
    with pytest.raises(ConfigurationError, match=rf"transaction\(engine\): {type(given).__name__}"):
        transaction(given)


def test_a_plain_function_of_an_asynchronous_producer_is_refused_by_name(tmp_path: Path) -> None:
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/shop.db")
    producer = Producer(engine, MemoryTransport(MemoryBroker()))

    @transactional(producer)
    def place() -> None: ...

    @transactional(producer)
    async def around() -> None:
        place()

    async def ask() -> None:
        with pytest.raises(ConfigurationError, match="Make it `async def`"):
            await around()
        await engine.dispose()

    with pytest.raises(ConfigurationError, match="Make it `async def`"):
        place()
    asyncio.run(ask())
    producer.close()
