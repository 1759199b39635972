"""What tests of the publisher do again and again."""

from __future__ import annotations

import threading
from typing import Any

from sqlalchemy.orm import Session

from qmq_client.outbox.row import BatchOutcome
from qmq_client.publishing.ordering import order_batch
from qmq_client.publishing.publish import publish_rows
from qmq_client.publishing.publisher import Publisher
from qmq_client.retry import Backoff
from qmq_client.testing import MemoryBroker, MemoryTransport
from qmq_client.wire.requests import SendAnswer
from tests.client.world import Statements, World

WATCHDOG = b"w" * 16
_PATIENCE_S = 60.0


def publisher_threads() -> list[threading.Thread]:
    """Those of all producers of this process."""
    return [thread for thread in threading.enumerate() if thread.name == "qmq-publisher"]


class GatedTransport(MemoryTransport):
    """Holds each send until it is let go, or closed."""

    def __init__(self, broker: MemoryBroker) -> None:
        super().__init__(broker)
        self.arrived = threading.Event()
        self.go_on = threading.Event()

    def send(self, frame: bytes) -> SendAnswer:
        self.arrived.set()
        assert self.go_on.wait(_PATIENCE_S)
        return super().send(frame)

    def close(self) -> None:
        super().close()
        self.go_on.set()


def send_each(world: World, count: int) -> list[str]:
    """Messages, each in a transaction of its own."""
    ids: list[str] = []
    for i in range(count):
        with Session(world.engine) as session, session.begin():
            ids.append(world.send(f"{i}", session))
    return ids


def sibling_statements(world: World) -> Statements:
    return Statements(world.producer._store._own.engine)


def sweep(world: World, *, keep_ms: int | None = None) -> BatchOutcome:
    """What a watchdog does with whatever is due."""
    rows = world.store.claim(token=WATCHDOG, limit=1000, lease_ms=5000)
    ordered = order_batch(rows, world.store)
    world.store.settle(ordered.returned(), token=WATCHDOG)
    outcome = publish_rows(
        ordered.ready,
        transport=world.transport,
        backoff=Backoff(),
        max_attempts=50,
        random=lambda: 0.0,
    )
    world.store.settle(outcome, token=WATCHDOG, keep_ms=keep_ms)
    return outcome


class Answers:
    """A transport that answers each send as told."""

    def __init__(self, world: World, change: Any) -> None:
        self.world = world
        self.change = change

    def send(self, frame: bytes) -> SendAnswer:
        answer: SendAnswer = self.change(self.world.transport.send(frame))
        return answer

    def pull(self, request: Any) -> Any:
        raise AssertionError("a publisher neither pulls nor settles")

    settle = pull

    def close(self) -> None:
        pass


def with_transport(world: World, transport: Any) -> Publisher:
    world.producer._publisher._transport = transport
    return world.producer._publisher
