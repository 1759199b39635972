"""Routes without a task: they go on where their outcome is told, and for all else as tasks do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from qmq_broker.face.http.request_response import Outcome, SteppedCoroutine

Route = Callable[[list[object]], Coroutine[Any, Any, None]]


def drive(route: Route, after: Callable[[list[object]], None] = lambda _: None) -> list[object]:
    """What a route notes until its end; `after` is called when it waits for the first time."""
    noted: list[object] = []

    async def look() -> None:
        ended = asyncio.Event()
        SteppedCoroutine(route(noted), ended.set, set()).step()
        after(noted)
        await asyncio.wait_for(ended.wait(), 30)

    asyncio.run(look())
    return noted


def test_it_begins_at_once_and_continues_within_the_call_that_tells_the_outcome() -> None:
    outcome: Outcome[str] = Outcome()

    async def route(noted: list[object]) -> None:
        noted.append("begun")
        noted.append(await outcome)

    def tell(noted: list[object]) -> None:
        assert noted == ["begun"]
        assert not outcome.done()
        outcome.set_result("told")
        assert outcome.done()
        assert noted == ["begun", "told"]

    assert drive(route, tell) == ["begun", "told"]


def test_an_outcome_that_is_reported_before_is_not_waited_for() -> None:
    async def route(noted: list[object]) -> None:
        outcome: Outcome[int] = Outcome()
        outcome.set_result(7)
        noted.append(await outcome)

    noted: list[object] = []
    SteppedCoroutine(route(noted), lambda: noted.append("ended"), set()).step()
    assert noted == [7, "ended"]


def test_a_failure_is_raised_where_it_is_awaited() -> None:
    outcome: Outcome[str] = Outcome()

    async def route(noted: list[object]) -> None:
        try:
            await outcome
        except ZeroDivisionError as error:
            noted.append(error)

    failure = ZeroDivisionError()
    assert drive(route, lambda _: outcome.set_exception(failure)) == [failure]


def test_futures_threads_and_bare_yields_are_awaited_as_in_a_task() -> None:
    async def route(noted: list[object]) -> None:
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(future.set_result, "future")
        noted.append(await future)
        await asyncio.sleep(0)
        noted.append(await asyncio.to_thread(str, "thread"))
        failing: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(failing.set_exception, KeyError("x"))
        with pytest.raises(KeyError):
            await failing

    assert drive(route) == ["future", "thread"]
