"""Who reads the log learns of each message that its group gets no more, and of no other."""

from __future__ import annotations

from typing import Any

import pytest

from qmq_client import Delivery, Reject, Retry, consumer, pull
from qmq_client.testing import MemoryTransport, drain
from tests.client.consumer.kit import GROUP, SUBJECT, Bench

SECOND = 1_000
HOUR = 3_600_000


def lines(caplog: pytest.LogCaptureFixture, event: str) -> list[str]:
    return [one for one in caplog.messages if one.startswith(f"{event} ")]


def dead_letters(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What is said of each, from its sequence on."""
    return [line.partition("sequence=")[2] for line in lines(caplog, "dead_letter")]


def raising(error: BaseException, **settings: Any) -> Any:
    @consumer(SUBJECT, group=GROUP, **settings)
    def handler(body: object) -> None:
        raise error

    return handler


@pytest.mark.parametrize("error", [ValueError("no"), Retry(1)], ids=["error", "retry"])
def test_O7_a_message_that_used_up_its_attempts_is_told_to_be_a_dead_letter(
    bench: Bench, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    (message_id,) = bench.put(1)
    for attempt in (1, 2, 3):
        assert not lines(caplog, "dead_letter"), f"before attempt {attempt}"
        bench.drain(raising(error, max_attempts=3))
        bench.clock.advance(10 * SECOND)
    (line,) = lines(caplog, "dead_letter")
    (dead,) = bench.broker.dead_letters(SUBJECT, GROUP)
    assert line == (
        f"dead_letter consumer=orders/audit message_id={message_id} sequence=0 attempt=3 "
        f"reason=attempts_used_up error={dead.error}"
    )


def test_O7_a_rejected_message_is_told_to_be_a_dead_letter(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    (message_id,) = bench.put(1)
    bench.drain(raising(Reject("no order\ndead_letter forged=1")))
    (line,) = lines(caplog, "dead_letter")
    assert line == (
        f"dead_letter consumer=orders/audit message_id={message_id} sequence=0 attempt=1 "
        "reason=rejected error=no order\\ndead_letter forged=1"
    )
    (level,) = [one.levelname for one in caplog.records if one.getMessage() == line]
    assert level == "ERROR"


def test_O7_a_message_that_cannot_be_read_is_told_to_be_a_dead_letter(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    @consumer(SUBJECT, group=GROUP)
    def handler(body: int) -> None: ...

    bench.put("no number", 2)
    bench.drain(handler)
    (line,) = lines(caplog, "dead_letter")
    assert "sequence=0 attempt=1 reason=rejected error=malformed: " in line


def test_O7_outcomes_by_hand_are_reported_where_they_make_dead_letters(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    kept: list[Delivery] = []

    @consumer(SUBJECT, group=GROUP, auto_ack=False, max_attempts=1)
    def handler(delivery: Delivery) -> None:
        kept.append(delivery)

    bench.put(1, 2, 3)
    consumers = bench.consumers(handler)
    drain(consumers)
    kept[0].ack()
    kept[1].nack(error="never again")
    kept[2].reject("odd")
    consumers.members[0].settle_once()
    assert dead_letters(caplog) == [
        "1 attempt=1 reason=attempts_used_up error=never again",
        "2 attempt=1 reason=rejected error=odd",
    ]


def test_O7_a_block_of_pull_tells_its_dead_letters(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.put(1, 2, 3)
    transport = MemoryTransport(bench.broker)
    with pull(transport, subject=SUBJECT, group=GROUP, max_attempts=1) as deliveries:
        deliveries[0].ack()
        deliveries[1].reject("odd")
    assert dead_letters(caplog) == [
        "1 attempt=1 reason=rejected error=odd",
        "2 attempt=1 reason=attempts_used_up error=left without an outcome",
    ]


def test_what_was_not_begun_with_is_not_told_to_be_a_dead_letter(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.put(1)
    consumers = bench.consumers(raising(ValueError(), max_attempts=1))
    (member,) = consumers.members
    member.pull_once(is_blocking=False)
    assert member.stop() == 1
    assert member.settle_once().count == 1
    assert not lines(caplog, "dead_letter")
    assert not bench.broker.dead_letters(SUBJECT, GROUP)


def test_a_rejection_that_comes_too_late_is_told_to_be_stale_and_no_dead_letter(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.put(1)
    consumers = bench.consumers(raising(Reject("odd")))
    (member,) = consumers.members
    member.pull_once(is_blocking=False)
    member.work_once(is_blocking=False)
    bench.clock.advance(HOUR)
    member.settle_once()
    assert len(lines(caplog, "stale_outcomes")) == 1
    assert not lines(caplog, "dead_letter")


def test_a_rejection_whose_answer_was_lost_is_reported_once(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.put(1)
    consumers = bench.consumers(raising(Reject("odd")))
    (member,) = consumers.members
    member.pull_once(is_blocking=False)
    member.work_once(is_blocking=False)
    bench.broker.faults.lost_answers = 1
    assert member.settle_once().has_failed
    assert not lines(caplog, "dead_letter"), "nobody knows yet"
    assert member.settle_once().count == 1
    assert len(lines(caplog, "dead_letter")) == 1


@pytest.mark.parametrize(
    "error", [ValueError("no"), Retry(), Reject("no")], ids=lambda one: type(one).__name__
)
def test_what_comes_at_most_once_and_fails_is_told_to_be_dropped(
    bench: Bench, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    (message_id,) = bench.put(1)
    bench.drain(raising(error, at_most_once=True))
    (line,) = lines(caplog, "messages_dropped")
    assert f"messages=1 first_message_id={message_id} error=" in line
    assert str(error) in line
    assert not lines(caplog, "dead_letter")
