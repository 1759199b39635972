"""Consumers whose start, run or stop is interrupted at each place where Python runs signal handlers.

What a handler raises comes out in the middle of whatever the main thread does. Afterwards a stop ends
all threads, and the messages were handled or come again.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any, Final

import pytest

import qmq_client
from qmq_client import Consumers, Message, consumer, pull
from qmq_client.consumer import runner
from qmq_client.consumer.uninterrupted import Uninterrupted
from qmq_client.signal_flag import SignalFlag
from qmq_client.testing import MemoryBroker, MemoryTransport
from tests.client.consumer.kit import GROUP, SUBJECT, WAIT_S
from tests.kit.interrupting import Interruption, at_each_look

PLACES: Final = ("consumer", "signal_flag.py", "thread_start.py")
WITHIN: Final = (
    *(str(Path(qmq_client.__file__).with_name(name)) for name in PLACES),
    threading.__file__,
)


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

    def check_stopped(self, place: str) -> None:
        """No thread is left, and the message is settled if it was handled."""
        assert in_time(lambda: self.consumers.stop(WAIT_S)).is_clean, place
        assert not self.consumers._threads.alive("pull", "work", "settle"), place
        if self.handled.is_set():
            assert self.broker.lag(SUBJECT, GROUP) == 0, place


def in_time(work: Callable[[], Any]) -> Any:
    """What it returns; fails if it hangs."""
    returned: list[Any] = []
    thread = threading.Thread(target=lambda: returned.append(work()), daemon=True)
    thread.start()
    thread.join(WAIT_S)
    assert returned, "it hangs"
    return returned[0]


def fail() -> None:
    raise KeyboardInterrupt


def interrupted(interruption: Interruption, work: Callable[[], object]) -> None:
    """Do this much of the work; fails if it hangs."""

    def attempt() -> bool:
        with suppress(KeyboardInterrupt):
            interruption.around(work)
        return True

    in_time(attempt)


def test_C8_a_signal_that_raises_in_a_start_leaves_consumers_that_can_be_stopped() -> None:
    for interruption in at_each_look(fail, within=WITHIN):
        shop = Shop()
        interrupted(interruption, shop.consumers.start)
        shop.check_stopped(interruption.place)
    assert interruption.at > 5


@pytest.mark.parametrize("raises", [True, False])
def test_C8_a_stop_that_is_interrupted_can_be_repeated_and_loses_nothing(raises: bool) -> None:
    def stop() -> None:
        assert shop.consumers.stop().is_clean

    for interruption in at_each_look(fail if raises else stop, within=WITHIN):
        shop = Shop()
        shop.consumers.start()
        assert shop.handled.wait(WAIT_S)
        interrupted(interruption, shop.consumers.stop)
        shop.check_stopped(interruption.place)
    assert interruption.at > 5


def test_C8_a_signal_that_raises_in_a_run_leaves_consumers_that_can_be_stopped() -> None:
    for interruption in at_each_look(fail, within=WITHIN):
        shop = Shop()
        shop.on_handled = shop.consumers.request_stop
        interrupted(interruption, shop.consumers.run)
        shop.check_stopped(interruption.place)
    assert interruption.at > 10


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


def test_a_signal_that_raises_in_a_pull_leaves_nothing_locked_and_loses_nothing() -> None:
    def work() -> None:
        with pull(broker, subject=SUBJECT, group=GROUP) as deliveries:
            for delivery in deliveries:
                delivery.ack()
                acked.append(delivery)

    for interruption in at_each_look(fail, within=WITHIN):
        broker = MemoryTransport(MemoryBroker())
        broker.broker.put(Message(SUBJECT, "a"))
        acked: list[Any] = []
        interrupted(interruption, work)
        if acked and not interruption.place:
            assert broker.broker.lag(SUBJECT, GROUP) == 0
    assert interruption.at > 20


def test_uninterrupted_work_is_done_once_and_all_hear_of_it() -> None:
    done: list[str] = []

    def work() -> None:
        done.append(threading.current_thread().name)
        raise ValueError("of the work")

    once = Uninterrupted(work)
    for _ in range(2):
        with pytest.raises(ValueError, match="of the work"):
            once.result()
    assert done == ["qmq-uninterrupted"], "a thread that ends is not listed any more"


def test_work_is_done_here_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr("_thread.start_new_thread", refuse)
    assert Uninterrupted(threading.get_ident).result() == threading.get_ident()
