"""Outcomes that a handler gives by hand, now or later: the first counts, and what has none comes again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from qmq_client.consumer import Consumers, Delivery, consumer
from qmq_client.consumer.delivery import Received
from qmq_client.errors import ConfigurationError
from qmq_client.testing import drain
from tests.client.consumer.kit import GROUP, SUBJECT, Bench

SECOND = 1_000


def by_hand(**settings: Any) -> tuple[Any, list[Delivery]]:
    kept: list[Delivery] = []

    @consumer(SUBJECT, group=GROUP, auto_ack=False, **settings)
    def handler(delivery: Delivery) -> None:
        kept.append(delivery)

    return handler, kept


def settle_all(consumers: Consumers) -> None:
    for member in consumers.members:
        member.settle_once()


def test_settled_by_hand_a_message_is_done_when_its_owner_says_so(bench: Bench) -> None:
    handler, kept = by_hand()
    bench.put(1, 2, 3)
    consumers = bench.consumers(handler)
    drain(consumers)
    assert [one.message.body for one in kept] == [1, 2, 3]
    assert bench.broker.in_flight(SUBJECT, GROUP) == 3
    assert kept[1].ack()
    settle_all(consumers)
    assert bench.broker.in_flight(SUBJECT, GROUP) == 2
    assert kept[0].ack()
    assert kept[2].ack()
    settle_all(consumers)
    assert bench.broker.lag(SUBJECT, GROUP) == 0
    assert consumers.members[0].prefetch.count == 0


def test_what_a_slow_handler_keeps_does_not_keep_it_from_the_next_message(bench: Bench) -> None:
    kept: list[Delivery] = []

    @consumer(SUBJECT, group=GROUP, auto_ack=False)
    def collect(delivery: Delivery) -> None:
        bench.clock.advance(SECOND)
        kept.append(delivery)

    bench.put(1, 2, 3)
    drain(bench.consumers(collect))
    assert [one.message.body for one in kept] == [1, 2, 3]


def test_the_first_outcome_by_hand_counts(bench: Bench) -> None:
    handler, kept = by_hand()
    bench.put(1)
    consumers = bench.consumers(handler)
    drain(consumers)
    assert kept[0].reject("no use")
    assert not kept[0].ack()
    assert not kept[0].nack()
    settle_all(consumers)
    assert [one.error for one in bench.broker.dead_letters(SUBJECT, GROUP)] == ["no use"]


def test_given_back_by_hand_a_message_comes_again_when_asked(bench: Bench) -> None:
    handler, kept = by_hand()
    bench.put(1)
    consumers = bench.consumers(handler)
    drain(consumers)
    kept[0].nack(after=5, error="not now")
    drain(consumers)
    assert len(kept) == 1
    bench.clock.advance(5 * SECOND)
    drain(consumers)
    assert [one.attempt for one in kept] == [1, 2]


def test_extended_by_hand_a_lease_holds_after_the_handler_returned(bench: Bench) -> None:
    handler, kept = by_hand(lease_ms=10 * SECOND)
    bench.put(1)
    consumers = bench.consumers(handler)
    drain(consumers)
    kept[0].extend(60 * SECOND)
    drain(consumers)
    bench.clock.advance(59 * SECOND)
    drain(consumers)
    assert bench.broker.in_flight(SUBJECT, GROUP) == 1
    assert kept[0].ack()
    settle_all(consumers)
    assert bench.broker.lag(SUBJECT, GROUP) == 0


def test_C3_left_without_an_outcome_a_message_comes_again_after_its_lease(bench: Bench) -> None:
    handler, kept = by_hand(lease_ms=10 * SECOND)
    bench.put(1)
    consumers = bench.consumers(handler)
    drain(consumers)
    for _ in range(2):  # the lease, then the backoff
        bench.clock.advance(10 * SECOND)
        drain(consumers)
    assert [one.attempt for one in kept] == [1, 2]
    assert not kept[0].ack()


def test_with_automatic_acks_a_hand_may_extend_but_not_settle(bench: Bench) -> None:
    @consumer(SUBJECT, group=GROUP)
    def handler(delivery: Delivery) -> None:
        delivery.extend(60_000)
        for settle in (delivery.ack, delivery.nack, delivery.reject):
            with pytest.raises(ConfigurationError, match="auto_ack"):
                settle()

    bench.put(1)
    bench.drain(handler)
    assert bench.broker.lag(SUBJECT, GROUP) == 0


@pytest.mark.parametrize("lease_ms", [0, -5, 10**12])
def test_a_lease_nobody_grants_is_refused(bench: Bench, lease_ms: int) -> None:
    handler, kept = by_hand()
    bench.put(1)
    bench.drain(handler)
    with pytest.raises(ConfigurationError, match="lease_ms"):
        kept[0].extend(lease_ms)


def test_what_its_lease_has_left_takes_up_no_room_any_more(bench: Bench) -> None:
    handler, kept = by_hand(lease_ms=10 * SECOND, prefetch_max=1)
    bench.put(1, 2)
    consumers = bench.consumers(handler)
    drain(consumers)
    assert [one.message.body for one in kept] == [1]
    bench.clock.advance(10 * SECOND)
    settle_all(consumers)
    drain(consumers)
    assert [one.message.body for one in kept] == [1, 2]


class Meanwhile(set[Received]):
    """Messages without an outcome; another thread acks them just before they are noted here."""

    def __init__(self, kept: list[Delivery]) -> None:
        self._kept = kept

    def update(self, *others: Iterable[Received]) -> None:
        for one in self._kept:
            one.ack()
        super().update(*others)


def test_settled_by_another_thread_while_its_handler_returns_a_message_leaves_its_room(
    bench: Bench,
) -> None:
    handler, kept = by_hand()
    bench.put(1)
    consumers = bench.consumers(handler)
    (member,) = consumers.members
    member._leases._held = Meanwhile(kept)
    drain(consumers)
    assert member.prefetch.count == 0
    assert bench.broker.lag(SUBJECT, GROUP) == 0
