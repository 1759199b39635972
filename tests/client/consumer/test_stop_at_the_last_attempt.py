"""A stop says nothing about messages: even those in their last attempt come again (C4, C8)."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

from qmq_client.consumer import Consumers, Delivery, consumer
from qmq_client.errors import BrokerUnreachableError
from qmq_client.retry import Reject
from qmq_client.wire.requests import PullRequest
from tests.client.consumer.kit import GROUP, SUBJECT, WAIT_S, Bench

LEASE_MS = 30_000
SHORT_S = 1.0


def attempts_now(bench: Bench) -> list[int]:
    """Of what another consumer of the group is given at this moment."""
    answer = bench.broker.pull(PullRequest(subject=SUBJECT, group=GROUP, consumer="other"))
    return [one.attempt for one in answer.messages]


def stop_in_the_middle(bench: Bench, handler: Any, begun: threading.Event) -> Consumers:
    bench.put(1)
    consumers = bench.consumers(handler)
    consumers.start()
    assert begun.wait(WAIT_S)
    consumers.stop(SHORT_S)
    return consumers


async def raise_again(error: asyncio.CancelledError) -> None:
    raise error


async def fail_to_clean_up(error: asyncio.CancelledError) -> None:
    raise RuntimeError("the connection was closed") from error


@pytest.mark.parametrize("on_cancel", [raise_again, fail_to_clean_up])
def test_C4_C8_an_async_handler_that_a_stop_cancels_has_its_message_come_again_at_once(
    bench: Bench, caplog: pytest.LogCaptureFixture, on_cancel: Callable[..., Any]
) -> None:
    caplog.set_level(logging.INFO)
    begun = threading.Event()

    @consumer(SUBJECT, group=GROUP, max_attempts=1)
    async def handler(body: int) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError as error:
            await on_cancel(error)

    stop_in_the_middle(bench, handler, begun)
    assert bench.broker.dead_letters(SUBJECT, GROUP) == []
    assert attempts_now(bench) == [1]
    assert "handler_unfinished consumer=orders/audit messages=1" in caplog.text
    assert "handler_failed" not in caplog.text
    assert "dead_letter" not in caplog.text


def test_C8_what_a_handler_says_of_its_message_while_it_is_cancelled_counts(bench: Bench) -> None:
    begun = threading.Event()

    @consumer(SUBJECT, group=GROUP)
    async def handler(body: int) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError as error:
            raise Reject("half done") from error

    stop_in_the_middle(bench, handler, begun)
    (dead,) = bench.broker.dead_letters(SUBJECT, GROUP)
    assert dead.error == "half done"


def test_C4_C8_a_plain_handler_that_outlives_a_stop_has_its_message_come_again_after_the_lease(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    begun, may_end = threading.Event(), threading.Event()

    @consumer(SUBJECT, group=GROUP, max_attempts=1, lease_ms=LEASE_MS)
    def handler(body: int) -> None:
        begun.set()
        may_end.wait(WAIT_S)

    consumers = stop_in_the_middle(bench, handler, begun)
    assert "handler_unfinished consumer=orders/audit messages=1" in caplog.text
    assert attempts_now(bench) == [], "the handler may still be at it"
    bench.clock.advance(LEASE_MS)
    assert attempts_now(bench) == [1]
    assert bench.broker.dead_letters(SUBJECT, GROUP) == []
    may_end.set()
    for thread in consumers._threads.all():
        thread.join(WAIT_S)


def test_C4_C8_what_nobody_has_settled_by_hand_comes_again_after_the_lease(bench: Bench) -> None:
    begun = threading.Event()
    kept: list[Delivery] = []

    @consumer(SUBJECT, group=GROUP, max_attempts=1, lease_ms=LEASE_MS, auto_ack=False)
    def handler(delivery: Delivery) -> None:
        kept.append(delivery)
        begun.set()

    stop_in_the_middle(bench, handler, begun)
    assert not kept[0].ack(), "after the stop it would reach nobody"
    assert attempts_now(bench) == []
    bench.clock.advance(LEASE_MS)
    assert attempts_now(bench) == [1]
    assert bench.broker.dead_letters(SUBJECT, GROUP) == []


def test_what_comes_at_most_once_stays_done_when_a_stop_leaves_its_handler_running(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    begun, may_end = threading.Event(), threading.Event()

    @consumer(SUBJECT, group=GROUP, at_most_once=True)
    def handler(body: int) -> None:
        begun.set()
        may_end.wait(WAIT_S)

    consumers = stop_in_the_middle(bench, handler, begun)
    may_end.set()
    for thread in consumers._threads.all():
        thread.join(WAIT_S)
    assert "messages_dropped" not in caplog.text
    assert bench.counters(consumers) == {"pulled": 1, "acked": 1}


def test_C4_C8_where_the_broker_hears_of_no_stop_the_lease_of_a_last_attempt_ends_as_before(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()

    def unreachable(_: object) -> Any:
        raise BrokerUnreachableError("nobody listens there")

    @consumer(SUBJECT, group=GROUP, max_attempts=1, lease_ms=LEASE_MS)
    async def handler(body: int) -> None:
        begun.set()
        monkeypatch.setattr(bench.transport, "settle", unreachable)
        monkeypatch.setattr(bench.transport, "pull", unreachable)
        await asyncio.Event().wait()

    stop_in_the_middle(bench, handler, begun)
    assert bench.broker.dead_letters(SUBJECT, GROUP) == []
    bench.clock.advance(LEASE_MS)
    wanted = PullRequest(subject=SUBJECT, group=GROUP, consumer="other", max_attempts=1)
    assert bench.broker.pull(wanted).messages == ()
    (dead,) = bench.broker.dead_letters(SUBJECT, GROUP)
    assert dead.attempts == 1
