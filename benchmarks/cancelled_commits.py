"""What becomes of a message whose task is cancelled while it awaits its COMMIT.

Nobody hears whether such a transaction was stored, so the publisher looks, and sends what it finds. One
transaction after the other on an asynchronous session, each cancelled at a moment drawn by lot around
its commit; measured is the time from the cancellation to the broker's durable answer, of those that
were stored. The others have nothing that could arrive.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Final

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from benchmarks.load import BODY_BYTES, make_messages
from benchmarks.measure import percentile
from benchmarks.places import Place, open_places
from benchmarks.result import Conditions, Goal, Row
from benchmarks.shop import Order, make_order
from benchmarks.suite import Bench
from qmq_client import Message, Producer, ProducerOptions

#: The lot: turns of the loop, and in every other trial some milliseconds more.
TURNS_MAX: Final = 12
DELAY_S_MAX: Final = 0.004
#: So many times as many trials, should none have hit its commit.
TRIES_MAX: Final = 50
ANSWER_DEADLINE_S: Final = 30.0


class NothingToMeasureError(Exception):
    """No cancellation hit a commit, or what was stored and what arrived are not the same."""


def run(bench: Bench) -> list[Row]:
    """Milliseconds of each round, one database after the other."""
    # It tells at length of each connection that a cancelled driver could not use any more.
    logging.getLogger("sqlalchemy.pool").setLevel(logging.CRITICAL)
    with open_places(bench) as places:
        return [row for place in places for row in run_place(bench, place)]


def run_place(bench: Bench, place: Place) -> list[Row]:
    """Both figures on one database."""
    trial_count = bench.effort.pick(tiny=12, quick=60, full=200)
    rounds = [run_round(bench, place, i, trial_count) for i in range(bench.rounds)]
    driver = sa.make_url(asynchronous(f"{place.kind}://")).get_driver_name()
    conditions = Conditions(
        durability=place.durability,
        client=f"AsyncSession and {driver}, publisher thread; HttpTransport",
        batch_messages=1,
        message_bytes=BODY_BYTES,
        note=f"{trial_count} cancelled transactions per round, of which "
        f"{min(map(len, rounds))} to {max(map(len, rounds))} were stored and are measured",
    )
    figures = [
        ("cancelled COMMIT → accepted, p50", 0.5, None),
        ("cancelled COMMIT → accepted, p99", 0.99, Goal(bound=250, is_floor=False)),
    ]
    return [
        Row(
            figure=f"{place.name}: {figure}",
            unit="ms",
            samples=tuple(percentile(times, share) for times in rounds),
            conditions=conditions,
            goal=goal,
        )
        for figure, share, goal in figures
    ]


def run_round(bench: Bench, place: Place, number: int, trial_count: int) -> list[float]:
    """Milliseconds of each message that was stored; broker and database are new."""
    answered_ns: dict[str, int] = {}

    def note(message_ids: Sequence[str]) -> None:
        answered_ns.update(dict.fromkeys(message_ids, time.monotonic_ns()))

    engine = place.open(f"cancelled_{number}")
    url = asynchronous(engine.url.render_as_string(hide_password=False))
    cancelled_ns: dict[str, int] = {}
    lot = random.Random(number)
    with bench.processes() as processes:
        broker = processes.start_broker()
        application = create_async_engine(url)
        with Producer(application, broker.url, options=ProducerOptions(on_sent=note)) as producer:
            for _ in range(TRIES_MAX):
                trials = run_trials(application, producer, trial_count, lot)
                cancelled_ns |= asyncio.run(trials)
                producer.flush(ANSWER_DEADLINE_S)
                if cancelled_ns.keys() & answered_ns.keys():
                    break
    check_stored(engine, len(answered_ns))
    stored = cancelled_ns.keys() & answered_ns.keys()
    return [(answered_ns[each] - cancelled_ns[each]) / 1e6 for each in stored]


async def run_trials(
    engine: AsyncEngine, producer: Producer, count: int, lot: random.Random
) -> dict[str, int]:
    """When each message's task was cancelled, on the monotonic clock."""
    messages = make_messages()
    cancelled = [await run_trial(engine, producer, messages, i, lot) for i in range(count)]
    await engine.dispose()
    return dict(cancelled)


async def run_trial(
    engine: AsyncEngine,
    producer: Producer,
    messages: Iterator[Message],
    number: int,
    lot: random.Random,
) -> tuple[str, int]:
    """One transaction, cancelled around its commit: its message, and when that was."""
    sent: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def work() -> None:
        async with AsyncSession(engine) as session:
            session.add(make_order(number))
            await session.flush()
            sent.set_result(await producer.send(next(messages), session=session))
            await session.commit()

    task = asyncio.ensure_future(work())
    await asyncio.wait((task, sent), return_when=asyncio.FIRST_COMPLETED)
    if not sent.done():
        await task  # it failed before there was anything to cancel
    message_id = sent.result()
    for _ in range(lot.randint(0, TURNS_MAX)):
        await asyncio.sleep(0)
    if number % 2:
        await asyncio.sleep(lot.random() * DELAY_S_MAX)
    task.cancel()
    cancelled_ns = time.monotonic_ns()
    with suppress(asyncio.CancelledError, sa.exc.DBAPIError):
        await task
    # What closes its connection is shielded, and goes on for a while.
    for other in asyncio.all_tasks() - {asyncio.current_task()}:
        with suppress(asyncio.CancelledError, sa.exc.DBAPIError):
            await other
    return message_id, cancelled_ns


def asynchronous(url: str) -> str:
    """The same database for an asynchronous engine."""
    from tests.services.databases import for_asyncio  # late: it needs the servers' drivers

    return for_asyncio(url)


def check_stored(engine: sa.Engine, arrived: int) -> None:
    """Exactly what was stored has arrived; else the figures would leave out the slowest."""
    with engine.connect() as connection:
        stored = connection.scalar(sa.select(sa.func.count()).select_from(Order))
    engine.dispose()
    if not arrived or stored != arrived:
        raise NothingToMeasureError(f"{stored} transactions were stored, {arrived} messages came")
