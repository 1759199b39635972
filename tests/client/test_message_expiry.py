"""`ttl` and `expires_at` of a message: what is written, what a handler finds, what is refused."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from qmq_client import Message, consumer
from qmq_client.consumer import Consumers
from qmq_client.errors import InvalidMessageError
from qmq_client.message import message_to_record, record_to_message
from qmq_client.testing import FakeClock, MemoryBroker, MemoryTransport, drain
from qmq_client.wire.record import Record, decode_record, encode_record

NOW_MS = 1_357_034_220_000
NOW = datetime.fromtimestamp(NOW_MS / 1000, UTC)


def record(**settings: Any) -> Record:
    made = message_to_record(
        Message("offers", "17", **settings), new_id=bytes(15) + b"\1", now_ms=NOW_MS
    )
    assert decode_record("offers", encode_record(made)) == made
    return made


@pytest.mark.parametrize(
    ("settings", "after_ms"),
    [
        ({"ttl": 1.5}, 1_500),
        ({"ttl": timedelta(hours=1)}, 3_600_000),
        ({"ttl": 0.0001}, 1),
        ({"ttl": 10, "delay": 60}, 70_000),
        ({"ttl": 10, "deliver_at": NOW + timedelta(minutes=2)}, 130_000),
        ({"ttl": 10, "deliver_at": NOW - timedelta(minutes=2)}, 10_000),
        ({"expires_at": NOW + timedelta(seconds=7)}, 7_000),
        ({"expires_at": (NOW + timedelta(1)).astimezone(timezone(timedelta(hours=9)))}, 86_400_000),
        ({"expires_at": NOW - timedelta(seconds=7)}, -7_000),
    ],
    ids=str,
)
def test_it_expires_after_the_send_or_the_due_time_or_at_a_moment(
    settings: dict[str, Any], after_ms: int
) -> None:
    made = record(**settings)
    assert made.expires_at_ms == NOW_MS + after_ms
    assert record_to_message(made).expires_at == NOW + timedelta(milliseconds=after_ms)


def test_without_either_it_never_expires() -> None:
    assert record().expires_at_ms is None
    assert record_to_message(record()).expires_at is None


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"ttl": 0}, "ttl"),
        ({"ttl": timedelta(-1)}, "ttl"),
        ({"ttl": "1h"}, "ttl"),
        ({"ttl": True}, "ttl"),
        ({"ttl": float("nan")}, "ttl"),
        ({"ttl": 1, "expires_at": NOW}, "ttl"),
        ({"expires_at": datetime(2013, 1, 1)}, "expires_at"),
        ({"expires_at": 7}, "expires_at"),
        ({"ttl": 1e14}, "expires_at_ms"),
        ({"ttl": timedelta.max}, "expires_at_ms"),
        ({"ttl": timedelta.min}, "ttl"),
    ],
    ids=str,
)
def test_S7_what_makes_no_sense_is_refused_before_any_sql(
    settings: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidMessageError) as refused:
        record(**settings)
    assert refused.value.field == field


def test_a_message_that_expired_is_given_to_no_handler_and_is_a_dead_letter() -> None:
    clock = FakeClock(now_ms=NOW_MS)
    broker = MemoryBroker(clock=clock)
    seen: list[Any] = []
    broker.put(Message("offers", "short", ttl=1), Message("offers", "long", ttl=100))
    clock.advance(1_000)

    @consumer("offers", group="g")
    def handler(body: Any) -> None:
        seen.append(body)

    drain(Consumers(handler, MemoryTransport(broker), clock=clock))
    assert seen == ["long"]
    (dead,) = broker.dead_letters("offers", "g")
    assert (dead.sequence, dead.reason) == (0, "expired")
