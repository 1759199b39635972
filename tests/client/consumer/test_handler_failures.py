"""Handlers that fail a thousand times a second: few words, and all of them counted."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from qmq_client.consumer import consumer
from qmq_client.consumer.error_texts import LOGGED_MAX, HandlerFailures
from qmq_client.testing import FakeClock, drain
from tests.client.consumer.kit import GROUP, SUBJECT, Bench

NAME = f"{SUBJECT}/{GROUP}"
MINUTE_MS = 60_000


@pytest.fixture(autouse=True)
def _from_info_on(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def lines(caplog: pytest.LogCaptureFixture, event: str) -> list[str]:
    """What was told of this since the last time, each in its first line."""
    found = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return [one.split("\n")[0] for one in found if one.split()[0] == event]


class Failing:
    """What is said of errors that these functions raise."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.failures = HandlerFailures(NAME, self.clock)

    def fail(self, by: Callable[[], object], times: int = 1) -> int:
        """Have it fail so often; how often that was to be told."""
        return sum(self._is_told(by) for _ in range(times))

    def _is_told(self, by: Callable[[], object]) -> bool:
        try:
            by()
        except BaseException as error:
            return self.failures.failed(error, str(error))
        raise AssertionError("it did not fail")

    def pass_by(self, seconds: int) -> None:
        """Time in which nothing fails."""
        for _ in range(seconds):
            self.clock.advance(1_000)
            self.failures.look()


def call_away() -> None:
    raise ConnectionError("nobody answers")


def book_twice() -> None:
    raise ConnectionError("booked already")


def test_W8_of_failures_of_one_kind_few_are_reported_and_the_others_are_counted(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    @consumer(SUBJECT, group=GROUP)
    def call(body: int) -> None:
        call_away()

    bench.put(*range(1_000))
    consumers = bench.consumers(call)
    drain(consumers)
    assert caplog.text.count("Traceback") == LOGGED_MAX
    assert len(lines(caplog, "handler_failed")) == LOGGED_MAX
    bench.clock.advance(MINUTE_MS)
    consumers.members[0].settle_once()
    (line,) = lines(caplog, "handler_failures")
    assert line == (
        f"handler_failures consumer={NAME} seconds=0.0 failures=1000 unlogged={1_000 - LOGGED_MAX} "
        "last_error=ConnectionError: nobody answers"
    )
    consumers.stop()


def test_a_stop_tells_what_was_counted(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    @consumer(SUBJECT, group=GROUP)
    def call(body: int) -> None:
        call_away()

    bench.put(*range(LOGGED_MAX + 1))
    consumers = bench.consumers(call)
    drain(consumers)
    consumers.stop()
    (line,) = lines(caplog, "handler_failures")
    assert "unlogged=1 " in line


def test_who_logs_at_debug_is_told_of_each(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    @consumer(SUBJECT, group=GROUP)
    def call(body: int) -> None:
        call_away()

    caplog.set_level(logging.DEBUG)
    bench.put(*range(3 * LOGGED_MAX))
    bench.drain(call)
    assert caplog.text.count("Traceback") == 3 * LOGGED_MAX


def test_W8_a_flood_is_reported_in_spans_that_double_and_its_end_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failing = Failing()
    told = 0
    counts: list[str] = []
    for _ in range(6 * 3_600):
        told += failing.fail(call_away)
        failing.pass_by(1)
        counts += lines(caplog, "handler_failures")
    spans_s = [60, 120, 240, 480, 960, 1_920, 3_600, 3_600, 3_600, 3_600]
    assert [int(one.split("failures=")[1].split()[0]) for one in counts] == spans_s
    assert told == LOGGED_MAX * (len(spans_s) + 1)
    failing.pass_by(60)
    (last,) = lines(caplog, "handler_failures")
    total = sum(int(one.split("unlogged=")[1].split()[0]) for one in [*counts, last])
    assert told + total == 6 * 3_600, "each is told or counted"
    failing.pass_by(58)
    assert lines(caplog, "handler_failures_over") == []
    failing.pass_by(1)
    assert lines(caplog, "handler_failures_over") == [
        f"handler_failures_over consumer={NAME} last_error=nobody answers"
    ]
    assert failing.fail(call_away, 100) == LOGGED_MAX
    failing.pass_by(60)
    assert len(lines(caplog, "handler_failures")) == 1, "after a minute again"


def test_failures_that_come_now_and_then_are_reported_each(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failing = Failing()
    for _ in range(100):
        assert failing.fail(call_away, LOGGED_MAX) == LOGGED_MAX
        failing.pass_by(60)
    assert caplog.text == ""


def test_an_error_is_not_lost_among_many_of_another_kind() -> None:
    def wrapped(cause: Callable[[], object]) -> None:
        try:
            cause()
        except ConnectionError as error:
            raise RuntimeError("no booking") from error

    def grouped(cause: Callable[[], object]) -> None:
        errors = []
        try:
            cause()
        except ConnectionError as error:
            errors.append(error)
        raise ExceptionGroup("in a task", errors)

    failing = Failing()
    for raised in (lambda by: by(), wrapped, grouped):
        assert failing.fail(lambda: raised(call_away), 1_000) == LOGGED_MAX  # noqa: B023  # now
        assert failing.fail(lambda: raised(book_twice)) == 1  # noqa: B023  # now


def test_W8_errors_of_any_number_of_kinds_are_reported_a_bounded_number_of_times() -> None:
    failing = Failing()
    kinds = [type(f"Error{number}", (Exception,), {}) for number in range(1_000)]

    def fail_as(kind: type[Exception]) -> None:
        raise kind

    told = sum(failing.fail(lambda: fail_as(kind), LOGGED_MAX) for kind in kinds)  # noqa: B023  # now
    assert told == LOGGED_MAX * 101


def test_errors_that_cause_each_other_are_reported() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    assert HandlerFailures(NAME, FakeClock()).failed(first, "first")
