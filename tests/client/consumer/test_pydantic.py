"""Bodies as pydantic has them: checked by its own rules, alone, in containers and in batches."""

from __future__ import annotations

import dataclasses
import logging
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, Field, field_validator
from pydantic.dataclasses import dataclass
from typing_extensions import TypedDict  # pydantic wants this one below Python 3.12

from qmq_client.consumer import consumer
from qmq_client.errors import ConfigurationError
from tests.client.consumer.kit import GROUP, SUBJECT, Bench


class Order(BaseModel):
    number: str
    amount: int = Field(gt=0)

    @field_validator("number")
    @classmethod
    def has_a_prefix(cls, value: str) -> str:
        if not value.startswith("A-"):
            raise ValueError("numbers begin with A-")
        return value


@dataclass
class Parcel:
    grams: int = Field(gt=0)


class Refund(BaseModel):
    refund: str


@dataclasses.dataclass
class Basket:
    orders: list[Order]
    earlier: Basket | None = None


class Receipt(TypedDict):
    order: Order


@dataclasses.dataclass
class Odd:
    order: Order
    other: dataclasses.Field  # type: ignore[type-arg]  # what no JSON can say


GOOD: Any = {"number": "A-1", "amount": 2}


def handled_as(bench: Bench, body_type: Any, *bodies: Any, batch_size: int = 1) -> list[Any]:
    seen: list[Any] = []

    def handler(body: Any) -> None:
        seen.append(body)

    handler.__annotations__["body"] = list[body_type] if batch_size > 1 else body_type
    bench.put(*bodies)
    bench.drain(consumer(SUBJECT, group=GROUP, batch_size=batch_size)(handler))
    return seen


@pytest.mark.parametrize(
    ("body_type", "body", "expected"),
    [
        (Order, GOOD, Order(number="A-1", amount=2)),
        (list[Order], [GOOD], [Order(number="A-1", amount=2)]),
        (dict[str, Order], {"a": GOOD}, {"a": Order(number="A-1", amount=2)}),
        (Order | Refund, {"refund": "B"}, Refund(refund="B")),
        (Order | None, None, None),
        (Parcel, {"grams": 5}, Parcel(grams=5)),
        (Basket, {"orders": [GOOD]}, Basket([Order(number="A-1", amount=2)])),
        (Receipt, {"order": GOOD}, {"order": Order(number="A-1", amount=2)}),
        (Annotated[int, Field(gt=0)], 5, 5),
        (Annotated[Order, "sold"], GOOD, Order(number="A-1", amount=2)),
    ],
    ids=[
        *("model", "list", "dict", "union", "optional", "dataclass"),
        *("plain dataclass", "typed dictionary", "rule", "annotated"),
    ],
)
def test_a_body_is_what_the_annotation_says(
    bench: Bench, body_type: Any, body: Any, expected: Any
) -> None:
    assert handled_as(bench, body_type, body) == [expected]


def test_what_a_model_was_sent_as_it_is_received_as(bench: Bench) -> None:
    assert handled_as(bench, Order, Order(**GOOD)) == [Order(**GOOD)]


@pytest.mark.parametrize(
    ("body_type", "body", "told"),
    [
        (Order, {"number": "A-1", "amount": 0}, "amount"),
        (Order, {"number": "1", "amount": 1}, "numbers begin with A-"),
        (list[Order], [GOOD, {}], "number"),
        (Parcel, {"grams": 0}, "grams"),
        (Order, "text", "body is text"),
        (Basket, {"orders": [GOOD, {"number": "1", "amount": 1}]}, "numbers begin with A-"),
        (Annotated[int, Field(gt=0)], 0, "greater than 0"),
        (list[Annotated[int, Field(gt=0)]], [5, 0], "greater than 0"),
    ],
    ids=["field", "validator", "list", "dataclass", "text", "plain dataclass", "rule", "rules"],
)
def test_C9_a_body_that_breaks_a_models_rules_is_a_dead_letter_with_the_rule(
    bench: Bench, body_type: Any, body: Any, told: str
) -> None:
    assert handled_as(bench, body_type, body) == []
    (dead,) = bench.broker.dead_letters(SUBJECT, GROUP)
    assert "malformed" in dead.error
    assert told in dead.error
    assert len(dead.error) <= 500


@pytest.mark.parametrize(
    ("body_type", "body"),
    [
        (Order, {"number": "A-1", "amount": "hunter2"}),
        (list[Order], [{"number": "A-1", "amount": "hunter2"}]),
        (Parcel, {"grams": "hunter2"}),
        (Refund, "hunter2"),
    ],
)
def test_what_is_told_of_a_body_that_breaks_a_rule_shows_nothing_of_it(
    bench: Bench, caplog: pytest.LogCaptureFixture, body_type: Any, body: Any
) -> None:
    with caplog.at_level(logging.DEBUG):
        assert handled_as(bench, body_type, body) == []
    (dead,) = bench.broker.dead_letters(SUBJECT, GROUP)
    assert "JSON body" in dead.error
    assert "hunter2" not in dead.error + caplog.text


def test_a_type_that_pydantic_cannot_check_either_is_refused_at_decoration(bench: Bench) -> None:
    with pytest.raises(ConfigurationError, match="a type that cannot be decoded"):
        handled_as(bench, Odd, {})


def test_a_batch_is_a_list_of_models_without_those_that_break_a_rule(bench: Bench) -> None:
    seen = handled_as(bench, Order, GOOD, {"amount": 1}, GOOD, batch_size=3)
    assert seen == [[Order(**GOOD), Order(**GOOD)]]
    assert len(bench.broker.dead_letters(SUBJECT, GROUP)) == 1
