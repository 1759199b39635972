"""Batches whose messages do not all end alike."""

from __future__ import annotations

import pytest

from qmq_client.consumer import Delivery, consumer
from qmq_client.errors import ConfigurationError
from qmq_client.testing import drain
from tests.client.consumer.kit import GROUP, SUBJECT, Bench


def test_single_messages_of_a_batch_are_settled_by_hand_and_the_rest_by_the_return(
    bench: Bench,
) -> None:
    seen: list[list[int]] = []

    @consumer(SUBJECT, group=GROUP, batch_size=5)
    def handler(deliveries: list[Delivery]) -> None:
        seen.append([one.message.body for one in deliveries])
        for one in deliveries:
            if one.message.body == 2 and one.attempt == 1:
                assert one.nack(after=1, error="later")
            if one.message.body == 3:
                assert one.reject("never")

    bench.put(1, 2, 3, 4)
    consumers = bench.consumers(handler)
    drain(consumers)
    assert bench.broker.lag(SUBJECT, GROUP) == 1
    (dead,) = bench.broker.dead_letters(SUBJECT, GROUP)
    assert (dead.sequence, dead.error) == (2, "never")
    bench.clock.advance(1_000)
    drain(consumers)
    assert seen == [[1, 2, 3, 4], [2]]
    assert bench.broker.lag(SUBJECT, GROUP) == 0
    counted = bench.counters(consumers)
    assert (counted["acked"], counted["nacked"], counted["rejected"]) == (3, 1, 1)


def test_what_was_settled_by_hand_stays_so_when_the_batch_fails(bench: Bench) -> None:
    seen: list[list[int]] = []

    @consumer(SUBJECT, group=GROUP, batch_size=3)
    def handler(bodies: list[int], deliveries: list[Delivery]) -> None:
        seen.append(bodies)
        if len(bodies) > 1:
            assert deliveries[0].ack()
            raise ValueError("the others come again, each alone")

    bench.put(1, 2, 3)
    consumers = bench.consumers(handler)
    drain(consumers)
    bench.clock.advance(2_000)
    drain(consumers)
    assert seen == [[1, 2, 3], [2], [3]]
    assert bench.broker.lag(SUBJECT, GROUP) == 0


def test_a_batch_of_async_handlers_is_settled_by_hand_too(bench: Bench) -> None:
    @consumer(SUBJECT, group=GROUP, batch_size=2)
    async def handler(deliveries: list[Delivery]) -> None:
        deliveries[0].reject("never")

    bench.put(1, 2)
    consumers = bench.consumers(handler)
    drain(consumers)
    consumers.stop()
    assert [dead.sequence for dead in bench.broker.dead_letters(SUBJECT, GROUP)] == [0]
    assert bench.broker.lag(SUBJECT, GROUP) == 0


def test_where_the_outcome_is_that_of_the_call_settling_by_hand_is_refused(bench: Bench) -> None:
    refused: list[ConfigurationError] = []

    @consumer(SUBJECT, group=GROUP)
    def handler(delivery: Delivery) -> None:
        with pytest.raises(ConfigurationError, match="auto_ack") as caught:
            delivery.reject("never")
        refused.append(caught.value)

    bench.put(1)
    bench.drain(handler)
    assert len(refused) == 1
    assert bench.broker.lag(SUBJECT, GROUP) == 0, "the handler returned, so it is acked"
