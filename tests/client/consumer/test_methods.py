"""Handlers that are methods or inside of decorators: called as what was given, not what was marked."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ClassVar

import pytest

from qmq_client.consumer import consumer
from qmq_client.errors import ConfigurationError
from qmq_client.message import Message
from tests.client.consumer.kit import GROUP, SUBJECT, Bench


@dataclass
class Desk:
    name: str
    taken: list[int] = field(default_factory=list)

    @consumer(SUBJECT, group=GROUP)
    def take(self, body: int) -> None:
        self.taken.append(body)

    @consumer(SUBJECT, group=GROUP)
    async def take_later(self, body: int) -> None:
        self.taken.append(body)

    @consumer(SUBJECT, group=GROUP, batch_size=2)
    def take_together(self, bodies: list[int]) -> None:
        self.taken += bodies

    @consumer(SUBJECT, group=GROUP)
    def take_without_self(this, message: Message) -> None: ...  # noqa: N805  # on purpose


class Office:
    taken: ClassVar[list[tuple[str, int]]] = []

    @classmethod
    @consumer(SUBJECT, group=GROUP)
    def take(cls, body: int) -> None:
        cls.taken.append((cls.__name__, body))

    @staticmethod
    @consumer(SUBJECT, group=GROUP)
    def take_for_nobody(body: int) -> None:
        Office.taken.append(("nobody", body))


def noting(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*values: Any, **named: Any) -> Any:
        noted.append(function.__name__)
        return function(*values, **named)

    return call


def noting_on_the_loop(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    async def call(*values: Any, **named: Any) -> Any:
        noted.append(function.__name__)
        returned = function(*values, **named)
        return await returned if inspect.isawaitable(returned) else returned

    return call


noted: list[str] = []


@pytest.mark.parametrize("above", [noting, noting_on_the_loop])
@pytest.mark.parametrize("kind", ["plain", "asynchronous", "method"])
def test_a_decorator_above_the_mark_goes_around_each_call(
    bench: Bench, kind: str, above: Callable[..., Any]
) -> None:
    handled: list[int] = []

    def plain(body: int) -> None:
        handled.append(body)

    async def asynchronous(body: int) -> None:
        handled.append(body)

    class Counter:
        @above
        @consumer(SUBJECT, group=GROUP)
        def method(self, body: int) -> None:
            handled.append(body)

    handler: Callable[..., Any] = Counter().method
    if kind != "method":
        function = {"plain": plain, "asynchronous": asynchronous}[kind]
        handler = above(consumer(SUBJECT, group=GROUP)(function))
    noted.clear()
    bench.put(1, 2)
    bench.drain(handler)
    assert (noted, handled) == ([kind, kind], [1, 2])
    assert bench.broker.lag(SUBJECT, GROUP) == 0


@pytest.mark.parametrize(
    "method",
    [lambda desk: desk.take, lambda desk: desk.take_later, lambda desk: desk.take_together],
    ids=["plain", "asynchronous", "batch"],
)
def test_a_method_is_called_as_that_of_the_object_it_was_given_of(
    bench: Bench, method: Callable[[Desk], Callable[..., Any]]
) -> None:
    front, back = Desk("front"), Desk("back")
    bench.put(1, 2)
    bench.drain(method(front))
    assert (front.taken, back.taken) == ([1, 2], [])
    assert bench.broker.lag(SUBJECT, GROUP) == 0


def test_a_class_method_gets_its_class_and_a_static_one_the_message_alone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Office, "taken", [])
    bench.put(1)
    bench.drain(Office.take)
    bench.put(2)
    bench.drain(Office.take_for_nobody)
    assert Office.taken == [("Office", 1), ("nobody", 2)]


def test_a_method_without_its_object_is_refused_and_so_is_one_without_self(bench: Bench) -> None:
    with pytest.raises(ConfigurationError, match=r"Desk\.take: a method without its object"):
        bench.consumers(Desk.take)
    # It would be called with the body in the place of its object.
    with pytest.raises(ConfigurationError, match="Call its first parameter self"):
        bench.consumers(Desk("front").take_without_self)


@pytest.mark.parametrize("kind", [staticmethod, classmethod])
def test_above_a_static_or_class_method_the_decoration_says_where_it_belongs(
    kind: Callable[[Any], Any],
) -> None:
    with pytest.raises(ConfigurationError, match=f"Write @{kind.__name__} above @consumer"):
        consumer(SUBJECT, group=GROUP)(kind(lambda body: None))
