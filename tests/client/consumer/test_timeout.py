"""A handler that takes longer than its `timeout_ms`: its messages are given back, and say why."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

from qmq_client.consumer import Consumers, consumer
from qmq_client.consumer.member import Member
from qmq_client.testing import drain
from qmq_client.wire.requests import PullRequest
from tests.client.consumer.kit import GROUP, SUBJECT, WAIT_S, Bench
from tests.kit.waiting import wait_for

LONG_MS = 10 * 60_000


class Hanging:
    """One handler call, on a thread of its own, that goes on until it is let go."""

    def __init__(self) -> None:
        self._begun, self._may_finish = threading.Event(), threading.Event()

    def hang(self) -> None:
        """What the handler does."""
        self._begun.set()
        assert self._may_finish.wait(WAIT_S)

    def start(self, bench: Bench, handler: Callable[..., object]) -> tuple[Consumers, Member]:
        """Give the handler the message 1, and let it begin."""
        bench.put(1)
        consumers = bench.consumers(handler)
        (member,) = consumers.members
        member.pull_once(is_blocking=False)
        self.begin(member)
        return consumers, member

    def begin(self, member: Member) -> None:
        """Let the member handle what it has in hand; the handler hangs on return."""
        self._thread = threading.Thread(target=member.work_once, daemon=True)
        self._thread.start()
        assert self._begun.wait(WAIT_S)

    def end(self) -> None:
        """Let it go, and see it return."""
        self._may_finish.set()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()


def test_F31_C6_a_plain_handler_over_its_time_has_its_message_given_back_while_it_continues(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    hanging = Hanging()
    done: list[int] = []

    @consumer(SUBJECT, group=GROUP, timeout_ms=5_000)
    def handler(body: int) -> None:
        hanging.hang()
        done.append(body)

    consumers, member = hanging.start(bench, handler)
    bench.clock.advance(4_999)
    member.settle_once()
    assert bench.broker.in_flight(SUBJECT, GROUP) == 1
    bench.clock.advance(1)
    member.settle_once()
    assert bench.broker.in_flight(SUBJECT, GROUP) == 0
    assert "handler_timed_out" in caplog.text
    assert "it still runs and occupies one of 1 threads" in caplog.text
    hanging.end()
    member.settle_once()
    assert done == [1]
    assert bench.broker.lag(SUBJECT, GROUP) == 1, "its return came too late to count"
    counted = bench.counters(consumers)
    assert (counted["timed_out"], counted["nacked"]) == (1, 1)
    assert "stale" not in counted


def test_C6_what_waits_behind_handlers_that_all_hang_is_given_back_before_their_time_is_over(
    bench: Bench,
) -> None:
    hanging = Hanging()

    @consumer(SUBJECT, group=GROUP, timeout_ms=1_000)
    def handler(body: int) -> None:
        hanging.hang()

    bench.put(1, 2, 3)
    consumers = bench.consumers(handler)
    (member,) = consumers.members
    given = bench.broker.pull(
        PullRequest(subject=SUBJECT, group=GROUP, consumer=consumers.consumer_id, max_messages=3)
    )
    member._receive(given, bench.clock.monotonic_s())
    hanging.begin(member)
    bench.clock.advance(250)
    member.settle_once()
    assert bench.broker.in_flight(SUBJECT, GROUP) == 3
    bench.clock.advance(1)
    member.settle_once()
    assert bench.broker.in_flight(SUBJECT, GROUP) == 1
    bench.clock.advance(749)
    member.settle_once()
    assert bench.broker.in_flight(SUBJECT, GROUP) == 0
    others = bench.broker.pull(
        PullRequest(subject=SUBJECT, group=GROUP, consumer="other", max_messages=3)
    )
    assert [one.sequence for one in others.messages] == [1, 2], "the first waits for its backoff"
    assert member.prefetch.room(is_blocking=False) == 0, "no more is asked for meanwhile"
    hanging.end()
    assert member.prefetch.room(is_blocking=False) >= 1


def test_what_comes_at_most_once_waits_behind_a_handler_over_its_time_and_is_not_dropped(
    bench: Bench,
) -> None:
    """Nobody else would ever get it."""
    hanging = Hanging()
    done: list[int] = []

    @consumer(SUBJECT, group=GROUP, timeout_ms=1_000, at_most_once=True, prefetch_max=3)
    def handler(body: int) -> None:
        if body == 1:
            hanging.hang()
        done.append(body)

    bench.put(1, 2, 3)
    consumers = bench.consumers(handler)
    (member,) = consumers.members
    given = bench.broker.pull(
        PullRequest(
            subject=SUBJECT,
            group=GROUP,
            consumer=consumers.consumer_id,
            max_messages=3,
            at_most_once=True,
        )
    )
    member._receive(given, bench.clock.monotonic_s())
    hanging.begin(member)
    bench.clock.advance(1_000)
    member.settle_once()
    assert (member.prefetch.count, bench.counters(consumers)["dropped"]) == (3, 1)
    hanging.end()
    drain(consumers)
    assert done == [1, 2, 3]


def test_the_next_attempt_says_that_the_one_before_took_too_long(bench: Bench) -> None:
    hanging = Hanging()

    @consumer(SUBJECT, group=GROUP, timeout_ms=1_000, max_attempts=1)
    def handler(body: int) -> None:
        hanging.hang()

    _, member = hanging.start(bench, handler)
    bench.clock.advance(1_000)
    member.settle_once()
    (dead,) = bench.broker.dead_letters(SUBJECT, GROUP)
    assert dead.error.startswith(
        "HandlerTimeoutError: the handler ran longer than its timeout_ms, 1000: make it faster"
    )
    hanging.end()


def test_an_async_handler_over_its_time_is_cancelled_and_its_message_given_back(
    bench: Bench,
) -> None:
    ended: list[str] = []

    @consumer(SUBJECT, group=GROUP, timeout_ms=1, max_attempts=1)
    async def handler(body: int) -> None:
        try:
            await asyncio.sleep(3_600)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    bench.put(1)
    consumers = bench.consumers(handler)
    drain(consumers)
    consumers.stop()
    assert ended == ["cancelled"]
    (dead,) = bench.broker.dead_letters(SUBJECT, GROUP)
    assert dead.error.startswith("HandlerTimeoutError: the handler ran longer")


def test_a_timeout_of_the_handlers_own_is_reported_as_its_own(bench: Bench) -> None:
    @consumer(SUBJECT, group=GROUP, timeout_ms=LONG_MS, max_attempts=1)
    async def handler(body: int) -> None:
        raise TimeoutError("the bank did not answer")

    bench.put(1)
    consumers = bench.consumers(handler)
    drain(consumers)
    consumers.stop()
    (dead,) = bench.broker.dead_letters(SUBJECT, GROUP)
    assert dead.error == "TimeoutError: the bank did not answer"


def test_F31_C6_an_async_handler_that_blocks_the_loop_has_its_message_given_back_too(
    bench: Bench,
) -> None:
    hanging = Hanging()

    @consumer(SUBJECT, group=GROUP, timeout_ms=LONG_MS)
    async def handler(body: int) -> None:
        hanging.hang()

    consumers, member = hanging.start(bench, handler)
    bench.clock.advance(LONG_MS + 1_000)
    member.prefetch.running()[0].received[0].lease_ends_at_s += LONG_MS  # as prolonged meanwhile
    member.settle_once()
    assert bench.counters(consumers)["timed_out"] == 1
    hanging.end()
    consumers.stop()


def test_C5_an_effect_committed_after_the_timeout_is_not_repeated(
    bench: Bench, engine: sa.Engine
) -> None:
    hanging = Hanging()
    calls: list[Any] = []

    @consumer(SUBJECT, group=GROUP, timeout_ms=1_000, inbox=sessionmaker(engine))
    def handler(body: int, session: Session) -> None:
        calls.append(body)
        hanging.hang()

    consumers, member = hanging.start(bench, handler)
    bench.clock.advance(1_000)
    member.settle_once()
    hanging.end()
    bench.clock.advance(2_000)
    drain(consumers)
    assert calls == [1]
    assert bench.counters(consumers)["duplicates"] == 1
    assert bench.broker.lag(SUBJECT, GROUP) == 0


def test_C4_what_waited_in_vain_for_its_inbox_is_given_back_and_is_no_attempt_that_failed(
    bench: Bench, engine: sa.Engine
) -> None:
    hanging, is_away = Hanging(), threading.Event()
    calls: list[int] = []

    def opened() -> Session:
        if is_away.is_set():
            hanging.hang()
            raise sa.exc.OperationalError("BEGIN", {}, ConnectionError("nobody answers"))
        return Session(engine)

    @consumer(SUBJECT, group=GROUP, timeout_ms=1_000, max_attempts=1, inbox=opened)
    def handler(body: int, session: Session) -> None:
        calls.append(body)

    bench.put(1)
    consumers = bench.consumers(handler)
    (member,) = consumers.members
    member.pull_once(is_blocking=False)
    is_away.set()
    hanging.begin(member)
    bench.clock.advance(1_000)
    member.settle_once()
    assert bench.counters(consumers)["timed_out"] == 1
    assert bench.broker.dead_letters(SUBJECT, GROUP) == []
    is_away.clear()
    hanging.end()
    bench.clock.advance(2_000)
    drain(consumers)
    assert calls == [1]


def test_F31_threads_give_back_a_message_whose_handler_hangs_and_handle_the_others(
    bench: Bench,
) -> None:
    may_finish, other = threading.Event(), threading.Event()

    @consumer(SUBJECT, group=GROUP, timeout_ms=200, concurrency=2, wait_ms=20)
    def handler(body: str) -> None:
        if body == "hangs":
            assert may_finish.wait(WAIT_S)
        other.set()

    bench.put("hangs", "quick")
    consumers = Consumers(handler, bench.transport)
    consumers.start()
    try:
        assert other.wait(WAIT_S)
        wait_for(lambda: bench.counters(consumers).get("timed_out") == 1)
    finally:
        may_finish.set()
        assert consumers.stop().is_clean
    again = bench.broker.pull(
        PullRequest(subject=SUBJECT, group=GROUP, consumer="other", max_messages=5)
    )
    assert again.messages == (), "it waits for the backoff, by a clock that stands still"


def test_a_very_short_timeout_is_looked_for_a_hundred_times_a_second_and_not_thousands(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    @consumer(SUBJECT, group=GROUP, timeout_ms=1)
    def handler(body: int) -> None: ...

    consumers = bench.consumers(handler)
    (member,) = consumers.members
    looks_s: list[float] = []

    def wait(timeout_s: float) -> bool:
        looks_s.append(timeout_s)
        consumers._settling_ends.set()
        return False

    monkeypatch.setattr(member.ledger, "wait", wait)
    consumers._settle(member)
    assert looks_s == [0.01]
