"""What a handler's return or exception says, and what the broker hears of it."""

from __future__ import annotations

import asyncio
import concurrent.futures
from dataclasses import dataclass
from datetime import timedelta
from decimal import InvalidOperation
from typing import Any, ClassVar

import pytest

from qmq_client.consumer import Delivery, consumer
from qmq_client.consumer.delivery import Verdict, unreadable
from qmq_client.errors import ProtocolError, UnknownVersionError
from qmq_client.message import Message
from qmq_client.retry import Reject, Retry
from qmq_client.testing import drain
from tests.client.consumer.kit import GROUP, SUBJECT, Bench

SECOND = 1_000


class OddError(BaseException):
    pass


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


@dataclass
class Checked:
    """A body whose type has something to say about it."""

    name: str
    says: ClassVar[dict[str, BaseException]] = {}

    def __post_init__(self) -> None:
        if self.name in self.says:
            raise self.says[self.name]


def failing(error: BaseException, **settings: Any) -> Any:
    calls: list[int] = []

    @consumer(SUBJECT, group=GROUP, **settings)
    def handler(body: Any, delivery: Delivery) -> None:
        calls.append(delivery.attempt)
        raise error

    handler.calls = calls  # type: ignore[attr-defined]  # read back by the test
    return handler


def test_C2_a_message_is_acked_after_its_handler_returned_and_not_before(bench: Bench) -> None:
    seen: list[int] = []

    @consumer(SUBJECT, group=GROUP)
    def handler(body: int) -> None:
        seen.append(bench.broker.in_flight(SUBJECT, GROUP))
        assert len(members[0].ledger) == 0

    bench.put(1)
    consumers = bench.consumers(handler)
    members = consumers.members
    drain(consumers)
    assert seen == [1]
    assert bench.broker.lag(SUBJECT, GROUP) == 0


ERRORS = [
    ValueError("wrong"),
    OddError("odd"),
    GeneratorExit(),
    StopIteration(),
    MemoryError(),
    UnprintableError(),
    ValueError("lone surrogate \ud800"),
    ValueError("x" * 100_000),
    asyncio.CancelledError(),
    concurrent.futures.CancelledError(),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda one: type(one).__name__)
def test_F31_C9_whatever_a_handler_raises_gives_the_message_back_with_a_bounded_reason(
    bench: Bench, error: BaseException
) -> None:
    handler = failing(error, max_attempts=1)
    bench.put("first", "second")
    bench.drain(handler)
    assert handler.calls == [1, 1]
    for dead in bench.broker.dead_letters(SUBJECT, GROUP):
        assert type(error).__name__ in dead.error
        assert len(dead.error) <= 500


@pytest.mark.parametrize("batch_size", [1, 10])
@pytest.mark.parametrize("error", [KeyError("unit"), InvalidOperation("x"), OddError("odd")])
def test_C9_what_the_type_of_a_body_raises_gives_that_message_back_and_no_other(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, error: BaseException, batch_size: int
) -> None:
    monkeypatch.setitem(Checked.says, "bad", error)
    seen: list[str] = []

    def handler(body: Any) -> None:
        seen.extend(one.name for one in (body if batch_size > 1 else [body]))

    handler.__annotations__["body"] = list[Checked] if batch_size > 1 else Checked
    settings: Any = {"batch_size": batch_size, "max_attempts": 2}
    made = consumer(SUBJECT, group=GROUP, **settings)(handler)
    bench.put({"name": "good"}, {"name": "bad"}, {"name": "better"})
    bench.drain(made)
    assert (seen, bench.broker.in_flight(SUBJECT, GROUP)) == (["good", "better"], 0)
    bench.clock.advance(1 * SECOND)
    bench.drain(made)
    (dead,) = bench.broker.dead_letters(SUBJECT, GROUP)
    assert (dead.attempts, dead.reason) == (2, "attempts used up")
    assert type(error).__name__ in dead.error


