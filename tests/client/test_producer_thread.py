"""The producer with its thread: hands over while the application works, stops, survives a fork."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from qmq_client.errors import BrokerUnreachableError
from qmq_client.message import Message
from qmq_client.options import ProducerOptions
from qmq_client.producer import Producer
from qmq_client.testing import MemoryTransport
from qmq_client.wire.requests import SendAnswer
from tests.client.publishing import GatedTransport, publisher_threads
from tests.client.world import SUBJECT, Order, World, a_world
from tests.kit.waiting import wait_for

DEADLINE_S = 60.0


@contextmanager
def running(world: World, transport: Any = None, **options: Any) -> Iterator[Producer]:
    """A producer with a thread on the world's engine."""
    producer = Producer(
        world.engine,
        world.transport if transport is None else transport,
        options=ProducerOptions(**options),
    )
    try:
        yield producer
    finally:
        producer.close()
        assert publisher_threads() == []


def send(producer: Producer, body: str) -> str:
    with Session(producer.engine) as session, session.begin():
        return producer.send(Message(SUBJECT, body), session=session)


def test_messages_go_out_by_themselves(world: World) -> None:
    accepted = threading.Event()
    with running(world, on_sent=lambda _: accepted.set()) as producer:
        assert publisher_threads() == []  # a process that never sends has no thread
        send(producer, "a")
        assert accepted.wait(DEADLINE_S)
        assert world.sent() == ["a"]


def test_flush_waits_until_everything_is_accepted_and_deleted(world: World) -> None:
    with running(world, linger_ms=1_000, delete_delay_ms=60_000) as producer:
        for i in range(50):
            send(producer, f"{i}")
            if i % 10 == 0:
                assert producer.flush(DEADLINE_S)
                assert world.stored_ids() == set()
        assert producer.flush(DEADLINE_S)
        assert world.sent() == [f"{i}" for i in range(50)]
        assert producer.flush(0.0)


def test_flush_says_when_its_deadline_passes(world: World) -> None:
    transport = GatedTransport(world.broker)
    with running(world, transport) as producer:
        send(producer, "a")
        assert not producer.flush(0.05)
        transport.go_on.set()
        assert producer.flush(DEADLINE_S)


def test_S5_a_commit_does_not_wait_for_a_broker_that_hangs(world: World) -> None:
    transport = GatedTransport(world.broker)
    with running(world, transport) as producer:
        send(producer, "a")
        assert transport.arrived.wait(DEADLINE_S)
        for i in range(20):
            send(producer, f"{i}")
        assert len(world.stored_ids()) == 21
        transport.go_on.set()


def test_S10_many_threads_may_send_at_once(world: World) -> None:
    def work(name: int) -> None:
        for i in range(20):
            send(producer, f"{name}.{i}")

    with running(world) as producer:
        threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert producer.flush(DEADLINE_S)
    assert set(world.sent()) == {f"{name}.{i}" for name in range(4) for i in range(20)}
    assert world.stored_ids() == set()


def test_S12_close_sends_what_it_can(world: World) -> None:
    with running(world, linger_ms=1_000, delete_delay_ms=60_000) as producer:
        for i in range(30):
            send(producer, f"{i}")
        producer.close()
        producer.close()
        assert len(world.sent()) == 30
        assert world.stored_ids() == set()
        send(producer, "after the close")
        assert len(world.stored_ids()) == 1  # waits for the watchdog


def test_S12_close_ends_at_its_deadline_and_loses_nothing(world: World) -> None:
    transport = GatedTransport(world.broker)
    with running(world, transport) as producer:
        ids = {send(producer, "a")}
        assert transport.arrived.wait(DEADLINE_S)
        ids |= {send(producer, f"{i}") for i in range(3)}
        producer.close(0.1)
        assert transport.go_on.is_set(), "it ends the call that hangs, and waits for nobody"
        wait_for(lambda: publisher_threads() == [])
    assert world.sent() == []
    assert world.stored_ids() == ids


def test_S12_close_with_the_broker_away_loses_nothing(world: World) -> None:
    world.broker.faults.is_unreachable = True
    with running(world) as producer:
        ids = {send(producer, f"{i}") for i in range(5)}
        producer.close(5.0)
        assert world.stored_ids() == ids


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
def test_S12_an_error_in_a_callback_does_not_end_the_thread(
    world: World, error: type[BaseException]
) -> None:
    told: list[str] = []
    again = threading.Event()

    def fail(ids: Any) -> None:
        told.extend(ids)
        again.set() if len(told) > 1 else None
        raise error

    with running(world, on_sent=fail) as producer:
        send(producer, "a")
        assert not again.wait(0.0)
        send(producer, "b")
        assert again.wait(DEADLINE_S)
    assert sorted(world.sent()) == ["a", "b"]


def refuse(*_: object) -> None:
    raise RuntimeError("can't start new thread")


