"""What the wire costs per message: encode records, build a frame, parse it, decode its records.

Batches of 500 messages of 1 KiB, the size that R1 to R4 of the performance goals are stated for. Pure
CPU: no disk, no network, no other process. Each figure is one round's time divided by its messages,
over several rounds, so that the spread is seen beside the median.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable

from qmq_client.wire.deliveries import (
    DeliveriesHead,
    DeliveryRun,
    build_deliveries,
    parse_deliveries,
)
from qmq_client.wire.frame import build_message_frame, parse_message_frame
from qmq_client.wire.limits import DEFAULT_LIMITS
from qmq_client.wire.message_id import MessageIds
from qmq_client.wire.record import BodyKind, Record, decode_record, encode_record

BATCH_MESSAGES = 500
BODY_BYTES = 1024
ROUNDS = 5
#: Repetitions in a round: some 50 ms, long enough that the clock's step does not show.
REPETITIONS = 20

Row = dict[str, str | float]


def bench_wire(*, rounds: int = ROUNDS, repetitions: int = REPETITIONS) -> list[Row]:
    """Nanoseconds per message of each step; one row with min, median and max for each."""
    records = make_records()
    encoded = [encode_record(record) for record in records]
    frame = build_message_frame({"flight.departed": encoded})
    answer = make_answer(encoded)
    steps: dict[str, Callable[[], object]] = {
        "encode record": lambda: [encode_record(record) for record in records],
        "build frame": lambda: build_message_frame({"flight.departed": encoded}),
        "parse frame": lambda: parse_message_frame(frame),
        "read message ids": parse_message_frame(frame).message_ids,
        "build deliveries": lambda: make_answer(encoded),
        "parse deliveries": lambda: parse_deliveries(
            answer, frame_bytes_max=DEFAULT_LIMITS.frame_bytes
        ),
        "decode record": lambda: [decode_record("flight.departed", data) for data in encoded],
    }
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):  # interleaved: a slow moment of the machine meets every step
        for name, step in steps.items():
            samples[name].append(time_step(step, repetitions) / BATCH_MESSAGES)
    return [
        {
            "name": f"wire: {name}",
            "unit": "ns/message",
            "min": round(min(times), 1),
            "median": round(statistics.median(times), 1),
            "max": round(max(times), 1),
        }
        for name, times in samples.items()
    ]


def make_records() -> list[Record]:
    """One batch with key, tag and header; its bodies do not repeat."""
    ids = MessageIds(0x5EED)
    source = random.Random(7)
    return [
        Record(
            message_id=ids.next_id(),
            subject="flight.departed",
            body=source.randbytes(BODY_BYTES),
            body_kind=BodyKind.JSON,
            key="N14228",
            tags=("severe",),
            headers=(("trace", "00-4bf92f3577b34da6a3ce929d0e0e4736"),),
            born_at_ms=1_357_034_220_000,
        )
        for _ in range(BATCH_MESSAGES)
    ]


def make_answer(encoded: list[bytes]) -> bytes:
    """A pull's answer with these records as one run."""
    head = DeliveriesHead(
        subject="flight.departed",
        token=1,
        lease_ms=30_000,
        first_pull_sequence=0,
        runs=(DeliveryRun(first_sequence=0, count=len(encoded), attempt=1),),
    )
    return build_deliveries(head, [len(data) for data in encoded], encoded)


def time_step(step: Callable[[], object], repetitions: int) -> float:
    """Nanoseconds of one call, the mean of `repetitions`."""
    started_ns = time.perf_counter_ns()
    for _ in range(repetitions):
        step()
    return (time.perf_counter_ns() - started_ns) / repetitions


if __name__ == "__main__":
    for row in bench_wire():
        print("{name:24} {min:>9} {median:>9} {max:>9} {unit}".format(**row))
