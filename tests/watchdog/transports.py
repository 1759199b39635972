"""Transports with a will of their own, around the broker in memory, and what they brought it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

from qmq_client.clock import Clock
from qmq_client.errors import BrokerRefusedError
from qmq_client.transport.memory import MemoryBroker, MemoryTransport
from qmq_client.wire.frame import parse_message_frame
from qmq_client.wire.requests import ErrorAnswer, SendAnswer
from tests.watchdog.rows import SUBJECT


class PickyTransport(MemoryTransport):
    """Refuses every frame with one of these messages in it, and does not say which it was."""

    def __init__(self, broker: MemoryBroker, bad: Collection[bytes]) -> None:
        super().__init__(broker)
        self.bad = set(bad)

    def send(self, frame: bytes) -> SendAnswer:
        if self.bad & set(parse_message_frame(frame).message_ids()):
            self.calls["send"] += 1
            raise BrokerRefusedError(422, ErrorAnswer(code="odd", message="something is odd"))
        return super().send(frame)


class ForbiddingTransport(MemoryTransport):
    """Takes nothing of this subject, until told otherwise."""

    forbids = True

    def send(self, frame: bytes) -> SendAnswer:
        if self.forbids:
            answer = ErrorAnswer(code="forbidden", message="no", field="subject", value=SUBJECT)
            raise BrokerRefusedError(403, answer)
        return super().send(frame)


class WatchedTransport(MemoryTransport):
    """Calls somebody before each frame goes out, and tells when one was accepted."""

    def __init__(self, broker: MemoryBroker, on_send: Callable[[], None] = lambda: None) -> None:
        super().__init__(broker)
        self._on_send = on_send
        self.accepted = threading.Event()

    def send(self, frame: bytes) -> SendAnswer:
        self._on_send()
        answer = super().send(frame)
        self.accepted.set()
        return answer


class HandClock(Clock):
    """A clock that moves when a test moves it."""

    def __init__(self, now_ms: int = 0) -> None:
        self.wall_ms = now_ms
        self.elapsed_s = 0.0
        #: Seconds that pass each time somebody looks.
        self.step_s = 0.0

    def now_ms(self) -> int:
        return self.wall_ms

    def monotonic_s(self) -> float:
        self.elapsed_s += self.step_s
        return self.elapsed_s

    def sleep(self, seconds: float) -> None:
        raise AssertionError("a sweep never sleeps")


def sent_ids(broker: MemoryBroker) -> list[str | None]:
    """What the broker was given, in order."""
    return [message.message_id for message in broker.messages(SUBJECT)]
