"""Handlers against a real broker process, also one that is killed under them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

from qmq_client import Consumers, Message, Reject, consumer, pull
from qmq_client.ids import MESSAGE_IDS
from qmq_client.message import message_to_record
from qmq_client.outbox.table import create_tables
from qmq_client.transport.http import HttpTransport
from qmq_client.wire.frame import build_message_frame
from qmq_client.wire.record import encode_record
from tests.kit.broker_process import BrokerProcess

WAIT_S = 60.0
#: A stop waits for a pull that waits at the broker.
WAIT_MS = 50


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path / "data") as process:
        yield process


def send(broker: BrokerProcess, *messages: Message) -> None:
    records: dict[str, list[bytes]] = {}
    for message in messages:
        record = message_to_record(message, new_id=MESSAGE_IDS.next_id(), now_ms=1)
        records.setdefault(message.subject, []).append(encode_record(record))
    with closing(HttpTransport(broker.url)) as transport:
        transport.send(build_message_frame(records))


def test_S9_bodies_keys_tags_and_headers_reach_the_handler_as_they_were_given(
    broker: BrokerProcess,
) -> None:
    given = [
        Message(
            "bytes", bytes(range(256)) * 50, key="k", tags=("a", "b"), headers={"x": "y\u20ac"}
        ),
        Message("bytes", "text \u2603"),
        Message("bytes", {"deep": [1, 2.5, None, {"a": "b"}]}),
    ]
    got: list[Message] = []
    done = threading.Event()

    @consumer("bytes", group="g", wait_ms=WAIT_MS)
    def handler(message: Message) -> None:
        got.append(message)
        if len(got) == len(given):
            done.set()

    send(broker, *given)
    with Consumers([handler], broker.url):
        assert done.wait(WAIT_S)
    assert [(m.body, m.key, m.tags, dict(m.headers)) for m in got] == [
        (m.body, m.key, m.tags, dict(m.headers)) for m in given
    ]


def test_C1_every_message_is_handled_and_acked_over_several_consumers(
    broker: BrokerProcess,
) -> None:
    count = 3_000
    handled: list[int] = []
    done = threading.Event()

    @consumer("many", group="g", concurrency=2, batch_size=50, wait_ms=WAIT_MS)
    def handler(bodies: list[int]) -> None:
        handled.extend(bodies)
        if len(handled) >= count:
            done.set()

    send(broker, *[Message("many", number) for number in range(count)])
    both = [Consumers([handler], broker.url) for _ in range(2)]
    for consumers in both:
        consumers.start()
    assert done.wait(WAIT_S)
    reports = [consumers.stop() for consumers in both]
    assert all(report.is_clean for report in reports)
    assert sorted(handled) == list(range(count))
    with pull(broker.url, subject="many", group="g", wait_s=0.2) as left:
        assert left == []


def test_C4_a_rejected_and_a_failing_message_end_as_dead_letters_and_the_rest_continues(
    broker: BrokerProcess,
) -> None:
    good: list[int] = []
    done = threading.Event()

    @consumer("mixed", group="g", max_attempts=1, wait_ms=WAIT_MS)
    def handler(body: int) -> None:
        if body == 1:
            raise Reject("one")
        if body == 2:
            raise ValueError("two")
        good.append(body)
        if body == 4:
            done.set()

    send(broker, *[Message("mixed", number) for number in range(5)])
    with Consumers([handler], broker.url):
        assert done.wait(WAIT_S)
    assert good == [0, 3, 4]


def test_C5_effects_happen_once_while_the_broker_is_killed_under_its_consumers(
    broker: BrokerProcess, tmp_path: Path
) -> None:
    count = 1_500
    engine = sa.create_engine(f"sqlite:///{tmp_path}/shop.db", connect_args={"timeout": 30})
    create_tables(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql("PRAGMA journal_mode = WAL")
        connection.exec_driver_sql("CREATE TABLE effect (number INTEGER NOT NULL)")
    half, done = threading.Event(), threading.Event()
    effects: list[int] = []

    @consumer("paid", group="g", inbox=sessionmaker(engine), batch_size=10, lease_ms=2_000)
    def handler(numbers: list[int], session: Session) -> None:
        values = [{"number": number} for number in numbers]
        session.execute(sa.text("INSERT INTO effect VALUES (:number)"), values)
        effects.extend(numbers)
        if len(effects) > count // 2:
            half.set()
        if len(set(effects)) == count:
            done.set()

    send(broker, *[Message("paid", number) for number in range(count)])
    with Consumers([handler], broker.url) as consumers:
        assert half.wait(WAIT_S)
        broker.kill()
        broker.start()
        assert done.wait(WAIT_S), numbers_of(consumers)
    with engine.connect() as connection:
        rows = connection.execute(sa.text("SELECT number FROM effect")).scalars().all()
    assert sorted(rows) == list(range(count))
    engine.dispose()


def numbers_of(consumers: Consumers) -> Any:
    return consumers.counters()
