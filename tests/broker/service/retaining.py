"""A broker with small segments whose messages soon grow old: what tests of its retention share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.broker.service.rig import STORE, SUBJECT, Rig

#: Segments of a few messages; ids are forgotten at once, so that they hold nothing back.
RETAINING = replace(
    STORE,
    segment_bytes=2048,
    action_segment_bytes=1024,
    growth_bytes=512,
    retain_ms=60_000,
    snapshot_bytes=1024 * 1024,
    dedupe_ids=1,
    checkpoint_ms=1,
    queue_flush_bytes=1,
)
BODY = b"b" * 300
HOUR_MS = 3_600_000
LONG_MS = 12 * HOUR_MS


def with_options(rig: Rig, **changes: Any) -> None:
    rig._store_options = replace(RETAINING, **changes)
    rig.restart()


def send(rig: Rig, count: int, subject: str = SUBJECT) -> None:
    for _ in range(count):
        rig.send(BODY, subject=subject)
        rig.clock.pass_ms(5)
        rig.broker.writer.step()


def keep_house(rig: Rig, ms: int = HOUR_MS) -> int:
    """Let time pass and the housekeeping be done; returns where the log begins."""
    for _ in range(3):
        rig.clock.pass_ms(ms)
        rig.broker.step()
        rig.broker.writer.step()
        rig.broker._action_sync.step()
    return rig.store.first_offset


def first_sequence(rig: Rig) -> int:
    queue = rig.store.queue(SUBJECT)
    assert queue is not None
    return queue.first_sequence


def files(rig: Rig, folder: str) -> list[str]:
    return sorted(path.name for path in (rig.directory / folder).iterdir())


def act(rig: Rig, rounds: int) -> None:
    """Pull, ack, nack, reject, extend, let leases end: something of every kind."""
    for number in range(rounds):
        send(rig, 3)
        consumer = f"c{number % 3}"
        given = rig.pull(max_messages=4, consumer=consumer, lease_ms=60_000 + number)
        kind = (given.ack, given.nack, given.reject, None, given.ack)[number % 5]
        if kind is not None and given.records:
            rig.settle(kind(), consumer=consumer)
        rig.pass_ms(2_000)
