"""Tags, order, broadcast, at most once, starts and waits as a handler meets them, at a broker."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from qmq_client import Message, Retry, consumer
from qmq_client.consumer import Consumers
from qmq_client.consumer.member import Member
from qmq_client.ids import MESSAGE_IDS
from qmq_client.message import message_to_record
from qmq_client.retry import Backoff
from qmq_client.testing import MemoryBroker, MemoryTransport
from qmq_client.transport.http import HttpTransport
from qmq_client.transport.port import Transport
from qmq_client.wire.frame import build_message_frame
from qmq_client.wire.record import encode_record
from tests.client.consumer.kit import GROUP, WAIT_S
from tests.kit.broker_process import BrokerProcess
from tests.kit.waiting import wait_for

MakeTransport = Callable[[], Transport]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path_factory.mktemp("broker") / "data") as running:
        yield running


@pytest.fixture(params=["memory", "broker"])
def connect(request: pytest.FixtureRequest) -> Iterator[MakeTransport]:
    """Makes transports to one broker, in memory or of its own process."""
    if request.param == "memory":
        memory = MemoryBroker()
        yield lambda: MemoryTransport(memory)
        return
    broker: BrokerProcess = request.getfixturevalue("broker")
    made: list[HttpTransport] = []

    def make() -> Transport:
        made.append(HttpTransport(broker.url))
        return made[-1]

    yield make
    for transport in made:
        transport.close()


@pytest.fixture
def subject(request: pytest.FixtureRequest) -> str:
    """A subject of the test's own."""
    return re.sub(r"[^a-z0-9_]", "_", str(request.node.name).lower())[-100:]


def put(connect: MakeTransport, *messages: Message) -> None:
    transport = connect()
    records = [
        encode_record(message_to_record(one, new_id=MESSAGE_IDS.next_id(), now_ms=1))
        for one in messages
    ]
    transport.send(build_message_frame({messages[0].subject: records}))


class Seen:
    """What handlers were given."""

    def __init__(self) -> None:
        self.bodies: list[Any] = []
        self._arrived = threading.Semaphore(0)

    def note(self, body: Any) -> None:
        self.bodies.append(body)
        self._arrived.release()

    def wait(self, count: int) -> None:
        for _ in range(count):
            assert self._arrived.acquire(timeout=WAIT_S), self.bodies


def test_a_handler_gets_the_messages_whose_tags_it_asks_for(
    connect: MakeTransport, subject: str
) -> None:
    seen = Seen()

    @consumer(subject, group=GROUP, tags=("paid", "packed"), all_tags=("eu",), wait_ms=100)
    def handler(body: int) -> None:
        seen.note(body)

    tags = [("paid", "eu"), ("paid",), ("eu",), ("packed", "eu", "b2b"), ()]
    put(connect, *[Message(subject, n, tags=each) for n, each in enumerate(tags)])
    with Consumers(handler, connect()):
        seen.wait(2)
        put(connect, Message(subject, 9, tags=("eu", "paid")))
        seen.wait(1)
    assert seen.bodies == [0, 3, 9]


def test_another_filter_than_the_groups_is_refused_and_told(
    connect: MakeTransport, subject: str, caplog: pytest.LogCaptureFixture
) -> None:
    transport = connect()
    for tags in ("paid", "packed"):
        handler = consumer(subject, group=GROUP, tags=tags)(lambda body: None)
        member = Consumers(handler, transport).members[0]
        done = member.pull_once(is_blocking=False)
    assert done.has_failed
    assert "group_conflict" in caplog.text


@pytest.mark.parametrize("kind", [True, "named"])
def test_C10_of_two_live_consumers_of_one_name_the_later_gets_all_and_the_earlier_learns_it(
    connect: MakeTransport, subject: str, caplog: pytest.LogCaptureFixture, kind: Any
) -> None:
    first, second = Seen(), Seen()

    def member(seen: Seen) -> Member:
        @consumer(subject, group=GROUP, broadcast=kind, wait_ms=100)
        def handler(body: int) -> None:
            seen.note(body)

        return Consumers(handler, connect(), consumer_id="shop").members[0]

    earlier, later = member(first), member(second)
    assert not earlier.pull_once(is_blocking=False).has_failed
    put(connect, *[Message(subject, n) for n in range(3)])
    while len(second.bodies) < 3:
        assert not later.pull_once().has_failed
        while later.work_once(is_blocking=False).count:
            later.settle_once()
        assert earlier.pull_once(is_blocking=False).has_failed
    assert second.bodies == [0, 1, 2]
    assert first.bodies == []
    assert "pull_failed" in caplog.text
    assert "consumer_replaced" in caplog.text


