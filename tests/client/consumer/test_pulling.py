"""`pull`: the loop in the user's own hands."""

from __future__ import annotations

from typing import Any

import pytest

from qmq_client import pull
from qmq_client.errors import BrokerUnreachableError, ConfigurationError
from qmq_client.message import Message
from qmq_client.testing import MemoryBroker, MemoryTransport
from tests.client.consumer.kit import GROUP, SUBJECT, Bench

#: The most that one pull may ask for.
PULLED_MAX = 1_000


@pytest.fixture
def broker() -> MemoryBroker:
    made = MemoryBroker()
    made.put(*[Message(SUBJECT, number) for number in range(5)])
    return made


def pulled(broker: MemoryBroker, **settings: Any) -> Any:
    return pull(MemoryTransport(broker), subject=SUBJECT, group=GROUP, **settings)


def test_outcomes_of_a_block_go_in_one_request_at_its_end(broker: MemoryBroker) -> None:
    transport = MemoryTransport(broker)
    with pull(transport, subject=SUBJECT, group=GROUP) as deliveries:
        assert [one.message.body for one in deliveries] == [0, 1, 2, 3, 4]
        for one in deliveries[:3]:
            one.ack()
        deliveries[3].reject("odd")
        deliveries[4].nack(after=3600)
        assert broker.in_flight(SUBJECT, GROUP) == 5
    assert broker.in_flight(SUBJECT, GROUP) == 0
    assert broker.lag(SUBJECT, GROUP) == 1
    assert transport.calls["settle"] == 1


def test_what_has_no_outcome_comes_again_after_the_backoff_also_on_an_error() -> None:
    bench = Bench()
    bench.put(*range(5))
    broker = bench.broker

    def fail_after_one() -> None:
        with pulled(broker, max_messages=3) as deliveries:
            deliveries[0].ack()
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        fail_after_one()
    bench.clock.advance(900)
    with pulled(broker) as deliveries:
        assert [one.message.body for one in deliveries] == [3, 4]
    bench.clock.advance(2_000)
    with pulled(broker) as deliveries:
        assert [(one.message.body, one.attempt) for one in deliveries] == [
            (1, 2),
            (2, 2),
            (3, 2),
            (4, 2),
        ]


def test_a_malformed_message_is_rejected_and_not_shown(broker: MemoryBroker) -> None:
    (altered,) = broker.put(Message(SUBJECT, "altered"))
    broker.faults.altered_ids.add(altered)
    with pulled(broker) as deliveries:
        assert len(deliveries) == 5
        for one in deliveries:
            one.ack()
    (dead,) = broker.dead_letters(SUBJECT, GROUP)
    assert "checksum" in dead.error


def test_an_empty_pull_asks_nothing_more_of_the_broker() -> None:
    transport = MemoryTransport(MemoryBroker())
    with pull(transport, subject=SUBJECT, group=GROUP, wait_s=0.01) as deliveries:
        assert deliveries == []
    assert transport.calls == {"send": 0, "pull": 1, "settle": 0}


def test_a_lease_is_extended_at_once(broker: MemoryBroker) -> None:
    with pulled(broker, lease_ms=20_000) as deliveries:
        for one in deliveries:
            one.extend(60_000)
        due_ms = broker.next_due_ms(SUBJECT, GROUP)
        assert due_ms is not None
        assert due_ms - broker._clock.now_ms() > 30_000


def test_an_extension_that_fails_takes_no_outcome_along(broker: MemoryBroker) -> None:
    with pulled(broker) as deliveries:
        for one in deliveries[1:]:
            one.ack()
        broker.faults.is_unreachable = True
        with pytest.raises(BrokerUnreachableError):
            deliveries[0].extend(60_000)
        broker.faults.is_unreachable = False
        deliveries[0].ack()
    assert broker.lag(SUBJECT, GROUP) == 0


@pytest.mark.parametrize(("times", "requests"), [(1, 2), (2, 1)])
def test_as_many_outcomes_as_a_pull_gives_go_behind_extensions_that_failed(
    times: int, requests: int
) -> None:
    """What a request has room for is some, or nothing but, extensions that nobody needs any more."""
    broker = MemoryBroker()
    broker.put(*[Message(SUBJECT, number) for number in range(PULLED_MAX)])
    transport = MemoryTransport(broker)
    with pull(transport, subject=SUBJECT, group=GROUP, max_messages=PULLED_MAX) as deliveries:
        assert len(deliveries) == PULLED_MAX
        broker.faults.is_unreachable = True
        for one in deliveries * times:
            with pytest.raises(BrokerUnreachableError):
                one.extend(60_000)
        broker.faults.is_unreachable = False
        before = transport.calls["settle"]
        for number, one in enumerate(deliveries):
            if number % 3:
                one.ack()
            else:
                one.reject("odd")
    assert transport.calls["settle"] - before == requests
    assert broker.in_flight(SUBJECT, GROUP) == broker.lag(SUBJECT, GROUP) == 0
    assert len(broker.dead_letters(SUBJECT, GROUP)) == len(range(0, PULLED_MAX, 3))


def test_C3_an_outcome_that_comes_after_its_lease_is_reported_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench()
    (message_id,) = bench.put(1)
    with pulled(bench.broker, lease_ms=1_000) as deliveries:
        deliveries[0].ack()
        bench.clock.advance(1_000)
    (line,) = [one for one in caplog.messages if one.startswith("stale_outcomes")]
    assert message_id in line
    assert bench.broker.lag(SUBJECT, GROUP) == 1


def test_an_unreachable_broker_is_told_to_the_caller(broker: MemoryBroker) -> None:
    def lose_the_broker() -> None:
        with pulled(broker) as deliveries:
            deliveries[0].ack()
            broker.faults.is_unreachable = True

    with pytest.raises(BrokerUnreachableError):
        lose_the_broker()
    with pytest.raises(BrokerUnreachableError), pulled(broker):
        raise AssertionError("nothing was pulled")


@pytest.mark.parametrize(
    "settings",
    [
        {"max_messages": 0},
        {"max_messages": 2_000},
        {"wait_s": -1},
        {"wait_s": 100},
        {"lease_ms": 1},
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_the_name_it_was_given(
    broker: MemoryBroker, settings: Any
) -> None:
    with pytest.raises(ConfigurationError) as caught, pulled(broker, **settings):
        raise AssertionError("nothing was pulled")
    assert caught.value.setting in settings
