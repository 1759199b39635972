"""A stop in a handler would wait for that handler: it is refused at once, with what to do."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from qmq_client.consumer import Consumers, consumer
from qmq_client.errors import ConfigurationError
from qmq_client.message import Message
from qmq_client.testing import MemoryBroker, MemoryTransport
from tests.client.consumer.kit import GROUP, SUBJECT, WAIT_S
from tests.kit.waiting import wait_for


@pytest.mark.parametrize("call", ["stop", "start", "exit"])
@pytest.mark.parametrize("kind", ["plain", "async", "to_thread", "on_stale"])
def test_C8_a_handler_that_would_wait_for_itself_is_refused_at_once(call: str, kind: str) -> None:
    calls: dict[str, Callable[[Consumers], object]] = {
        "stop": Consumers.stop,
        "start": Consumers.start,
        "exit": lambda one: one.__exit__(None, None, None),
    }
    broker = MemoryBroker()
    errors: list[ConfigurationError] = []

    def wait_for_itself(*_: object) -> None:
        with pytest.raises(ConfigurationError) as raised:
            calls[call](consumers)
        errors.append(raised.value)
        consumers.request_stop()

    @consumer(SUBJECT, group=GROUP, wait_ms=20)
    async def on_loop(body: int) -> None:
        if kind == "to_thread":
            await asyncio.to_thread(wait_for_itself)
        else:
            wait_for_itself()

    @consumer(
        SUBJECT,
        group=GROUP,
        wait_ms=20,
        lease_ms=100,
        lease_ms_max=100,
        on_stale=wait_for_itself,
    )
    def plain(body: int) -> None:
        if kind == "plain":
            wait_for_itself()
        elif not errors:
            wait_for(lambda: broker.in_flight(SUBJECT, GROUP) == 0)

    broker.put(Message(SUBJECT, 1))
    handler = on_loop if kind in {"async", "to_thread"} else plain
    consumers = Consumers([handler], MemoryTransport(broker))
    assert consumers.run().is_clean
    assert "request_stop" in errors[0].remedy


def test_C8_a_handler_may_have_another_thread_stop_its_consumers() -> None:
    broker, done = MemoryBroker(), threading.Event()
    stopping: list[threading.Thread] = []

    @consumer(SUBJECT, group=GROUP, wait_ms=20)
    def handler(body: int) -> None:
        stopping.append(threading.Thread(target=consumers.stop))
        stopping[0].start()
        done.set()

    broker.put(Message(SUBJECT, 1))
    consumers = Consumers([handler], MemoryTransport(broker))
    consumers.start()
    assert done.wait(WAIT_S)
    stopping[0].join(WAIT_S)
    assert consumers.stop().is_clean
    assert broker.lag(SUBJECT, GROUP) == 0
