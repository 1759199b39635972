"""What the annotation of a body may be, and what becomes of a body that is not of it."""

from __future__ import annotations

import typing
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal, TypedDict
from uuid import UUID

import msgspec
import pytest

from qmq_client.consumer import consumer
from tests.client.consumer.kit import GROUP, SUBJECT, Bench


@dataclass
class Order:
    number: int
    lines: list[str]


class OrderStruct(msgspec.Struct):
    number: int


class OrderDict(TypedDict):
    number: int


class Colour(StrEnum):
    RED = "red"


OrderNumber = typing.NewType("OrderNumber", str)
Image = typing.NewType("Image", bytes)
Grams = Annotated[int, msgspec.Meta(gt=0)]
Word = Annotated[str, msgspec.Meta(max_length=4)]


class ModelLikePydantic:
    def __init__(self, text: str) -> None:
        self.text = text

    @classmethod
    def model_validate_json(cls, data: bytes) -> ModelLikePydantic:
        if not data.startswith(b"{"):
            raise ValueError("not an object")
        return cls(data.decode())


def typed(annotation: Any) -> tuple[Callable[..., Any], list[Any]]:
    """A handler with one parameter of this type, and the list of what it gets."""

    def handler(body: Any) -> None:
        got.append(body)

    got: list[Any] = []
    handler.__annotations__["body"] = annotation
    return handler, got


def received(bench: Bench, annotation: Any, body: Any) -> list[Any]:
    handler, got = typed(annotation)
    bench.put(body)
    bench.drain(consumer(SUBJECT, group=GROUP)(handler))
    return got


@pytest.mark.parametrize(
    ("annotation", "sent", "got"),
    [
        (Any, b"\x00\xff", b"\x00\xff"),
        (Any, "text", "text"),
        (Any, {"a": [1, None]}, {"a": [1, None]}),
        (object, 5, 5),
        (bytes, b"\x00\xff", b"\x00\xff"),
        (bytes, {"a": 1}, b'{"a":1}'),
        (str, "text", "text"),
        (dict, {"a": 1}, {"a": 1}),
        (dict[str, int], {"a": 1}, {"a": 1}),
        (list[int], [1, 2], [1, 2]),
        (int, 7, 7),
        (Order, {"number": 1, "lines": ["x"]}, Order(number=1, lines=["x"])),
        (OrderStruct, {"number": 1}, OrderStruct(number=1)),
        (OrderDict, {"number": 1}, {"number": 1}),
        (Order | None, None, None),
        (bytes | None, b"x", b"x"),
        (OrderNumber, "A-1", "A-1"),
        (Image, b"\x00\xff", b"\x00\xff"),
        (Image | None, b"x", b"x"),
        (Annotated[bytes, "as it was sent"], {"a": 1}, b'{"a":1}'),
        (Annotated[Any, "whatever"], "text", "text"),
        (Grams, 5, 5),
        (Word, "text", "text"),
        (Colour, Colour.RED, Colour.RED),
        (Literal["red", "blue"], "red", "red"),
        (UUID, "00000000-0000-0000-0000-000000000017", UUID(int=0x17)),
    ],
)
def test_a_body_arrives_as_the_annotated_type(
    bench: Bench, annotation: Any, sent: Any, got: Any
) -> None:
    assert received(bench, annotation, sent) == [got]


def test_a_body_arrives_as_a_pydantic_model(bench: Bench) -> None:
    (model,) = received(bench, ModelLikePydantic, {"a": 1})
    assert model.text == '{"a":1}'


@pytest.mark.parametrize(
    ("annotation", "sent"),
    [
        (Order, {"number": "one", "lines": []}),
        (Order, b"bytes"),
        (Order, "text"),
        (str, b"bytes"),
        (dict, [1]),
        (int, {"a": 1}),
        (ModelLikePydantic, [1]),
        (ModelLikePydantic, "{}"),
        (Grams, -1),
        (list[Grams], [5, -1]),
        (Word, "longer"),
        (Colour, "green"),
        (Literal["red", "blue"], "green"),
        (int, "7"),
    ],
)
def test_C9_a_body_of_another_type_is_rejected_and_the_handler_is_not_called(
    bench: Bench, annotation: Any, sent: Any
) -> None:
    handler, got = typed(annotation)
    bench.put(sent)
    bench.drain(consumer(SUBJECT, group=GROUP)(handler))
    assert got == []
    (dead,) = bench.broker.dead_letters(SUBJECT, GROUP)
    assert "malformed" in dead.error
