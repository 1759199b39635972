"""What a handler is called with, and what is refused at decoration."""

from __future__ import annotations

import typing
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, fields
from functools import partial
from typing import Annotated, Any, TypedDict

import msgspec
import pytest
from sqlalchemy.orm import Session

from qmq_client.consumer import ConsumerOptions, Consumers, Delivery, consumer
from qmq_client.consumer.parameters import Part, resolve_parameters
from qmq_client.errors import ConfigurationError
from qmq_client.message import Message
from tests.client.consumer.kit import GROUP, SUBJECT, Bench


@dataclass
class Order:
    number: int


class OrderDict(TypedDict):
    number: int


Grams = Annotated[int, msgspec.Meta(gt=0)]


def test_a_handler_may_take_message_delivery_and_body_together(bench: Bench) -> None:
    seen: list[tuple[Any, ...]] = []

    @consumer(SUBJECT, group=GROUP)
    def handler(order: OrderDict, note: Message, *, which: Delivery) -> None:
        seen.append((order, note, which))

    (message_id,) = bench.put({"number": 4})
    bench.drain(handler)
    ((order, note, which),) = seen
    assert order == {"number": 4}
    assert note.message_id == message_id
    assert note.subject == SUBJECT
    assert (which.sequence, which.attempt, which.message) == (0, 1, note)


def test_names_without_annotation_are_understood() -> None:
    def handler(message, delivery, body):  # type: ignore[no-untyped-def]  # the case
        pass

    parameters = resolve_parameters(handler, has_inbox=False, is_batch=False)
    assert parameters.positional == (Part.MESSAGE, Part.DELIVERY, Part.BODY)


def test_an_annotation_beats_a_name() -> None:
    def handler(message: Order, body: Message) -> None:
        pass

    parameters = resolve_parameters(handler, has_inbox=False, is_batch=False)
    assert parameters.positional == (Part.BODY, Part.MESSAGE)


def test_an_annotation_may_carry_more_than_the_type() -> None:
    def handler(which: Annotated[Delivery, "by hand"], body: Annotated[Grams, "net"]) -> None: ...

    def together(
        these: Annotated[list[Message], "a few"], all_of_them: Annotated[list[int], "few"]
    ) -> None: ...

    parameters = resolve_parameters(handler, has_inbox=False, is_batch=False)
    assert parameters.positional == (Part.DELIVERY, Part.BODY)
    parameters = resolve_parameters(together, has_inbox=False, is_batch=True)
    assert parameters.positional == (Part.MESSAGE, Part.BODY)


def test_a_parameter_with_a_default_behind_the_body_is_the_handlers_own(bench: Bench) -> None:
    seen: list[Any] = []

    @consumer(SUBJECT, group=GROUP)
    def handler(body: int, factor: int = 3, delivery: Delivery | None = None) -> None:
        seen.append(body * factor)

    bench.put(2)
    bench.drain(handler)
    assert seen == [6]


def test_a_parameter_behind_a_default_is_still_filled(bench: Bench) -> None:
    seen: list[Any] = []

    @consumer(SUBJECT, group=GROUP)
    def handler(body: int, factor: int = 3, message: Message = None) -> None:  # type: ignore[assignment]  # the case
        seen.append((body * factor, message.body))

    bench.put(2)
    bench.drain(handler)
    assert seen == [(6, 2)]


def test_the_decorated_function_can_be_called_like_any_other() -> None:
    @consumer(SUBJECT, group=GROUP)
    def handler(body: int) -> int:
        return body + 1

    assert handler(1) == 2


def test_a_method_bound_to_an_object_is_no_handler_by_accident(bench: Bench) -> None:
    with pytest.raises(ConfigurationError, match="no handler"):
        bench.consumers(print)


def one(body: int) -> None: ...
def nothing() -> None: ...
def any_number(*bodies: int) -> None: ...
def any_names(**bodies: int) -> None: ...
def two_bodies(body: int, other: int) -> None: ...
def takes_number(body: int) -> None: ...
def wants_session(body: int, session: Any) -> None: ...
def wants_typed_session(body: int, db: Session) -> None: ...
def wants_generator(body: typing.Callable[[], int]) -> None: ...
def wants_messages(messages: list[Message]) -> None: ...
def wants_deliveries(deliveries: typing.Sequence[Delivery]) -> None: ...
async def none_yet(body: int) -> None: ...
def unknown_name(body: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (nothing, "no message"),
        (any_number, "bodies"),
        (any_names, "bodies"),
        (two_bodies, "other"),
        (wants_session, "session"),
        (wants_typed_session, "db"),
        (wants_generator, "body"),
        (unknown_name, "Nowhere"),
        (wants_messages, "messages: is a list of Message, but batch_size is 1"),
        (wants_deliveries, "deliveries: is a list of Delivery, but batch_size is 1"),
    ],
)
def test_a_parameter_nobody_can_fill_is_refused_at_decoration_by_name(
    function: Callable[..., Any], named: str
) -> None:
    with pytest.raises(ConfigurationError, match=named) as caught:
        consumer(SUBJECT, group=GROUP)(function)
    assert function.__name__ in str(caught.value)


class Desk:
    def take(self, body: int) -> None: ...

    def __call__(self, body: int) -> None: ...


def goes_through(body: int) -> typing.Iterator[int]:
    yield body


