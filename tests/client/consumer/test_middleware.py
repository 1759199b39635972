"""What goes around a handler's call: its order, its place, and what its errors say."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

from qmq_client import Message, Producer
from qmq_client.consumer import Consumers, HandlerCall, consumer
from qmq_client.errors import ConfigurationError
from qmq_client.retry import Reject, Retry
from qmq_client.testing import MemoryTransport, drain
from tests.client.consumer.kit import GROUP, SUBJECT, Bench


def around(name: str, steps: list[Any]) -> Callable[[HandlerCall], AbstractContextManager[None]]:
    @contextmanager
    def middleware(call: HandlerCall) -> Iterator[None]:
        steps.append(f"{name} in")
        yield
        steps.append(f"{name} out")

    return middleware


@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
def test_middleware_nests_in_its_order_that_of_consumers_outermost(
    bench: Bench, is_async: bool
) -> None:
    steps: list[Any] = []
    own = [around("third", steps), around("fourth", steps)]

    def plain(body: Any) -> None:
        steps.append(body)

    async def on_loop(body: Any) -> None:
        steps.append(body)

    handler = consumer(SUBJECT, group=GROUP, middleware=own)(on_loop if is_async else plain)
    bench.put("call")
    consumers = Consumers(
        handler,
        bench.transport,
        clock=bench.clock,
        middleware=[around("first", steps), around("second", steps)],
    )
    drain(consumers)
    consumers.stop()
    names = ["first", "second", "third", "fourth"]
    assert steps == [
        *[f"{name} in" for name in names],
        "call",
        *[f"{name} out" for name in reversed(names)],
    ]


def test_plain_and_asynchronous_middleware_mix_around_an_async_handler(bench: Bench) -> None:
    steps: list[Any] = []

    @asynccontextmanager
    async def on_loop(call: HandlerCall) -> AsyncIterator[None]:
        steps.append("loop in")
        yield
        steps.append("loop out")

    @consumer(SUBJECT, group=GROUP, middleware=[around("plain", steps), on_loop])
    async def handler(body: Any) -> None:
        steps.append(body)

    bench.put("call")
    consumers = bench.consumers(handler)
    drain(consumers)
    consumers.stop()
    assert steps == ["plain in", "loop in", "call", "loop out", "plain out"]


@asynccontextmanager
async def asynchronous(call: HandlerCall) -> AsyncIterator[None]:
    yield


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (asynchronous, "is asynchronous, the handler of orders/audit is not"),
        (None, "is not callable"),
        ([7], "is not callable"),
    ],
    ids=["asynchronous", "none", "number"],
)
def test_what_cannot_go_around_a_handler_is_refused_before_any_message(
    bench: Bench, wrong: Any, named: str
) -> None:
    with pytest.raises(ConfigurationError, match=named):
        consumer(SUBJECT, group=GROUP, middleware=wrong)(lambda body: None)
    handler = consumer(SUBJECT, group=GROUP)(lambda body: None)
    with pytest.raises(ConfigurationError, match=named):
        Consumers(handler, bench.transport, middleware=wrong)


def test_a_function_that_gives_no_context_manager_fails_the_call_and_names_itself(
    bench: Bench,
) -> None:
    def wrong(call: HandlerCall) -> Any:
        return 7

    bench.put(1)
    bench.drain(consumer(SUBJECT, group=GROUP, middleware=wrong, max_attempts=1)(lambda body: None))
    (dead,) = bench.broker.dead_letters(SUBJECT, GROUP)
    assert "gives no context manager" in dead.error


def test_a_middleware_sees_the_deliveries_of_its_call(bench: Bench) -> None:
    seen: list[HandlerCall] = []

    @contextmanager
    def look(call: HandlerCall) -> Iterator[None]:
        seen.append(call)
        yield

    @consumer(SUBJECT, group=GROUP, batch_size=3, middleware=look)
    def handler(bodies: list[int]) -> None: ...

    ids = bench.put(1, 2, 3)
    bench.drain(handler)
    (call,) = seen
    assert (call.subject, call.group, call.session) == (SUBJECT, GROUP, None)
    assert [one.message.message_id for one in call.deliveries] == ids
    assert [(one.message.body, one.attempt) for one in call.deliveries] == [(1, 1), (2, 1), (3, 1)]


@pytest.mark.parametrize("place", ["before", "after"])
def test_what_a_middleware_raises_counts_as_raised_by_the_handler(bench: Bench, place: str) -> None:
    called: list[int] = []

    @contextmanager
    def refusing(call: HandlerCall) -> Iterator[None]:
        if place == "before":
            raise Reject("not today")
        yield
        raise Reject("not today")

    @consumer(SUBJECT, group=GROUP, middleware=refusing)
    def handler(body: int) -> None:
        called.append(body)

    bench.put(1)
    bench.drain(handler)
    (dead,) = bench.broker.dead_letters(SUBJECT, GROUP)
    assert (dead.reason, dead.error) == ("rejected", "not today")
    assert called == ([] if place == "before" else [1])


def test_a_middleware_may_turn_an_error_into_another_outcome_or_into_none(bench: Bench) -> None:
    @contextmanager
    def judging(call: HandlerCall) -> Iterator[None]:
        try:
            yield
        except KeyError as error:
            raise Retry(after=5) from error
        except ValueError:
            return

    @consumer(SUBJECT, group=GROUP, middleware=judging, concurrency=1)
    def handler(body: str) -> None:
        raise {"key": KeyError, "value": ValueError}[body]

    bench.put("key", "value")
    bench.drain(handler)
    assert bench.broker.lag(SUBJECT, GROUP) == 1, "the swallowed one is acked"
    assert bench.broker.next_due_ms(SUBJECT, GROUP) == bench.clock.now_ms() + 5_000


def test_C5_middleware_is_inside_the_transaction_of_the_inbox(
    bench: Bench, engine: sa.Engine
) -> None:
    sessions: list[Any] = []
    producer = Producer(engine, MemoryTransport(bench.broker))

    @contextmanager
    def noting(call: HandlerCall) -> Iterator[None]:
        sessions.append(call.session)
        producer.send(Message("noted", call.deliveries[0].message.body))
        yield
        if call.deliveries[0].attempt == 1:
            raise ValueError("undone with all it has sent")

    @consumer(SUBJECT, group=GROUP, inbox=sessionmaker(engine), middleware=noting)
    def handler(body: int, session: Session) -> None:
        sessions.append(session)

    bench.put(1)
    consumers = bench.consumers(handler)
    drain(consumers)
    bench.clock.advance(2_000)
    drain(consumers)
    assert producer.flush()
    producer.close()
    assert sessions[0] is sessions[1]
    assert sessions[2] is sessions[3]
    assert [message.body for message in bench.broker.messages("noted")] == [1]