def test_the_type_of_a_body_may_reject_it_or_ask_for_it_later(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(Checked.says, "bad", Reject("unknown unit"))
    monkeypatch.setitem(Checked.says, "early", Retry(after=90))
    seen: list[str] = []

    @consumer(SUBJECT, group=GROUP)
    def handler(body: Checked) -> None:
        seen.append(body.name)

    bench.put({"name": "bad"}, {"name": "early"})
    bench.drain(handler)
    (dead,) = bench.broker.dead_letters(SUBJECT, GROUP)
    assert (dead.reason, dead.error) == ("rejected", "unknown unit")
    monkeypatch.delitem(Checked.says, "early")
    bench.clock.advance(89 * SECOND)
    bench.drain(handler)
    assert seen == []
    bench.clock.advance(1 * SECOND)
    bench.drain(handler)
    assert seen == ["early"]


def test_C9_an_exit_out_of_the_type_of_a_body_stops_the_consumers_in_order(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(Checked.says, "bad", SystemExit(3))

    @consumer(SUBJECT, group=GROUP)
    def handler(body: Checked) -> None: ...

    bench.put({"name": "bad"})
    with pytest.raises(SystemExit) as ended:
        bench.consumers(handler).run()
    assert ended.value.code == 3
    assert bench.broker.in_flight(SUBJECT, GROUP) == 0


def test_an_error_of_the_database_is_reported_without_its_parameters(bench: Bench) -> None:
    import sqlalchemy as sa

    error = sa.exc.IntegrityError("INSERT", {"card": "secret"}, ValueError("UNIQUE failed"))
    bench.put(1)
    bench.drain(failing(error, max_attempts=1))
    (dead,) = bench.broker.dead_letters(SUBJECT, GROUP)
    assert "UNIQUE failed" in dead.error
    assert "secret" not in dead.error


def test_where_a_handler_failed_is_logged_at_the_first_and_at_the_last_attempt(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    handler = failing(ValueError("no"), max_attempts=3)
    bench.put(1)
    for _ in range(3):
        bench.drain(handler)
        bench.clock.advance(2 * SECOND)
    told = [one for one in caplog.records if one.getMessage().startswith("handler_failed")]
    assert [(one.levelname, "Traceback" in one.getMessage()) for one in told] == [
        ("WARNING", True),
        ("WARNING", False),
        ("WARNING", True),
    ]
    assert "raise error" in caplog.text


def test_the_logged_traceback_shows_no_parameters_of_a_statement(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    import sqlalchemy as sa

    error = ValueError("mine")
    error.__cause__ = sa.exc.IntegrityError("INSERT", {"card": "secret"}, ValueError("UNIQUE"))
    bench.put(1)
    bench.drain(failing(error))
    assert "UNIQUE" in caplog.text
    assert "secret" not in caplog.text


def test_a_message_that_is_reported_in_an_error_writes_no_line_of_the_log(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.put(1)
    bench.drain(failing(ValueError("\x1b[2J\u202e\ud800 ☃\r\nhandler_failed forged=1")))
    (told,) = [one.getMessage() for one in caplog.records if "Traceback" in one.getMessage()]
    assert "☃" in told
    assert all(line.isprintable() for line in told.split("\n"))
    assert all(line.startswith("  ") for line in told.split("\n")[1:])


def test_C4_a_failing_message_comes_again_with_growing_waits_until_it_is_dead(
    bench: Bench,
) -> None:
    handler = failing(ValueError("no"), max_attempts=3)
    bench.put(1)
    bench.drain(handler)
    assert handler.calls == [1]
    bench.clock.advance(1 * SECOND)
    bench.drain(handler)
    bench.clock.advance(1 * SECOND)
    bench.drain(handler)
    assert handler.calls == [1, 2]
    bench.clock.advance(1 * SECOND)
    bench.drain(handler)
    assert handler.calls == [1, 2, 3]
    (dead,) = bench.broker.dead_letters(SUBJECT, GROUP)
    assert (dead.attempts, dead.reason, dead.error) == (3, "attempts used up", "ValueError: no")


@pytest.mark.parametrize("after", [90, timedelta(minutes=1.5)])
def test_a_handler_may_say_when_to_try_again(bench: Bench, after: Any) -> None:
    handler = failing(Retry(after=after))
    bench.put(1)
    bench.drain(handler)
    bench.clock.advance(89 * SECOND)
    bench.drain(handler)
    assert handler.calls == [1]
    bench.clock.advance(1 * SECOND)
    bench.drain(handler)
    assert handler.calls == [1, 2]


def test_a_delay_beyond_what_the_broker_allows_is_a_failure_and_does_not_lose_the_outcome(
    bench: Bench,
) -> None:
    @consumer(SUBJECT, group=GROUP, max_attempts=1)
    def handler(body: int) -> None:
        raise Retry(after=timedelta(days=800))

    bench.put(1)
    bench.drain(handler)
    (dead,) = bench.broker.dead_letters(SUBJECT, GROUP)
    assert "ConfigurationError: after" in dead.error


def test_a_rejected_message_is_a_dead_letter_at_once(bench: Bench) -> None:
    bench.put(1)
    bench.drain(failing(Reject("unknown customer")))
    (dead,) = bench.broker.dead_letters(SUBJECT, GROUP)
    assert (dead.attempts, dead.reason, dead.error) == (1, "rejected", "unknown customer")


def test_C6_a_failing_message_takes_nobody_of_its_batch_down_with_it(bench: Bench) -> None:
    batches: list[list[int]] = []

    @consumer(SUBJECT, group=GROUP, batch_size=10, max_attempts=2)
    def handler(numbers: list[int]) -> None:
        batches.append(numbers)
        if 3 in numbers:
            raise ValueError("three")

    bench.put(*range(6))
    bench.drain(handler)
    bench.clock.advance(1 * SECOND)
    bench.drain(handler)
    assert batches == [[0, 1, 2, 3, 4, 5], [0], [1], [2], [3], [4], [5]]
    assert [one.sequence for one in bench.broker.dead_letters(SUBJECT, GROUP)] == [3]
    assert bench.broker.lag(SUBJECT, GROUP) == 0


def test_a_reject_from_a_batch_rejects_only_the_message_that_is_meant(bench: Bench) -> None:
    @consumer(SUBJECT, group=GROUP, batch_size=10)
    def handler(numbers: list[int]) -> None:
        if 1 in numbers:
            raise Reject("one")

    bench.put(0, 1, 2)
    bench.drain(handler)
    (dead,) = bench.broker.dead_letters(SUBJECT, GROUP)
    assert (dead.sequence, dead.error) == (1, "one")
    assert bench.broker.lag(SUBJECT, GROUP) == 0


def test_C9_a_malformed_record_is_rejected_with_its_reason_and_holds_up_no_other(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[Any] = []

    @consumer(SUBJECT, group=GROUP, batch_size=10)
    def handler(bodies: list[str]) -> None:
        seen.extend(bodies)

    ids = bench.put("good", "altered", "good too")
    bench.broker.faults.altered_ids.add(ids[1])
    consumers = bench.consumers(handler)
    drain(consumers)
    assert seen == ["good", "good too"]
    (dead,) = bench.broker.dead_letters(SUBJECT, GROUP)
    assert dead.sequence == 1
    assert "checksum" in dead.error
    assert bench.counters(consumers)["malformed"] == 1
    assert f"message_id={ids[1]}" in caplog.text


def test_a_record_of_another_version_is_given_back_to_who_knows_it() -> None:
    assert unreadable(ProtocolError("odd")).verdict is Verdict.REJECT
    assert unreadable(UnknownVersionError("version 9")).verdict is Verdict.NACK


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_F31_C9_a_handler_that_ends_the_interpreter_gives_its_message_back_first(
    bench: Bench, error: BaseException
) -> None:
    handler = failing(error)
    bench.put(1)
    consumers = bench.consumers(handler)
    with pytest.raises(type(error)):
        drain(consumers)
    assert bench.broker.in_flight(SUBJECT, GROUP) == 0
    with pytest.raises(type(error)):
        consumers.run()


def test_an_async_handler_has_the_same_outcomes(bench: Bench) -> None:
    seen: list[Any] = []

    @consumer(SUBJECT, group=GROUP, max_attempts=1)
    async def handler(message: Message) -> None:
        await asyncio.sleep(0)
        seen.append(message.body)
        if message.body == 2:
            raise ValueError("two")
        if message.body == 3:
            raise Reject("three")

    bench.put(1, 2, 3, 4)
    bench.drain(handler)
    assert seen == [1, 2, 3, 4]
    errors = [one.error for one in bench.broker.dead_letters(SUBJECT, GROUP)]
    assert errors == ["ValueError: two", "three"]


def test_async_handlers_share_one_event_loop(bench: Bench) -> None:
    loops: list[asyncio.AbstractEventLoop] = []

    async def remember(body: Any) -> None:
        loops.append(asyncio.get_running_loop())

    async def remember_too(body: Any) -> None:
        loops.append(asyncio.get_running_loop())

    bench.put(1, 2)
    first = consumer(SUBJECT, group="one")(remember)
    second = consumer(SUBJECT, group="two")(remember_too)
    bench.drain(first, second)
    assert len(loops) == 4
    assert len(set(map(id, loops))) == 1
