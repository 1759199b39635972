"""A COMMIT is executed and nobody hears of it: F3 reset, F4 silence, F5 the task is cancelled.

The message arrives if and only if the row is there, on the direct path: no watchdog runs here.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any, Final

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from tests.client.publishing import sweep
from tests.client.world import SUBJECT, Order, World, a_world
from tests.faults.proxy import Proxy
from tests.services.databases import Database

DEADLINE_S: Final = 60.0
#: How long a driver waits for an answer, where it can be told.
READ_S: Final = 2
TRIALS: Final = 200
CANCEL_TURNS_MAX: Final = 12
#: Of half the trials each is cancelled within so many times the length of a commit, as it is measured.
CANCEL_LENGTHS_MAX: Final = 1.5
MEASURED: Final = 5


@contextmanager
def a_world_behind(
    proxy: Proxy, database: Database, folder: Path, **options: Any
) -> Iterator[World]:
    """Its engine goes through the proxy, its truth does not."""
    url = sa.make_url(database.url)
    with a_world(folder, database=database) as direct:
        database.url = url.set(port=proxy.port).render_as_string(hide_password=False)
        try:
            with a_world(folder, database=database, **options) as world:
                world.truth = direct.truth
                yield world
        finally:
            database.url = url.render_as_string(hide_password=False)


@pytest.mark.parametrize("is_async", [False, True])
def test_F3_E25_S6_a_commit_whose_answer_is_lost_is_looked_for_and_sent(
    a_server_database: Database, tmp_path: Path, is_async: bool
) -> None:
    with (
        Proxy(sa.make_url(a_server_database.url).port or 0) as proxy,
        a_world_behind(proxy, a_server_database, tmp_path, is_async=is_async) as world,
    ):

        async def commit_async() -> None:
            async with AsyncSession(world.engine) as session:
                await world.send("a", session)
                await session.execute(sa.insert(Order).values(label="a"))
                proxy.arm("reset")
                with pytest.raises(sa.exc.DBAPIError):
                    await session.commit()
            await world.engine.dispose()

        if is_async:
            asyncio.run(commit_async())
        else:
            with Session(world.engine) as session:
                world.send("a", session)
                session.execute(sa.insert(Order).values(label="a"))
                proxy.arm("reset")
                with pytest.raises(sa.exc.DBAPIError):
                    session.commit()
        assert proxy.struck.wait(DEADLINE_S)
        assert world.outcome() == (["a"], ["a"], set())
        assert world.producer.stats.sent == 1


def test_F4_E26_S6_a_commit_whose_answer_never_comes_ends_with_the_drivers_patience(
    a_server_database: Database, tmp_path: Path
) -> None:
    """PyMySQL has a time-out; psycopg waits until somebody ends the connection."""
    is_mysql = a_server_database.kind == "mysql"
    options = {"connect_args": {"read_timeout": READ_S}} if is_mysql else {}
    errors: list[Exception] = []
    with (
        Proxy(sa.make_url(a_server_database.url).port or 0) as proxy,
        a_world_behind(proxy, a_server_database, tmp_path, engine_options=options) as world,
    ):

        def commit() -> None:
            with suppress(sa.exc.DBAPIError), Session(world.engine) as session:
                world.send("a", session)
                session.execute(sa.insert(Order).values(label="a"))
                proxy.arm("swallow")
                try:
                    session.commit()
                except Exception as error:
                    errors.append(error)
                    raise

        thread = threading.Thread(target=commit)
        thread.start()
        assert proxy.struck.wait(DEADLINE_S)
        if not is_mysql:
            assert thread.is_alive()
            # Nobody told the publisher; the row is a watchdog's when its time has come.
            world.make_due()
            assert len(sweep(world).sent) == 1
            proxy.release()
        thread.join(DEADLINE_S)
        assert [type(error) for error in errors] == [sa.exc.OperationalError]
        assert world.outcome() == (["a"], ["a"], set())


async def begin(world: World, label: str) -> asyncio.Task[None]:
    """A transaction that goes on behind this, and is about to commit."""

    async def work() -> None:
        async with AsyncSession(world.engine) as session:
            await world.send(label, session)
            await session.execute(sa.insert(Order).values(label=label))
            about_to_commit.set()
            await session.commit()

    about_to_commit = asyncio.Event()
    task = asyncio.create_task(work())
    await about_to_commit.wait()
    return task


async def length_s(world: World, label: str) -> float:
    """Of a commit on this machine, as busy as it is."""
    task, began_at_s = await begin(world, label), time.monotonic()
    await task
    return time.monotonic() - began_at_s


async def cancelled_at_s(world: World, label: str, turns: int, delay_s: float) -> float | None:
    """When a commit was cancelled, so many turns of the loop or seconds behind its begin; None for too late."""
    task = await begin(world, label)
    for _ in range(turns):
        await asyncio.sleep(0)
    if delay_s:
        await asyncio.sleep(delay_s)
    at_s = time.monotonic() if task.cancel() else None
    with suppress(asyncio.CancelledError, sa.exc.DBAPIError):
        await task
    for other in asyncio.all_tasks() - {asyncio.current_task()}:
        with suppress(asyncio.CancelledError, sa.exc.DBAPIError):
            await other
    return at_s


def test_F5_E12_S6_S11_every_message_of_a_cancelled_commit_that_was_stored_arrives(
    a_database: Database, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    rng = random.Random(5)
    cancelled_at: dict[str, float] = {}
    stored_of_cancelled = 0

    async def main(world: World) -> None:
        measured_s = median([await length_s(world, f"measured {i}") for i in range(MEASURED)])
        for i in range(TRIALS):
            delay_s = rng.random() * CANCEL_LENGTHS_MAX * measured_s if i % 2 else 0.0
            turns = rng.randint(0, CANCEL_TURNS_MAX)
            if (at_s := await cancelled_at_s(world, f"{i}", turns, delay_s)) is not None:
                cancelled_at[f"{i}"] = at_s
        await world.engine.dispose()

    sent_at: dict[str, float] = {}
    settings: dict[str, Any] = {
        "is_async": True,
        "background": True,
        "on_sent": lambda ids: sent_at.update(dict.fromkeys(ids, time.monotonic())),
    }
    with a_world(tmp_path, database=a_database, real_clock=True, **settings) as world:
        asyncio.run(main(world))
        assert world.producer.flush(DEADLINE_S)
        orders, sent = world.committed_orders(), set(world.sent())
        assert (sent, world.stored_ids()) == (orders, set())
        ids = {message.body: str(message.message_id) for message in world.broker.messages(SUBJECT)}
        latencies = sorted(
            sent_at[ids[label]] - at_s for label, at_s in cancelled_at.items() if label in orders
        )
        stored_of_cancelled = len(latencies)
    assert stored_of_cancelled, "no trial hit the commit: nothing was tried"
    p99_ms = latencies[int(len(latencies) * 0.99) - 1 if len(latencies) > 1 else 0] * 1000
    told = (
        f"{stored_of_cancelled} of {len(cancelled_at)} cancelled commits stored, p99 {p99_ms:.0f}"
    )
    record_property("cancelled_commits", told)
    print(f"\n{a_database.kind}: {told} ms")  # a figure, which depends on the machine
