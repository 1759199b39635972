"""Handlers that fork: the child ends where it comes back, and settles nothing of its parent's."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import warnings
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from qmq_client import create_tables
from qmq_client.consumer import consumer
from tests.client.consumer.kit import GROUP, SUBJECT, Bench

pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")


def come_back() -> None:
    return


def fail() -> None:
    raise ValueError("of the child")


def exit_well() -> None:
    sys.exit()


def exit_badly() -> None:
    sys.exit(7)


def exit_with_a_word() -> None:
    sys.exit("done")


ENDS = [(come_back, 0), (fail, 1), (exit_well, 0), (exit_badly, 7), (exit_with_a_word, 1)]


def child_of_this() -> int:
    """0 in the child; in the parent what the child's end was."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        process = os.fork()
    return process and os.waitpid(process, 0)[1] + 1


@pytest.mark.parametrize(("end", "code"), ENDS, ids=[end.__name__ for end, _ in ENDS])
def test_S10_C2_a_child_that_comes_out_of_its_handler_ends_there_and_the_parent_continues(
    bench: Bench, end: Callable[[], None], code: int
) -> None:
    ended: list[int] = []

    @consumer(SUBJECT, group=GROUP)
    def handler(body: str) -> None:
        status = child_of_this()
        if status == 0:
            end()
            return
        ended.append(os.waitstatus_to_exitcode(status - 1))

    bench.put("one", "two")
    bench.drain(handler)
    assert ended == [code, code]
    assert bench.broker.lag(SUBJECT, GROUP) == 0


@pytest.mark.parametrize(("end", "code"), ENDS, ids=[end.__name__ for end, _ in ENDS])
def test_S10_C2_a_child_of_an_asynchronous_handler_ends_there_and_the_parent_continues(
    bench: Bench, end: Callable[[], None], code: int
) -> None:
    ended: list[int] = []

    @consumer(SUBJECT, group=GROUP)
    async def handler(body: str) -> None:
        status = child_of_this()
        if status == 0:
            end()
            return
        await asyncio.sleep(0)
        ended.append(os.waitstatus_to_exitcode(status - 1))

    bench.put("one", "two")
    bench.drain(handler)
    assert ended == [code, code]
    assert bench.broker.lag(SUBJECT, GROUP) == 0


async def fork_and_wait(ended: list[int]) -> None:
    status = child_of_this()
    await asyncio.sleep(0)
    if status == 0:
        os._exit(9)  # what the child would do if it went on
    ended.append(os.waitstatus_to_exitcode(status - 1))


async def fork_in_a_task(ended: list[int]) -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(fork_and_wait(ended))


@pytest.mark.parametrize("work", [fork_and_wait, fork_in_a_task])
def test_S10_a_child_of_an_asynchronous_handler_leaves_the_loop_to_its_parent(
    bench: Bench, work: Callable[[list[int]], Awaitable[None]]
) -> None:
    ended: list[int] = []

    @consumer(SUBJECT, group=GROUP)
    async def handler(body: str) -> None:
        await work(ended)

    bench.put("one", "two")
    bench.drain(handler)
    assert ended == [1, 1]
    assert bench.broker.lag(SUBJECT, GROUP) == 0


def test_S10_C2_a_kept_handler_waits_and_is_cancelled_like_any_other(bench: Bench) -> None:
    seen: list[str] = []

    @consumer(SUBJECT, group=GROUP)
    async def handler(body: str) -> None:
        try:
            async with asyncio.timeout(0.01):
                await asyncio.Event().wait()
        except TimeoutError:
            seen.append("timeout")
        with contextlib.suppress(ValueError):
            await asyncio.gather(asyncio.to_thread(fail), asyncio.sleep(0))
        task = asyncio.create_task(asyncio.sleep(60), name="nap")
        await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        seen.append(f"{task.get_name()} {task.cancelled()}")

    bench.put("one")
    bench.drain(handler)
    assert seen == ["timeout", "nap True"]


def test_S10_C5_a_child_does_not_end_the_transaction_of_its_parents_inbox(
    bench: Bench, tmp_path: Path
) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'shop.db'}")
    create_tables(engine)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE effects (body TEXT)"))

    @consumer(SUBJECT, group=GROUP, inbox=engine, max_attempts=1)
    def handler(body: str, session: Session) -> None:
        session.execute(text("INSERT INTO effects VALUES (:body)"), {"body": body})
        if child_of_this() and body == "bad":
            raise ValueError("after the child came back")

    bench.put("bad", "good")
    bench.drain(handler)
    with engine.connect() as connection:
        assert list(connection.scalars(text("SELECT body FROM effects"))) == ["good"]
    engine.dispose()
