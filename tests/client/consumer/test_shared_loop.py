"""The event loop that all asynchronous handlers share, and handlers that would end it."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from qmq_client.consumer import consumer
from qmq_client.consumer.async_calls import AsyncCalls
from qmq_client.testing import drain
from tests.client.consumer.kit import GROUP, SUBJECT, WAIT_S, Bench
from tests.client.consumer.shop import make_engine
from tests.kit.waiting import wait_for
from tests.services.databases import Database


async def exiting() -> None:
    sys.exit(3)


async def stop_the_loop() -> None:
    asyncio.get_running_loop().stop()


async def close_the_loop() -> None:
    asyncio.get_running_loop().close()


async def cancel_everything() -> None:
    for task in asyncio.all_tasks():
        task.cancel()
    await asyncio.sleep(0)


async def leave_an_exit_behind() -> None:
    task = asyncio.create_task(exiting())
    await asyncio.wait([task])


@pytest.mark.parametrize(
    "deed",
    [stop_the_loop, close_the_loop, cancel_everything, leave_an_exit_behind],
    ids=lambda deed: deed.__name__,
)
def test_C6_C9_no_handler_ends_the_loop_that_it_shares_with_the_others(
    bench: Bench, deed: Callable[[], Awaitable[None]]
) -> None:
    handled: list[str] = []

    @consumer(SUBJECT, group=GROUP, max_attempts=1)
    async def handler(body: str) -> None:
        if body == "bad":
            await deed()
        handled.append(body)

    bench.put("bad", "good", "bad", "better")
    bench.drain(handler)
    assert [body for body in handled if body != "bad"] == ["good", "better"]
    assert bench.broker.lag(SUBJECT, GROUP) == 0
    assert bench.broker.in_flight(SUBJECT, GROUP) == 0


def test_C9_an_exit_in_a_task_that_the_handler_awaits_stops_the_consumers_in_order(
    bench: Bench,
) -> None:
    @consumer(SUBJECT, group=GROUP)
    async def handler(body: str) -> None:
        await asyncio.gather(asyncio.sleep(0), exiting())

    bench.put("one")
    with pytest.raises(SystemExit) as ended:
        bench.consumers(handler).run()
    assert ended.value.code == 3
    assert bench.broker.in_flight(SUBJECT, GROUP) == 0


def test_the_loop_of_consumers_that_nobody_stops_ends_when_nobody_has_them(bench: Bench) -> None:
    loops: list[threading.Thread] = []

    @consumer(SUBJECT, group=GROUP)
    async def handler(body: str) -> None:
        loops.append(threading.current_thread())

    bench.put("one", "two")
    consumers = bench.consumers(handler)
    drain(consumers)
    bench.put("three")
    drain(consumers)
    (loop,) = set(loops)
    assert loop.is_alive(), "what handlers share on it must last from one to the next"
    del consumers
    gc.collect()
    wait_for(lambda: not loop.is_alive())


async def let_go(has_let_go: threading.Event) -> None:
    for _ in range(100):  # as many steps as a ROLLBACK and a close take
        await asyncio.sleep(0)
    has_let_go.set()


@pytest.mark.parametrize("by_a_task", [False, True], ids=["itself", "by a task"])
def test_what_a_handler_left_running_is_cancelled_and_may_let_go_of_what_it_has(
    bench: Bench, by_a_task: bool
) -> None:
    has_let_go = threading.Event()
    left: list[asyncio.Task[None]] = []

    async def hold() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            if by_a_task:
                left.append(asyncio.create_task(let_go(has_let_go)))
            else:
                await let_go(has_let_go)

    @consumer(SUBJECT, group=GROUP)
    async def handler(body: str) -> None:
        left.append(asyncio.create_task(hold()))
        await asyncio.sleep(0)

    bench.put("one")
    consumers = bench.consumers(handler)
    drain(consumers)
    consumers._async_calls.stop(WAIT_S)
    assert has_let_go.is_set()


def test_C8_what_a_stop_has_cancelled_is_not_cancelled_again_while_it_lets_go() -> None:
    calls = AsyncCalls()
    begun, lets_go, goes_on, has_let_go = (threading.Event() for _ in range(4))

    async def hold() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            lets_go.set()
            goes_on.wait(WAIT_S)
            await let_go(has_let_go)

    def call() -> None:
        with suppress(CancelledError):
            calls.call(hold())

    worker = threading.Thread(target=call)
    worker.start()
    assert begun.wait(WAIT_S)
    calls.cancel()
    assert lets_go.wait(WAIT_S)
    calls.stop(0)
    goes_on.set()
    worker.join(WAIT_S)
    assert has_let_go.is_set()


def test_C8_what_was_called_right_before_a_stop_begins_and_hears_of_it() -> None:
    calls = AsyncCalls()
    is_held, goes_on, has_heard = (threading.Event() for _ in range(3))

    async def hold_up() -> None:
        is_held.set()
        goes_on.wait(WAIT_S)

    async def hear() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            has_heard.set()

    holder = threading.Thread(target=calls.call, args=[hold_up()])
    holder.start()
    assert is_held.wait(WAIT_S)
    assert calls._loop is not None
    heard = asyncio.run_coroutine_threadsafe(hear(), calls._loop)
    calls.cancel()
    goes_on.set()
    with pytest.raises(CancelledError):
        heard.result(WAIT_S)
    assert has_heard.is_set()
    holder.join(WAIT_S)
    calls.stop(WAIT_S)


def test_C8_behind_a_stop_nothing_begins_on_a_loop_of_its_own() -> None:
    calls = AsyncCalls()
    calls.call(asyncio.sleep(0))
    calls.cancel()
    calls.stop(WAIT_S)
    with pytest.raises(CancelledError):
        calls.call(asyncio.sleep(0))
    assert not calls.is_running


def test_C8_a_handler_that_will_not_be_cancelled_is_reported_once_and_leaves_no_thread_behind(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    begun = threading.Event()

    @consumer(SUBJECT, group=GROUP)
    async def handler(body: int) -> None:
        begun.set()
        while True:
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    before = set(threading.enumerate())
    bench.put(1)
    consumers = bench.consumers(handler)
    consumers.start()
    assert begun.wait(WAIT_S)
    assert consumers.stop(0).running == 1
    wait_for(lambda: set(threading.enumerate()) <= before)
    assert caplog.text.count("handler_unfinished") == 1


def test_C8_inboxes_on_a_loop_that_hangs_hold_up_a_stop_together_as_long_as_one(
    bench: Bench, sqlite_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_engine(sqlite_database.url).dispose()
    engine = create_async_engine(sqlite_database.async_url)
    begun, goes_on = threading.Event(), threading.Event()
    waited_s: list[float] = []

    async def hang(body: int) -> None:
        begun.set()
        goes_on.wait(WAIT_S)

    for group in ("one", "two", "three"):
        consumer(SUBJECT, group=group, inbox=engine)(hang)
    consumers = bench.consumers(hang)
    call = consumers._async_calls.call

    def timed_call(coroutine: Any, *, timeout_s: float | None = None) -> Any:
        if timeout_s is not None:
            waited_s.append(timeout_s)
        return call(coroutine, timeout_s=timeout_s)

    consumers.start()
    bench.put(1)
    assert begun.wait(WAIT_S)
    monkeypatch.setattr(consumers._async_calls, "call", timed_call)
    consumers.stop(0)
    goes_on.set()
    assert waited_s[1:] == [0, 0], "the first has waited for as long as all may"
