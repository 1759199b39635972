"""When a message is due: what a sender may say, and what becomes of it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from qmq_client.message import Message, message_to_record, record_to_message
from qmq_client.wire.delayed import record_due_at_ms
from qmq_client.wire.errors import InvalidMessageError
from qmq_client.wire.limits import DEFAULT_LIMITS, Limits
from qmq_client.wire.record import encode_record

NOW = datetime(2026, 3, 29, 0, 30, tzinfo=UTC)
NOW_MS = round(NOW.timestamp() * 1000)
BERLIN = ZoneInfo("Europe/Berlin")


def due(now_ms: int = NOW_MS, **fields: Any) -> int | None:
    message = Message("flight", **fields)
    return message_to_record(message, new_id=bytes(16), now_ms=now_ms).due_at_ms


@pytest.mark.parametrize(
    ("delay", "ms"),
    [
        (timedelta(minutes=5), 300_000),
        (1.5, 1_500),
        (3, 3_000),
        (0.0001, 1),
        (timedelta(microseconds=1), 1),
        (timedelta(days=731), 731 * 24 * 3_600_000),
    ],
)
def test_D1_a_delay_counts_from_the_send_and_is_rounded_up(
    delay: timedelta | float, ms: int
) -> None:
    assert due(delay=delay) == NOW_MS + ms


@pytest.mark.parametrize("delay", [0, -1, timedelta(0), timedelta(days=-1), -0.0])
def test_no_delay_is_at_once(delay: timedelta | float) -> None:
    assert due(delay=delay) is None


def test_a_moment_that_is_past_is_at_once() -> None:
    assert due(deliver_at=NOW - timedelta(days=400)) is None
    assert due(deliver_at=NOW) is None


def test_a_moment_is_the_same_in_every_zone_and_across_a_change_of_summer_time() -> None:
    moment = datetime(2026, 3, 29, 3, 30, tzinfo=BERLIN)  # an hour after the clocks went forward
    assert due(deliver_at=moment) == NOW_MS + 3_600_000
    assert due(deliver_at=moment.astimezone(timezone(timedelta(hours=-9)))) == NOW_MS + 3_600_000
    assert due(deliver_at=NOW + timedelta(microseconds=1)) == NOW_MS + 1


@pytest.mark.parametrize("moment", [datetime(2027, 1, 1), "2027-01-01T00:00:00Z", 1_900_000_000])
def test_a_moment_without_a_zone_is_refused(moment: Any) -> None:
    with pytest.raises(InvalidMessageError, match="deliver_at") as caught:
        due(deliver_at=moment)
    assert caught.value.limit == "a datetime with a time zone"


@pytest.mark.parametrize("delay", [True, "5", float("nan"), float("inf")])
def test_a_delay_that_is_no_time_is_refused(delay: Any) -> None:
    with pytest.raises(InvalidMessageError, match="delay"):
        due(delay=delay)


@pytest.mark.parametrize("field", ["delay", "ttl"])
@pytest.mark.parametrize("span", [1e300, 1e306, 10**400, 10**5000], ids=range(4))
def test_D5_a_span_beyond_all_measure_is_refused_in_a_few_words(field: str, span: float) -> None:
    message = Message("flight", **{field: span})  # type: ignore[arg-type]  # chosen by name
    with pytest.raises(InvalidMessageError) as caught:
        encode_record(message_to_record(message, new_id=bytes(16), now_ms=NOW_MS))
    assert len(str(caught.value)) < 300


def test_one_of_delay_and_moment_is_enough() -> None:
    with pytest.raises(InvalidMessageError, match="no deliver_at with it"):
        due(delay=1, deliver_at=NOW)


def test_D5_a_time_beyond_two_years_is_refused_and_not_moved() -> None:
    last_ms = DEFAULT_LIMITS.delay_ms
    assert due(delay=timedelta(milliseconds=last_ms)) == NOW_MS + last_ms
    with pytest.raises(InvalidMessageError, match="ms ahead") as caught:
        due(delay=timedelta(milliseconds=last_ms + 1))
    assert caught.value.field == "delay"
    assert caught.value.limit == f"{last_ms} ms ahead (732.0 days)"
    with pytest.raises(InvalidMessageError, match="deliver_at"):
        due(deliver_at=datetime(9999, 1, 1, tzinfo=UTC))


def test_D5_the_limit_is_a_setting() -> None:
    limits = Limits(delay_ms=1_000)
    for delay, is_refused in ((1.0, False), (1.001, True)):
        message = Message("flight", delay=delay)
        if not is_refused:
            message_to_record(message, new_id=bytes(16), now_ms=NOW_MS, limits=limits)
            continue
        with pytest.raises(InvalidMessageError, match="1000 ms ahead"):
            message_to_record(message, new_id=bytes(16), now_ms=NOW_MS, limits=limits)


def test_a_handler_sees_when_its_message_was_due() -> None:
    record = message_to_record(Message("flight", delay=60), new_id=bytes(16), now_ms=NOW_MS)
    assert record_to_message(record).deliver_at == NOW + timedelta(minutes=1)
    assert record_due_at_ms(encode_record(record)) == NOW_MS + 60_000
    at_once = message_to_record(Message("flight"), new_id=bytes(16), now_ms=NOW_MS)
    assert record_to_message(at_once).deliver_at is None
    assert record_due_at_ms(encode_record(at_once)) is None
