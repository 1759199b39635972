"""A batch with an inbox whose messages do not all end alike: one transaction, and no effect twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from msgspec.structs import replace
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from qmq_client.consumer import Consumers, Delivery, consumer
from qmq_client.testing import drain
from tests.client.consumer.kit import GROUP, SUBJECT, Bench
from tests.client.consumer.shop import count_of, rows_in_inbox
from tests.services.databases import Database

ADD = sa.text("UPDATE tally SET n = n + :n")
Decide = Callable[[Delivery], bool]


def batches(
    database: Database, engine: sa.Engine, decide: Decide, *, is_async: bool
) -> tuple[Any, list[list[int]]]:
    """A handler that adds each body whose delivery `decide` lets pass; what it was called with."""
    seen: list[list[int]] = []

    def chosen(deliveries: list[Delivery]) -> list[int]:
        seen.append([one.message.body for one in deliveries])
        return [one.message.body for one in deliveries if decide(one)]

    def plain(deliveries: list[Delivery], session: Session) -> None:
        for body in chosen(deliveries):
            session.execute(ADD, {"n": body})

    async def on_loop(deliveries: list[Delivery], session: AsyncSession) -> None:
        for body in chosen(deliveries):
            await session.execute(ADD, {"n": body})

    settings: dict[str, Any] = {"group": GROUP, "batch_size": 10}
    if not is_async:
        return consumer(SUBJECT, inbox=sessionmaker(engine), **settings)(plain), seen
    maker = async_sessionmaker(create_async_engine(database.async_url))
    return consumer(SUBJECT, inbox=maker, **settings)(on_loop), seen


def rounds(bench: Bench, handler: Any, count: int) -> Consumers:
    consumers = bench.consumers(handler)
    for _ in range(count):
        drain(consumers)
        bench.clock.advance(5_000)
    consumers.stop()
    return consumers


@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
def test_C5_what_a_batch_gives_back_has_its_effect_at_the_next_delivery_and_once(
    bench: Bench, a_database: Database, engine: sa.Engine, is_async: bool
) -> None:
    def decide(delivery: Delivery) -> bool:
        body = delivery.message.body
        if body == 10 and delivery.attempt == 1:
            assert delivery.nack(after=1, error="later")
            assert not delivery.ack(), "the first outcome counts"
            return False
        if body == 100:
            assert delivery.reject("never")
            return False
        return True

    handler, seen = batches(a_database, engine, decide, is_async=is_async)
    ids = bench.put(1, 10, 100, 1000)
    counted = bench.counters(rounds(bench, handler, 3))
    assert seen == [[1, 10, 100, 1000], [10]]
    assert count_of(engine) == 1011
    assert bench.broker.lag(SUBJECT, GROUP) == 0
    (dead,) = bench.broker.dead_letters(SUBJECT, GROUP)
    assert (dead.sequence, dead.error) == (2, "never")
    assert {message_id.hex() for _, message_id in rows_in_inbox(engine)} == {ids[0], ids[1], ids[3]}
    assert (counted["acked"], counted["nacked"], counted["rejected"]) == (3, 1, 1)
    assert "duplicates" not in counted


@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
def test_C5_what_a_batch_decided_is_undone_when_it_fails(
    bench: Bench, a_database: Database, engine: sa.Engine, is_async: bool
) -> None:
    def decide(delivery: Delivery) -> bool:
        if delivery.attempt == 1:
            delivery.reject("too early")
            if delivery.message.body == 10:
                raise ValueError("all of it is undone")
        return True

    handler, seen = batches(a_database, engine, decide, is_async=is_async)
    bench.put(1, 10)
    rounds(bench, handler, 3)
    assert seen == [[1, 10], [1], [10]]
    assert count_of(engine) == 11
    assert bench.broker.dead_letters(SUBJECT, GROUP) == []


def test_an_outcome_after_the_handler_returned_is_too_late(
    bench: Bench, a_database: Database, engine: sa.Engine
) -> None:
    kept: list[Delivery] = []

    def decide(delivery: Delivery) -> bool:
        kept.append(delivery)
        return True

    handler, _ = batches(a_database, engine, decide, is_async=False)
    bench.put(1)
    rounds(bench, handler, 1)
    assert not kept[0].nack()
    assert bench.broker.lag(SUBJECT, GROUP) == 0


def test_C1_a_message_that_is_twice_in_a_batch_and_given_back_is_acked_by_neither(
    bench: Bench, a_database: Database, engine: sa.Engine
) -> None:
    """A broker that forgot its last hand-out in a power cut gives the message to the same consumer anew."""
    handler, _ = batches(a_database, engine, lambda one: not one.nack(), is_async=False)
    member = bench.consumers(handler).members[0]
    bench.put(10)
    member.pull_once(is_blocking=False)
    running = member.prefetch.take(is_blocking=False)
    assert running is not None
    (first,) = running.received
    running.received = [first, replace(first, pull_sequence=first.pull_sequence + 1)]
    member._work.run_slice(running)
    (settlement,) = member.ledger.drain().settlements
    assert settlement.acks == ()
