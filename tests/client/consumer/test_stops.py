"""Stops that are interrupted, repeated or hurried: all threads end, and no message is lost."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable
from math import inf
from typing import Any

import pytest

from qmq_client import Consumers, Message, consumer
from qmq_client.consumer import runner
from qmq_client.signal_flag import SignalFlag
from qmq_client.testing import MemoryBroker, MemoryTransport
from tests.client.consumer.kit import GROUP, SUBJECT, WAIT_S


class Shop:
    """One message, and consumers that note when it was handled."""

    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.transport = MemoryTransport(self.broker)
        self.broker.put(Message(SUBJECT, "a"))
        self.handled = threading.Event()

        @consumer(SUBJECT, group=GROUP, wait_ms=10)
        def handler(body: str) -> None:
            self.handled.set()
            self.on_handled()

        self.consumers = Consumers(handler, self.transport)
        self.on_handled: Callable[[], object] = lambda: None


def in_time(work: Callable[[], Any]) -> Any:
    """What it returns; fails if it hangs."""
    returned: list[Any] = []
    thread = threading.Thread(target=lambda: returned.append(work()), daemon=True)
    thread.start()
    thread.join(WAIT_S)
    assert returned, "it hangs"
    return returned[0]


def test_C8_what_a_signal_handler_raises_while_a_run_waits_comes_out_after_the_stop() -> None:
    shop = Shop()

    class Interrupted(SignalFlag):
        def wait(self, timeout_s: float = inf) -> bool:
            assert shop.handled.wait(WAIT_S)
            raise KeyboardInterrupt

    shop.consumers._stop_requested = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        shop.consumers.run()
    assert not shop.consumers._threads.alive("pull", "work", "settle")
    assert shop.broker.lag(SUBJECT, GROUP) == 0


def test_C8_a_second_stop_with_less_time_hurries_the_first() -> None:
    shop = Shop()
    may_end = threading.Event()
    shop.on_handled = lambda: may_end.wait(WAIT_S)
    shop.consumers.start()
    assert shop.handled.wait(WAIT_S)
    first = threading.Thread(target=shop.consumers.stop, args=(2 * WAIT_S,))
    first.start()
    report = in_time(lambda: shop.consumers.stop(0.5))
    assert (report.is_clean, report.running) == (False, 1)
    first.join(WAIT_S)
    assert not first.is_alive()
    may_end.set()


def test_C8_an_async_handler_may_end_what_it_does_also_when_a_stop_is_hurried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its message would else come again only when its lease would have ended."""
    monkeypatch.setattr(runner, "_LAST_SHARE", 0.5)  # cancelled at once
    broker = MemoryBroker()
    broker.put(Message(SUBJECT, "a"))
    begun, is_cancelled, may_end = (threading.Event() for _ in range(3))
    running: list[int] = []

    @consumer(SUBJECT, group=GROUP, wait_ms=10)
    async def wait(body: str) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            is_cancelled.set()
            may_end.wait(WAIT_S)

    consumers = Consumers(wait, MemoryTransport(broker))
    (member,) = consumers.members
    monkeypatch.setattr(
        member, "let_go_of_all", lambda: running.append(len(member.prefetch.running()))
    )
    consumers.start()
    assert begun.wait(WAIT_S)
    first = threading.Thread(target=consumers.stop, args=(10 * WAIT_S,))
    first.start()
    assert is_cancelled.wait(WAIT_S)
    ending = threading.Timer(1.0, may_end.set)
    ending.start()
    assert consumers.stop(WAIT_S).is_clean
    assert running == [0]
    first.join(WAIT_S)
    ending.join(WAIT_S)


def test_C8_a_signal_handler_that_stops_in_the_middle_of_a_stop_completes_it() -> None:
    """As when a second SIGTERM comes: it would wait for the stop that it interrupted, forever."""
    shop = Shop()
    may_end = threading.Event()
    shop.on_handled = lambda: may_end.wait(WAIT_S)
    shop.consumers.start()
    assert shop.handled.wait(WAIT_S)
    reports: list[Any] = []

    def stop(_: int, __: object) -> None:
        may_end.set()
        reports.append(shop.consumers.stop(WAIT_S))

    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        reports.append(shop.consumers.stop(2 * WAIT_S))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert reports[0] is reports[1]
    assert reports[0].is_clean
    assert not shop.consumers._threads.alive("pull", "work", "settle")
    assert shop.broker.lag(SUBJECT, GROUP) == 0


def test_C8_a_stop_that_a_signal_handler_interrupts_is_continued_by_the_next_one() -> None:
    shop = Shop()
    may_end = threading.Event()
    shop.on_handled = lambda: may_end.wait(WAIT_S)
    shop.consumers.start()
    assert shop.handled.wait(WAIT_S)

    def interrupt(_: int, __: object) -> None:
        may_end.set()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            shop.consumers.stop(2 * WAIT_S)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert in_time(lambda: shop.consumers.stop(WAIT_S)).is_clean
    assert not shop.consumers._threads.alive("pull", "work", "settle")
    assert shop.broker.lag(SUBJECT, GROUP) == 0
