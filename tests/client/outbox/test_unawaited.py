"""Sends in an `AsyncSession` that nobody has awaited when their transaction or savepoint ends.

They keep what awaited ones keep: the checks, the order, and whose transaction they belong to.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import warnings
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from qmq_client import Message, NoTransactionError, OutboxMissingError, Producer, ProducerOptions
from qmq_client.errors import AutocommitError, OutboxRowLostError
from qmq_client.outbox.sending.unawaited import Sent
from qmq_client.testing import MemoryTransport
from tests.client.world import SUBJECT, Order, World, a_world
from tests.kit.waiting import DEADLINE_S
from tests.services.databases import Database

Work = Callable[[AsyncSession], Awaitable[None]]


@pytest.fixture
def world(a_database: Database, tmp_path: Path) -> Iterator[World]:
    with a_world(tmp_path, database=a_database, is_async=True) as made:
        yield made


@pytest.fixture
def sqlite_world(sqlite_database: Database, tmp_path: Path) -> Iterator[World]:
    with a_world(tmp_path, database=sqlite_database, is_async=True) as made:
        yield made


def run(world: World, work: Work) -> None:
    async def main() -> None:
        try:
            async with AsyncSession(world.engine) as session:
                await work(session)
        finally:
            await world.engine.dispose()

    asyncio.run(main())


def forget(world: World, session: AsyncSession, body: str, **fields: Any) -> Sent:
    return world.producer.send(Message(SUBJECT, body, **fields), session=session)


def test_S3_S11_those_of_a_savepoint_go_with_it(world: World) -> None:
    async def work(session: AsyncSession) -> None:
        forget(world, session, "outer")
        undone = await session.begin_nested()
        forget(world, session, "undone")
        await undone.rollback()
        async with session.begin_nested():
            forget(world, session, "kept")
        await session.commit()

    run(world, work)
    assert world.outcome() == ([], ["kept", "outer"], set())


def test_S1_S3_S11_a_commit_around_an_open_savepoint_writes_all(world: World) -> None:
    async def work(session: AsyncSession) -> None:
        async with session.begin():
            forget(world, session, "outer")
            await session.begin_nested()
            forget(world, session, "inner")

    run(world, work)
    assert world.outcome() == ([], ["inner", "outer"], set())


@pytest.mark.parametrize("ending", ["rollback", "close", "expunge_all", "savepoint"])
def test_S2_S11_an_await_after_the_end_writes_nothing_and_says_so(
    world: World, ending: str
) -> None:
    async def work(session: AsyncSession) -> None:
        if ending == "savepoint":
            savepoint = await session.begin_nested()
            late = forget(world, session, "late")
            await savepoint.rollback()
        else:
            late = forget(world, session, "late")
            if ending == "expunge_all":
                session.expunge_all()
            else:
                await getattr(session, ending)()
        if ending == "expunge_all":
            await late
        else:
            with pytest.raises(NoTransactionError, match="ended before"):
                await late
        session.add(Order(label="a"))
        await session.commit()

    run(world, work)
    assert world.outcome() == (["a"], ["late"] if ending == "expunge_all" else [], set())


def test_S2_S11_a_connection_that_commits_by_itself_is_refused_by_the_flush(
    a_database: Database, tmp_path: Path
) -> None:
    options = {"isolation_level": "AUTOCOMMIT"}
    with a_world(tmp_path, database=a_database, is_async=True, engine_options=options) as world:

        async def work(session: AsyncSession) -> None:
            forget(world, session, "a")
            with pytest.raises(AutocommitError):
                await session.flush()
            await session.rollback()

        run(world, work)
        assert world.outcome() == ([], [], set())


def test_S1_S11_a_repeated_dedupe_key_is_no_error(world: World) -> None:
    async def work(session: AsyncSession) -> None:
        for label in ("a", "b"):
            forget(world, session, "once", dedupe_key="k")
            session.add(Order(label=label))
            await session.commit()

    run(world, work)
    assert world.outcome() == (["a", "b"], ["once"], set())


def test_S1_S11_a_row_that_a_trigger_keeps_out_fails_the_commit(sqlite_world: World) -> None:
    """The check is the same on every database; a trigger of SQLite is the shortest."""
    world = sqlite_world
    world.change("CREATE TRIGGER out BEFORE INSERT ON qmq_outbox BEGIN SELECT RAISE(IGNORE); END")

    async def work(session: AsyncSession) -> None:
        forget(world, session, "a")
        session.add(Order(label="a"))
        with pytest.raises(OutboxRowLostError):
            await session.commit()
        await session.rollback()

    run(world, work)
    assert world.outcome() == ([], [], set())


def test_S7_S11_a_missing_table_is_named_at_the_commit(world: World) -> None:
    world.change("DROP TABLE qmq_outbox")

    async def work(session: AsyncSession) -> None:
        forget(world, session, "a")
        with pytest.raises(OutboxMissingError, match="qmq_outbox"):
            await session.commit()
        await session.rollback()

    run(world, work)


def test_O4_S11_transactions_that_send_under_a_key_wait_for_each_other_at_the_commit(
    a_server_database: Database, tmp_path: Path
) -> None:
    """The first one to write is the first one to commit, so the order of rows is that of commits."""
    with a_world(tmp_path, database=a_server_database, is_async=True, order_by_key=True) as world:

        async def main() -> None:
            first, second = AsyncSession(world.engine), AsyncSession(world.engine)
            await world.producer.send(Message(SUBJECT, "first", key="k"), session=first)
            forget(world, second, "second", key="k")
            committing = asyncio.create_task(second.commit())
            done, _ = await asyncio.wait({committing}, timeout=0.3)
            assert not done, "the key is locked"
            await first.commit()
            await committing
            await first.close()
            await second.close()
            await world.engine.dispose()

        asyncio.run(main())
        assert world.producer.flush()
        assert world.sent() == ["first", "second"]


def test_S1_S11_what_a_hook_of_the_commit_sends_with_the_asynchronous_session_is_written(
    world: World,
) -> None:
    async def work(session: AsyncSession) -> None:
        def hook(_: Session) -> None:
            forget(world, session, "of the hook")

        event.listen(session.sync_session, "before_commit", hook)
        session.add(Order(label="a"))
        await session.commit()

    run(world, work)
    assert world.outcome() == (["a"], ["of the hook"], set())


def test_S8_S11_the_session_within_an_asynchronous_one_is_refused_with_the_way_out(
    world: World,
) -> None:
    async def work(session: AsyncSession) -> None:
        for _ in range(2):  # without and with a connection in the pool
            with pytest.raises(NoTransactionError, match="the AsyncSession itself"):
                world.producer.send(Message(SUBJECT, "a"), session=session.sync_session)
            await session.rollback()
            await session.execute(sa.text("SELECT 1"))

    with warnings.catch_warnings():  # of coroutines that SQLAlchemy's drivers never came to await
        warnings.simplefilter("ignore", RuntimeWarning)
        run(world, work)
        gc.collect()
    assert world.outcome() == ([], [], set())


@pytest.mark.parametrize("is_second", [True, False])
def test_a_session_that_is_closed_with_messages_in_it_is_a_mistake_after_a_commit_only(
    world: World, caplog: pytest.LogCaptureFixture, is_second: bool
) -> None:
    """Without one it is how most frameworks end a request that failed."""
    caplog.set_level(logging.INFO, "qmq.producer")

    async def work(session: AsyncSession) -> None:
        if is_second:
            session.add(Order(label="a"))
            await session.commit()
        await world.producer.send(Message(SUBJECT, "late"), session=session)

    run(world, work)
    (record,) = [each for each in caplog.records if "closed without commit" in each.getMessage()]
    assert record.levelno == (logging.WARNING if is_second else logging.INFO)


@pytest.mark.parametrize("name", ["before_commit", "before_flush", "after_flush"])
def test_what_a_hook_of_the_commit_sends_is_not_taken_for_unended(
    sqlite_database: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    caplog.set_level(logging.INFO, "qmq.producer")
    with a_world(tmp_path, database=sqlite_database) as world, Session(world.engine) as session:
        sends: list[str] = []

        def hook(*_: Any) -> None:
            if not sends:
                sends.append(world.send("a", session))

        event.listen(session, name, hook)
        session.add(Order(label="a"))
        session.commit()
        assert world.outcome() == (["a"], ["a"], set())
    assert "closed without commit" not in caplog.text


def test_a_receipt_of_a_send_that_was_rolled_back_unawaited_says_so(world: World) -> None:
    options = ProducerOptions(background=False)

    async def work(session: AsyncSession) -> None:
        message_id = producer.send(Message(SUBJECT, "a"), session=session)
        receipt = producer.receipt(message_id, session=session)
        await session.rollback()
        assert str(receipt.outcome) == "rolled back"

    with Producer(world.engine, MemoryTransport(world.broker), options=options) as producer:
        run(world, work)
        assert producer.flush(DEADLINE_S)
