"""Handlers on a broker in memory, with time that moves when told to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from qmq_client.consumer import Consumers
from qmq_client.message import Message
from qmq_client.testing import DrainReport, FakeClock, MemoryBroker, MemoryTransport, drain
from qmq_client.wire.deliveries import Deliveries
from qmq_client.wire.requests import PullRequest
from tests.kit.waiting import wait_for

SUBJECT = "orders"
GROUP = "audit"
#: A test that waits for another thread fails after this long.
WAIT_S = 60.0


@dataclass
class Bench:
    """One broker, one clock, and whatever consumers a test needs."""

    clock: FakeClock = field(default_factory=FakeClock)

    def __post_init__(self) -> None:
        self.broker = MemoryBroker(clock=self.clock)
        self.transport = MemoryTransport(self.broker)

    def put(self, *values: Any) -> list[str]:
        return self.broker.put(*[Message(SUBJECT, value) for value in values])

    def consumers(self, *handlers: Callable[..., Any]) -> Consumers:
        return Consumers(handlers, self.transport, clock=self.clock)

    def consumers_far_away(self, *handlers: Callable[..., Any], answer_ms: int) -> Consumers:
        """Such whose pulls are answered after so long."""
        transport = _FarAway(self.broker, self.clock, answer_ms)
        return Consumers(handlers, transport, clock=self.clock)

    def drain(self, *handlers: Callable[..., Any]) -> DrainReport:
        return drain(self.consumers(*handlers))

    def counters(self, consumers: Consumers) -> dict[str, int]:
        (counted,) = consumers.counters().values()
        return {name: count for name, count in counted.items() if count}


def wait_for_the_stop(consumers: Consumers) -> None:
    """Until a stop that another thread has begun has come to each handler: no more is given to it."""
    wait_for(lambda: all(member.prefetch._is_stopping for member in consumers.members))


class _FarAway(MemoryTransport):
    def __init__(self, broker: MemoryBroker, clock: FakeClock, answer_ms: int) -> None:
        super().__init__(broker)
        self._own_clock = clock
        self._answer_ms = answer_ms

    def pull(self, request: PullRequest) -> Deliveries:
        answer = super().pull(request)
        self._own_clock.advance(self._answer_ms)
        return answer
