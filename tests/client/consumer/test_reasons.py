"""What an application gives as the reason of an outcome, and what of it the broker hears."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from qmq_client.consumer import Delivery, consumer
from qmq_client.consumer.ledger import settle_request
from qmq_client.retry import Reject
from qmq_client.wire.requests import encode_control
from tests.client.consumer.kit import GROUP, SUBJECT, Bench


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


REASONS: Any = [
    ("lone surrogate \ud800", "lone surrogate \\ud800"),
    (ValueError("no number"), "ValueError: no number"),
    (UnprintableError(), "UnprintableError: its text cannot be read (ValueError)"),
    (17, "17"),
    (None, ""),
]


@pytest.mark.parametrize(("reason", "told"), REASONS)
def test_C9_whatever_is_given_as_a_reason_becomes_a_text_that_can_be_sent(
    bench: Bench, reason: Any, told: str
) -> None:
    ways: dict[str, Callable[[Delivery], object]] = {
        "nack": lambda one: one.nack(error=reason),
        "reject": lambda one: one.reject(reason),
    }

    @consumer(SUBJECT, group=GROUP, auto_ack=False, concurrency=3)
    def handler(body: str, delivery: Delivery) -> None:
        if body == "raise":
            raise Reject(reason)
        assert ways[body](delivery)

    bench.put("raise", *ways)
    consumers = bench.consumers(handler)
    member = consumers.members[0]
    assert member.pull_once(is_blocking=False).count == 3
    while member.work_once(is_blocking=False).count:
        pass
    outgoing = member.ledger.drain()
    assert encode_control(settle_request(member.options, "one", outgoing.settlements))
    assert {one.outcome.text for one in outgoing.entries if one.outcome} == {told}