def test_S12_a_send_survives_that_no_thread_can_start_and_the_next_one_tries_again(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    threads = threading.enumerate()
    with running(world) as producer:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            send(producer, "a")
            send(producer, "b")
            assert not producer.flush(DEADLINE_S)
        assert caplog.text.count("no publisher thread") == 1
        assert set(threading.enumerate()) <= set(threads), "what could start nothing is gone"
        send(producer, "c")
        assert producer.flush(DEADLINE_S)
        assert world.sent() == ["a", "b", "c"]


def test_S12_close_sends_by_itself_when_no_thread_could_start(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with running(world) as producer:
            send(producer, "a")
            assert world.sent() == []
    assert (world.sent(), world.stored_ids()) == (["a"], set())


def test_a_producer_may_be_closed_from_its_own_callback(world: World) -> None:
    closed = threading.Event()
    box: list[Producer] = []

    def close(_: Any) -> None:
        box[0].close()
        closed.set()

    with running(world, on_sent=close) as producer:
        box.append(producer)
        send(producer, "a")
        assert closed.wait(DEADLINE_S)


def test_S10_a_forked_child_has_a_publisher_of_its_own(tmp_path: Path) -> None:
    with a_world(tmp_path) as world, running(world) as producer:
        send(producer, "parent before")
        assert producer.flush(DEADLINE_S)
        token = producer._publisher.token
        pool = world.engine.pool
        child = os.fork()
        if child == 0:
            os._exit(_in_child(world, producer, token, pool))
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        send(producer, "parent after")
        assert producer.flush(DEADLINE_S)
        assert world.sent() == ["parent before", "parent after"]
        assert producer._publisher.token == token
        assert world.stored_ids() == set()


def _in_child(world: World, producer: Producer, parents_token: bytes, parents_pool: sa.Pool) -> int:
    """The child's part; the broker in its memory is a copy."""
    try:
        assert producer._publisher.token != parents_token
        assert producer.stats.sent == 0
        assert world.engine.pool is not parents_pool
        send(producer, "child")
        assert producer.flush(DEADLINE_S)
        assert world.sent() == ["parent before", "child"]
        assert world.stored_ids() == set()
        producer.close()
    except BaseException as error:
        os.write(2, repr(error).encode())
        return 1
    return 0


def test_a_broker_that_vanishes_under_the_thread_is_left_alone(world: World) -> None:
    class Gone(MemoryTransport):
        def send(self, frame: bytes) -> SendAnswer:
            self.calls["send"] += 1
            raise BrokerUnreachableError("gone")

    transport = Gone(world.broker)
    with running(world, transport, breaker_first_ms=60_000, breaker_max_ms=60_000) as producer:
        for i in range(30):
            send(producer, f"{i}")
            assert producer.flush(DEADLINE_S).is_done
        assert transport.calls["send"] == 3
        assert producer.stats.left == 27


@pytest.mark.parametrize("background", [True, False])
def test_a_producer_is_a_context_manager(world: World, background: bool) -> None:
    options = ProducerOptions(background=background)
    with Producer(world.engine, world.transport, options=options) as producer:
        send(producer, "a")
    assert world.sent() == ["a"]
    assert publisher_threads() == []


def test_S12_what_is_sent_after_the_close_is_stored_and_told_as_left(world: World) -> None:
    producer = world.make_producer(background=True)
    producer.close()
    message_id = producer.send_now(Message(SUBJECT, "late"))
    flushed = producer.flush()
    assert (bool(flushed), flushed.is_done, flushed.accepted, flushed.left) == (False, True, 0, 1)
    assert world.stored_ids() == {message_id}


LAST_WORDS = """
import sys
import sqlalchemy as sa
from sqlalchemy.orm import Session
from qmq_client import Message, Producer

engine = sa.create_engine(sys.argv[1])
producer = Producer(engine, "http://127.0.0.1:1")

class Till:
    def __del__(self):
        with Session(engine) as session, session.begin():
            producer.send(Message("till.closed", "17"), session=session)

till = Till()
"""


def test_S12_a_first_send_while_the_interpreter_ends_is_stored_and_lets_it_end(
    world: World,
) -> None:
    command = [sys.executable, "-c", LAST_WORDS, world.url]
    subprocess.run(command, check=True, timeout=60)
    assert len(world.stored_ids()) == 1


def test_S12_producers_that_nobody_holds_send_what_they_have_and_end(world: World) -> None:
    def place(label: str) -> None:
        producer = Producer(world.engine, world.transport, options=ProducerOptions(linger_ms=0))
        send(producer, label)

    def place_and_keep(label: str) -> None:
        producer = Producer(world.engine, world.transport)
        session.execute(sa.insert(Order).values(label=label))
        producer.send(Message(SUBJECT, label), session=session)

    for number in range(20):
        place(f"{number:02}")
    with Session(world.engine) as session, session.begin():
        place_and_keep("20")
        gc.collect()
    gc.collect()
    wait_for(lambda: publisher_threads() == [], "their threads go on")
    assert sorted(world.sent()) == [f"{number:02}" for number in range(21)]
    assert world.stored_ids() == set()