async def goes_through_later(body: int) -> typing.AsyncIterator[int]:
    yield body


def pooled(body: int) -> Future[int]:
    return Future()


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (goes_through, "runs nothing"),
        (goes_through_later, "runs nothing"),
        (Desk().take, "Decorate a function"),
        (Desk(), "Decorate a function"),
        (partial(two_bodies, 1), "Decorate a function"),
        (len, "Decorate a function"),
    ],
    ids=["generator", "asynchronous generator", "method", "object", "partial", "built-in"],
)
def test_C2_what_is_no_function_that_runs_when_it_is_called_is_refused_at_decoration(
    function: Callable[..., Any], named: str
) -> None:
    with pytest.raises(ConfigurationError, match=named):
        consumer(SUBJECT, group=GROUP)(function)


@pytest.mark.parametrize("has_middleware", [False, True])
@pytest.mark.parametrize("function", [goes_through, goes_through_later, none_yet, pooled])
def test_C2_a_message_whose_handler_returned_what_somebody_must_still_run_is_not_acked(
    bench: Bench, function: Callable[..., Any], has_middleware: bool
) -> None:
    def plain(body: Any) -> Any:  # as a careless decorator leaves it
        return function(body)

    async def task(body: Any) -> Any:
        return function(body)

    around = (lambda _: nullcontext(),) if has_middleware else ()
    for number, handler in enumerate((plain, task)):
        bench.put(1)
        made = consumer(SUBJECT, group=f"{GROUP}{number}", max_attempts=1, middleware=around)
        bench.drain(made(handler))
        (dead, *_) = bench.broker.dead_letters(SUBJECT, f"{GROUP}{number}")
        assert "not awaited" in dead.error


def test_a_batch_handler_takes_lists(bench: Bench) -> None:
    seen: list[Any] = []

    @consumer(SUBJECT, group=GROUP, batch_size=10)
    def handler(numbers: list[int], messages: list[Message], deliveries: list[Delivery]) -> None:
        seen.append((numbers, [one.body for one in messages], [d.sequence for d in deliveries]))

    bench.put(*range(5))
    bench.drain(handler)
    assert seen == [([0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4])]


def test_a_batch_handler_that_takes_one_message_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"list\[int\]"):
        consumer(SUBJECT, group=GROUP, batch_size=2)(one)


@pytest.mark.parametrize(
    "settings",
    [
        {"concurrency": 0},
        {"concurrency": 10_000},
        {"max_attempts": 0},
        {"lease_ms": 1},
        {"batch_size": 0},
        {"batch_size": 5_000},
        {"wait_ms": -1},
        {"start": "middle"},
        {"lease_ms": 1.5},
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_name(settings: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        consumer(SUBJECT, group=GROUP, **settings)
    assert caught.value.setting in settings


@pytest.mark.parametrize(("name", "near"), [("batchsize", "batch_size"), ("colour", "")])
def test_a_setting_nobody_knows_is_answered_with_the_nearest_and_where_all_are(
    name: str, near: str
) -> None:
    settings: Any = {name: 3}
    with pytest.raises(ConfigurationError) as caught:
        consumer(SUBJECT, group=GROUP, **settings)
    assert caught.value.setting == name
    assert (f"Did you mean {near!r}?" in str(caught.value)) is bool(near)
    assert "help(qmq_client.consumer)" in str(caught.value)


def test_the_docstring_lists_every_setting_with_its_default() -> None:
    text = str(consumer.__doc__)
    for each in fields(ConsumerOptions):
        if each.name not in {"subject", "group"}:
            shown = f'"{each.default}"' if isinstance(each.default, str) else str(each.default)
            if type(each.default) is int:
                shown = f"{each.default:_}"
            assert f"`{each.name}={shown}`" in text


def test_one_handler_may_be_given_without_a_list(bench: Bench) -> None:
    marked = consumer(SUBJECT, group=GROUP)(takes_number)
    assert len(Consumers(marked, bench.transport).members) == 1
    with pytest.raises(ConfigurationError, match="no handler"):
        Consumers(5, bench.transport)  # type: ignore[arg-type]  # the mistake


def test_an_inbox_and_settling_by_hand_exclude_each_other() -> None:
    with pytest.raises(ConfigurationError, match="auto_ack"):
        consumer(SUBJECT, group=GROUP, inbox=Session, auto_ack=False)


def test_two_handlers_of_one_group_and_subject_are_refused(bench: Bench) -> None:
    first = consumer(SUBJECT, group=GROUP)(lambda body: None)
    second = consumer(SUBJECT, group=GROUP)(lambda body: None)
    with pytest.raises(ConfigurationError, match=f"{SUBJECT}/{GROUP}"):
        bench.consumers(first, second)


def test_one_function_may_handle_two_subjects(bench: Bench) -> None:
    seen: list[str] = []

    @consumer("left", group=GROUP)
    @consumer("right", group=GROUP)
    def handler(message: Message) -> None:
        seen.append(message.subject)

    bench.broker.put(Message("left"), Message("right"))
    bench.drain(handler)
    assert sorted(seen) == ["left", "right"]


def test_a_text_in_place_of_handlers_is_reported_as_a_whole(bench: Bench) -> None:
    with pytest.raises(ConfigurationError, match="'shop' has no handler"):
        Consumers("shop", bench.transport)
