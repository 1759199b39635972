"""Bodies as pydantic has them: checked by its own rules, alone, in containers and in batches."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, Field, field_validator
from pydantic.dataclasses import dataclass

from qmq_client.consumer import consumer
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
    ],
    ids=["model", "list", "dict", "union", "optional", "dataclass"],
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
    ],
    ids=["field", "validator", "list", "dataclass", "text"],
)
def test_C9_a_body_that_breaks_a_models_rules_is_a_dead_letter_with_the_rule(
    bench: Bench, body_type: Any, body: Any, told: str
) -> None:
    assert handled_as(bench, body_type, body) == []
    (dead,) = bench.broker.dead_letters(SUBJECT, GROUP)
    assert "malformed" in dead.error
    assert told in dead.error
    assert len(dead.error) <= 500


def test_a_batch_is_a_list_of_models_without_those_that_break_a_rule(bench: Bench) -> None:
    seen = handled_as(bench, Order, GOOD, {"amount": 1}, GOOD, batch_size=3)
    assert seen == [[Order(**GOOD), Order(**GOOD)]]
    assert len(bench.broker.dead_letters(SUBJECT, GROUP)) == 1
