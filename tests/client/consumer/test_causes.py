"""The error behind an outcome: kept in the history and in the dead letter, and logged."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import pytest

from qmq_client.consumer import consumer
from qmq_client.consumer.error_texts import ERROR_CHARACTERS_MAX, error_text
from qmq_client.retry import Reject, Retry
from tests.client.consumer.kit import GROUP, SUBJECT, Bench

BUSY = "ConnectionError: 421 too many connections"


def call() -> None:
    raise ConnectionError("421 too many connections")


def retry_from() -> None:
    try:
        call()
    except ConnectionError as error:
        raise Retry(after=0.1) from error


def retry_while_handling() -> None:
    try:
        call()
    except ConnectionError:
        raise Retry  # noqa: B904  # what is meant here


def retry_from_none() -> None:
    try:
        call()
    except ConnectionError:
        raise Retry(after=0.1) from None


def reject_from() -> None:
    try:
        call()
    except ConnectionError as error:
        raise Reject("no such order") from error


def reject_of_the_error() -> None:
    try:
        call()
    except ConnectionError as error:
        raise Reject(error) from error


def error_from() -> None:
    try:
        call()
    except ConnectionError as error:
        raise RuntimeError("not mailed") from error


def several() -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.to_thread(call))

    asyncio.run(main())


@pytest.mark.parametrize(
    ("handle", "text"),
    [
        (retry_from, f"Retry: again after 0.1; caused by {BUSY}"),
        (retry_while_handling, f"Retry: again by the backoff; caused by {BUSY}"),
        (retry_from_none, "Retry: again after 0.1"),
        (reject_from, f"no such order; caused by {BUSY}"),
        (reject_of_the_error, BUSY),
        (error_from, f"RuntimeError: not mailed; caused by {BUSY}"),
        (
            several,
            f"ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception); caused by {BUSY}",
        ),
    ],
)
def test_W8_the_cause_is_kept_in_the_dead_letter_and_its_history(
    bench: Bench, handle: Callable[[], None], text: str
) -> None:
    @consumer(SUBJECT, group=GROUP, max_attempts=1)
    def handler(body: str) -> None:
        handle()

    bench.put("17")
    bench.drain(handler)
    (dead,) = bench.broker.dead_letters(SUBJECT, GROUP)
    assert dead.error == text
    assert [past.error for past in dead.history] == [text]


def test_W8_a_retry_for_an_error_is_logged_once_per_kind_with_counts_and_a_requested_one_is_not(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    @consumer(SUBJECT, group=GROUP)
    def handler(body: int) -> None:
        if body % 2:
            raise Retry(after=60)
        retry_from()

    caplog.set_level(logging.WARNING)
    bench.put(*range(40))
    consumers = bench.consumers(handler)
    (member,) = consumers.members
    while member.pull_once(is_blocking=False).count:
        while member.work_once(is_blocking=False).count:
            pass
    member.settle_once()
    member.close(0)
    told = [record.getMessage().split("\n")[0] for record in caplog.records]
    assert len(told) == 11
    assert all(one.split()[0] == "handler_failed" and BUSY in one for one in told[:10])
    assert told[10].split()[0] == "handler_failures"
    assert "failures=20 unlogged=10" in told[10]


def test_W8_of_each_attempt_the_cause_is_kept_behind_however_long_a_text(bench: Bench) -> None:
    @consumer(SUBJECT, group=GROUP, max_attempts=3)
    def handler(body: str) -> None:
        try:
            call()
        except ConnectionError as error:
            raise RuntimeError("not mailed: " + "x" * 2 * ERROR_CHARACTERS_MAX) from error

    bench.put("17")
    for _ in range(3):
        bench.drain(handler)
        bench.clock.advance(3_600_000)
    (dead,) = bench.broker.dead_letters(SUBJECT, GROUP)
    assert [past.attempt for past in dead.history] == [1, 2, 3]
    for past in dead.history:
        assert past.error.startswith("RuntimeError: not mailed: x")
        assert "; caused by ConnectionError: 421" in past.error


def test_a_long_text_leaves_its_cause_a_share_of_the_bound() -> None:
    error = RuntimeError("x" * 2 * ERROR_CHARACTERS_MAX)
    error.__cause__ = ConnectionError("y" * 2 * ERROR_CHARACTERS_MAX)
    text = error_text(error)
    assert len(text) <= ERROR_CHARACTERS_MAX
    assert "x" * 200 in text
    assert "ConnectionError: " + "y" * 200 in text


def test_causes_that_go_round_in_a_circle_come_to_an_end() -> None:
    first, second = ValueError("a"), KeyError("b")
    first.__cause__, second.__cause__ = second, first
    assert error_text(first) == "ValueError: a; caused by KeyError: 'b'"
