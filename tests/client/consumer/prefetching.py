"""A prefetch with messages and workers."""

from __future__ import annotations

import threading

from qmq_client.consumer.delivery import Received
from qmq_client.consumer.options import ConsumerOptions
from qmq_client.consumer.prefetch import Prefetch
from qmq_client.testing import FakeClock

LONG_S = 30.0


def received(*attempts: int) -> list[Received]:
    return [
        Received(
            subject="s",
            token=1,
            sequence=number,
            pull_sequence=number,
            attempt=attempt,
            record=bytes(36),
            lease_ends_at_s=30.0,
        )
        for number, attempt in enumerate(attempts)
    ]


def prefetch_of(clock: FakeClock | None = None, **settings: int) -> Prefetch:
    options = ConsumerOptions(subject="s", group="g", **settings)  # type: ignore[arg-type]  # integers alone
    return Prefetch(options, clock or FakeClock())


def taken_by(prefetch: Prefetch) -> list[Received]:
    """What a worker is to begin with now."""
    running = prefetch.take(is_blocking=False)
    return list(running.received) if running else []


def sizes(prefetch: Prefetch) -> list[int]:
    taken: list[int] = []
    while running := prefetch.take(is_blocking=False):
        taken.append(len(running.received))
        prefetch.finish(len(running.received))
    return taken


def handle_one(prefetch: Prefetch, clock: FakeClock, message_ms: int, *, settled: int = 1) -> None:
    """A message comes, and its handler takes so long."""
    prefetch.put(received(1))
    take_one(prefetch, clock, message_ms, settled=settled)


def take_one(prefetch: Prefetch, clock: FakeClock, message_ms: int, *, settled: int = 1) -> None:
    """The handler of the next message takes so long."""
    prefetch.take(is_blocking=False)
    clock.advance(message_ms)
    prefetch.finish(settled)


def working(prefetch: Prefetch, *, until: threading.Event) -> threading.Thread:
    """A worker that takes one batch and is not done with it before `until`."""

    def work() -> None:
        running = prefetch.take(is_blocking=True)
        until.wait(LONG_S)
        if running:
            prefetch.finish(len(running.received))

    worker = threading.Thread(target=work)
    worker.start()
    return worker