def test_C7_of_messages_with_one_key_the_next_begins_when_the_one_before_is_done(
    connect: MakeTransport, subject: str
) -> None:
    seen, running, order = Seen(), set[str](), list[tuple[str, int]]()
    lock = threading.Lock()

    @consumer(
        subject,
        group=GROUP,
        ordered=True,
        concurrency=4,
        wait_ms=100,
        backoff=Backoff(first_ms=10, max_ms=10),
    )
    def handler(message: Message) -> None:
        key, number = message.key or "", int(message.body)
        with lock:
            assert key not in running, "two of one key at the same time"
            running.add(key)
        try:
            if number == 1 and (key, -1) not in order:
                order.append((key, -1))
                raise Retry(after=0.05)
            order.append((key, number))
            seen.note((key, number))
        finally:
            running.discard(key)

    keys = ["a", "b", "c"]
    put(connect, *[Message(subject, number, key=key) for number in range(5) for key in keys])
    with Consumers(handler, connect()):
        seen.wait(15)
    for key in keys:
        assert [number for each, number in seen.bodies if each == key] == [0, 1, 2, 3, 4]


def test_C10_every_consumer_of_a_broadcast_gets_every_message(
    connect: MakeTransport, subject: str
) -> None:
    seen = Seen()

    @consumer(subject, group=GROUP, broadcast=True, wait_ms=100)
    def handler(body: int) -> None:
        seen.note(body)

    put(connect, *[Message(subject, number) for number in range(3)])
    with Consumers(handler, connect()), Consumers(handler, connect()):
        seen.wait(6)
    assert sorted(seen.bodies) == [0, 0, 1, 1, 2, 2]


def test_C10_a_named_consumer_of_a_broadcast_continues_where_it_was(
    connect: MakeTransport, subject: str
) -> None:
    seen = Seen()

    @consumer(subject, group=GROUP, broadcast="named", wait_ms=100)
    def handler(body: int) -> None:
        seen.note(body)

    put(connect, Message(subject, 1))
    with Consumers(handler, connect(), consumer_id="shop-1"):
        seen.wait(1)
    put(connect, Message(subject, 2))
    with Consumers(handler, connect(), consumer_id="shop-1"):
        seen.wait(1)
    assert seen.bodies == [1, 2]


def test_what_comes_at_most_once_does_not_come_again_when_its_handler_fails(
    connect: MakeTransport, subject: str
) -> None:
    seen = Seen()

    @consumer(subject, group=GROUP, at_most_once=True, wait_ms=100, lease_ms=100)
    def handler(body: int) -> None:
        seen.note(body)
        if body == 0:
            raise ValueError("and gone")

    put(connect, *[Message(subject, number) for number in range(3)])
    consumers = Consumers(handler, connect())
    with consumers:
        seen.wait(3)
        wait_for(lambda: consumers.counters()[f"{subject}/{GROUP}"]["acked"] == 2)
    with Consumers(handler, connect()):
        put(connect, Message(subject, 3))
        seen.wait(1)
    assert seen.bodies == [0, 1, 2, 3]
    counted = consumers.counters()[f"{subject}/{GROUP}"]
    assert (counted["acked"], counted["dropped"], counted["nacked"]) == (2, 1, 0)


@pytest.mark.parametrize("start", [2, "sequence:2"], ids=["number", "text"])
def test_a_new_group_begins_at_the_sequence_it_asks_for(
    connect: MakeTransport, subject: str, start: Any
) -> None:
    seen = Seen()

    @consumer(subject, group=GROUP, start=start, wait_ms=100)
    def handler(body: int) -> None:
        seen.note(body)

    put(connect, *[Message(subject, number) for number in range(4)])
    with Consumers(handler, connect()):
        seen.wait(2)
    assert seen.bodies == [2, 3]


def test_the_waits_of_a_group_are_those_it_asks_for(connect: MakeTransport, subject: str) -> None:
    seen = Seen()

    @consumer(
        subject, group=GROUP, backoff=Backoff(first_ms=1, max_ms=1), max_attempts=20, wait_ms=100
    )
    def handler(body: int) -> None:
        seen.note(body)
        raise ValueError("again")

    put(connect, Message(subject, 1))
    with Consumers(handler, connect()):
        seen.wait(20)  # by the broker's own waits this takes hours
