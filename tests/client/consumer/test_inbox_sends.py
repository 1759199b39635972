"""What a handler sends through a producer of its database belongs to the inbox's transaction."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

from qmq_client import Message, Producer, consumer, current_session
from qmq_client.testing import drain
from tests.client.consumer.kit import GROUP, SUBJECT, WAIT_S, Bench
from tests.client.consumer.shop import count_of


@pytest.fixture
def producer(bench: Bench, engine: sa.Engine) -> Iterator[Producer]:
    with Producer(engine, bench.transport) as made:
        yield made


@pytest.mark.parametrize("is_named", [True, False])
def test_C5_what_a_handler_sends_is_sent_once_with_its_effect(
    bench: Bench, engine: sa.Engine, producer: Producer, is_named: bool
) -> None:
    @consumer(SUBJECT, group=GROUP, inbox=sessionmaker(engine))
    def handler(body: Any, session: Session) -> None:
        assert current_session() is session
        session.execute(sa.text("UPDATE tally SET n = n + 1"))
        producer.send(Message("replies", body), session=session if is_named else None)

    bench.put(1, 2)
    bench.drain(handler)
    assert producer.flush(WAIT_S)
    assert [one.body for one in bench.broker.messages("replies")] == [1, 2]
    assert count_of(engine) == 2


def test_C5_what_a_failed_attempt_sent_is_never_seen(
    bench: Bench, engine: sa.Engine, producer: Producer
) -> None:
    calls: list[int] = []

    @consumer(SUBJECT, group=GROUP, inbox=sessionmaker(engine))
    def handler(body: Any, session: Session) -> None:
        calls.append(1)
        producer.send(Message("replies", f"attempt {len(calls)}"))
        session.flush()
        if len(calls) == 1:
            raise ValueError("no")

    bench.put(1)
    consumers = bench.consumers(handler)
    drain(consumers)
    bench.clock.advance(1_000)
    drain(consumers)
    assert producer.flush(WAIT_S)
    assert [one.body for one in bench.broker.messages("replies")] == ["attempt 2"]


def test_C5_a_duplicate_sends_nothing_again(
    bench: Bench, engine: sa.Engine, producer: Producer
) -> None:
    @consumer(SUBJECT, group=GROUP, inbox=sessionmaker(engine))
    def handler(body: Any) -> None:
        producer.send(Message("replies", body))

    bench.put(1)
    lost = bench.consumers(handler)
    lost.members[0].pull_once(is_blocking=False)
    lost.members[0].work_once(is_blocking=False)
    bench.clock.advance(60_000)
    again = bench.consumers(handler)
    for _ in range(2):
        drain(again)
        bench.clock.advance(60_000)
    assert producer.flush(WAIT_S)
    assert len(bench.broker.messages("replies")) == 1


def test_an_async_handler_sends_in_its_inboxs_transaction(
    bench: Bench, engine: sa.Engine, producer: Producer
) -> None:
    @consumer(SUBJECT, group=GROUP, inbox=sessionmaker(engine))
    async def handler(body: Any, session: Session) -> None:
        producer.send(Message("replies", body))

    bench.put(1)
    bench.drain(handler)
    assert producer.flush(WAIT_S)
    assert [one.body for one in bench.broker.messages("replies")] == [1]
