"""What the wire costs per message, as rows: the steps of `wire.py`, one call of it for each round."""

from __future__ import annotations

from benchmarks.result import Conditions, Row
from benchmarks.suite import Bench
from benchmarks.wire import BATCH_MESSAGES, BODY_BYTES, bench_wire


def run(bench: Bench) -> list[Row]:
    """Microseconds per message of each step."""
    repetitions = bench.effort.pick(tiny=1, quick=10, full=20)
    samples: dict[str, list[float]] = {}
    for _ in range(bench.rounds):
        for step in bench_wire(rounds=1, repetitions=repetitions):
            samples.setdefault(str(step["name"]), []).append(float(step["median"]) / 1000)
    conditions = Conditions(
        durability="none: processor only",
        client="one thread, qmq_client.wire",
        batch_messages=BATCH_MESSAGES,
        message_bytes=BODY_BYTES,
    )
    return [
        Row(figure=name, unit="µs per message", samples=tuple(times), conditions=conditions)
        for name, times in samples.items()
    ]
