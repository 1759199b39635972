"""Code in a step of a producer's own publisher, as a callback, that would wait for that publisher."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from qmq_client.errors import ConfigurationError
from qmq_client.message import Message
from qmq_client.options import ProducerOptions
from qmq_client.producer import Producer
from qmq_client.publishing.receipts import Receipt
from qmq_client.testing import MemoryTransport
from qmq_client.wire.requests import SendAnswer
from tests.client.publishing import publisher_threads
from tests.client.world import OUTBOX, SUBJECT, World, a_world
from tests.kit.waiting import wait_for

DEADLINE_S = 60.0


def producer_of(world: World, **options: Any) -> Producer:
    return Producer(world.engine, world.transport, options=ProducerOptions(**options))


def wait_by(way: str, producer: Producer, receipt: Receipt) -> object:
    if way == "flush":
        return producer.flush(deadline_s=DEADLINE_S)
    if way == "flush_async":
        return asyncio.run(producer.flush_async(deadline_s=DEADLINE_S))
    return receipt.wait(deadline_s=DEADLINE_S)


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("way", ["flush", "flush_async", "receipt"])
def test_S12_a_callback_that_would_wait_for_itself_is_refused_at_once(
    world: World, way: str, background: bool
) -> None:
    refusals: list[str] = []

    def on_sent(_: Any) -> None:
        if refusals:
            return
        with Session(producer.engine) as session, session.begin():
            message_id = producer.send(Message(SUBJECT, "b"), session=session)
            receipt = producer.receipt(message_id, session=session)
        try:
            wait_by(way, producer, receipt)
        except ConfigurationError as error:
            refusals.append(str(error))

    with producer_of(world, on_sent=on_sent, background=background) as producer:
        producer.send_now(Message(SUBJECT, "a"))
        assert producer.flush(deadline_s=DEADLINE_S)
        assert len(refusals) == 1
        assert "on_sent or on_failed of the same producer" in refusals[0]
    assert world.sent() == ["a", "b"]


@pytest.mark.parametrize("background", [True, False])
def test_S12_close_async_in_a_callback_returns_at_once(world: World, background: bool) -> None:
    def on_sent(_: Any) -> None:
        asyncio.run(producer.close_async(deadline_s=10 * DEADLINE_S))

    with producer_of(world, on_sent=on_sent, background=background) as producer:
        producer.send_now(Message(SUBJECT, "a"))
        assert producer.flush(deadline_s=DEADLINE_S) or background
    assert publisher_threads() == []


class HookedTransport(MemoryTransport):
    """Calls a function of the test once, in the middle of a step."""

    in_step: Callable[[], object] | None = None

    def send(self, frame: bytes) -> SendAnswer:
        in_step, self.in_step = self.in_step, None
        if in_step is not None:
            in_step()
        return super().send(frame)


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("way", ["flush", "flush_async", "receipt"])
def test_S12_what_runs_in_the_middle_of_a_step_and_would_wait_for_it_is_refused_at_once(
    world: World, way: str, background: bool
) -> None:
    """As an event of the database engine does."""
    transport = HookedTransport(world.memory.broker)
    options = ProducerOptions(background=background)
    refusals: list[str] = []
    with Producer(world.engine, transport, options=options) as producer:

        def in_step() -> None:
            with pytest.raises(ConfigurationError) as refused:
                wait_by(way, producer, receipt)
            refusals.append(str(refused.value))

        transport.in_step = in_step
        with Session(producer.engine) as session, session.begin():
            message_id = producer.send(Message(SUBJECT, "a"), session=session)
            receipt = producer.receipt(message_id, session=session)
        assert producer.flush(deadline_s=DEADLINE_S)
    assert len(refusals) == 1
    assert world.sent() == ["a"]


class Owner:
    """Closes its producer when it is collected, which may be in any thread at any moment."""

    def __init__(self, producer: Producer) -> None:
        self.producer = producer

    def __del__(self) -> None:
        self.producer.close(deadline_s=10 * DEADLINE_S)


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("background", [True, False])
def test_S12_a_finalizer_that_closes_in_the_middle_of_a_step_returns_at_once(
    world: World, background: bool
) -> None:
    transport = HookedTransport(world.memory.broker)
    options = ProducerOptions(background=background)
    producer = Producer(world.engine, transport, options=options)
    transport.in_step = lambda: Owner(producer)
    with Session(producer.engine) as session, session.begin():
        producer.send(Message(SUBJECT, "a"), session=session)
    producer.flush(deadline_s=DEADLINE_S)
    producer.close(deadline_s=DEADLINE_S)
    assert world.sent() == ["a"]
    assert publisher_threads() == []


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("call", ["flush", "close"])
def test_S12_who_flushes_or_closes_in_a_transaction_that_keeps_others_from_writing_waits_little(
    tmp_path: Path, call: str, background: bool
) -> None:
    """In SQLite its own transaction keeps the publisher from deleting what the broker has."""
    with a_world(tmp_path) as world:
        producer = producer_of(world, background=background)
        with Session(world.engine) as session, session.begin():
            producer.send(Message(SUBJECT, "a"), session=session)
        began_at_s = monotonic()
        with Session(world.engine) as session, session.begin():
            session.execute(sa.text(f"UPDATE {OUTBOX} SET attempts = attempts"))
            if call == "flush":
                assert producer.flush(deadline_s=DEADLINE_S)
            else:
                producer.close(deadline_s=DEADLINE_S)
        assert monotonic() - began_at_s < DEADLINE_S / 2
        assert world.sent() == ["a"]
        if call == "flush":
            assert producer.flush(deadline_s=DEADLINE_S)
            wait_for(lambda: not world.read(f"SELECT 1 FROM {OUTBOX}"), "it is not deleted")
            producer.close()
        assert publisher_threads() == []


@pytest.mark.parametrize("background", [True, False])
def test_what_was_refused_a_moment_ago_is_deleted_by_the_close(
    tmp_path: Path, background: bool
) -> None:
    with a_world(tmp_path) as world:
        producer = producer_of(world, background=background)
        with Session(world.engine) as session, session.begin():
            producer.send(Message(SUBJECT, "a"), session=session)
        with Session(world.engine) as other, other.begin():
            other.execute(sa.text(f"UPDATE {OUTBOX} SET attempts = attempts"))
            producer.flush(deadline_s=8)
        producer.close(deadline_s=10)
        assert world.read(f"SELECT count(*) FROM {OUTBOX}") == [(0,)]
