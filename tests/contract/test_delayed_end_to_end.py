"""Delayed messages from a transaction to a handler, over a real broker that is killed meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa

from qmq_client import Cancellation, Consumers, Message, Producer, ProducerOptions, consumer
from qmq_client.errors import TransportError
from qmq_client.outbox.table import create_tables
from tests.kit.broker_process import BrokerProcess

WAIT_S = 60.0
COUNT = 40


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path / "data") as process:
        yield process


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[sa.Engine]:
    engine = sa.create_engine(f"sqlite:///{tmp_path}/shop.db", connect_args={"timeout": 30})
    create_tables(engine)
    yield engine
    engine.dispose()


def test_D1_D3_messages_come_after_their_time_once_also_from_a_broker_that_is_killed(
    broker: BrokerProcess, engine: sa.Engine
) -> None:
    came: list[tuple[int, datetime, float]] = []
    done = threading.Event()

    @consumer("reminder", group="g")
    def handler(message: Message) -> None:
        assert message.deliver_at is not None
        came.append((message.body, message.deliver_at, time.time()))
        if len(came) >= COUNT:
            done.set()

    with Producer(engine, broker.url) as producer, engine.begin() as connection:
        start = datetime.now(UTC)
        for number in range(COUNT):
            moment = start + timedelta(milliseconds=300 + 60 * number)
            producer.send(Message("reminder", number, deliver_at=moment), session=connection)
        producer.send(Message("reminder", COUNT, delay=timedelta(days=700)), session=connection)
        connection.commit()
        assert producer.flush(WAIT_S)
    with Consumers([handler], broker.url):
        broker.kill()
        broker.start()
        assert done.wait(WAIT_S)
    assert sorted(body for body, _, _ in came) == list(range(COUNT))
    assert all(at_s * 1000 >= round(due.timestamp() * 1000) - 1 for _, due, at_s in came)


def test_D4_a_message_at_the_broker_is_taken_back_or_it_is_said_that_it_is_too_late(
    broker: BrokerProcess, engine: sa.Engine
) -> None:
    with Producer(engine, broker.url) as producer:
        far = producer.send_now(Message("reminder", "far", delay=3_600))
        near = producer.send_now(Message("reminder", "near"))
        assert producer.flush(WAIT_S)
        assert producer.cancel(far) is Cancellation.CANCELLED
        assert producer.cancel(far) is Cancellation.CANCELLED
        assert producer.cancel(near) is Cancellation.TOO_LATE
        assert producer.cancel("0" * 32) is Cancellation.UNKNOWN
        assert not producer.cancel(near)


def test_D4_a_message_that_is_still_in_the_outbox_is_taken_back_there(
    broker: BrokerProcess, engine: sa.Engine
) -> None:
    broker.kill()
    with Producer(engine, broker.url, options=ProducerOptions(background=False)) as producer:
        message_id = producer.send_now(Message("reminder", "one", delay=60))
        with engine.begin() as connection:
            connection.exec_driver_sql("UPDATE qmq_outbox SET due_at_ms = 0, token = NULL")
        with pytest.raises(TransportError):  # the broker might have it: nobody can say
            producer.cancel(message_id)
        with engine.begin() as connection:
            assert connection.exec_driver_sql("SELECT count(*) FROM qmq_outbox").scalar() == 0
        other_id = producer.send_now(Message("reminder", "two", delay=60))
        with engine.begin() as connection:
            connection.exec_driver_sql("UPDATE qmq_outbox SET due_at_ms = 0, token = NULL")
        broker.start()
        assert producer.cancel(other_id) is Cancellation.CANCELLED
        assert producer.cancel(message_id) is Cancellation.UNKNOWN
