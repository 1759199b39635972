"""R7: from the send of one message to its handler, while nothing else goes on.

A consumer of the client library waits in a process of its own; this process sends one message, waits
until the handler has it, pauses so that the consumer is waiting in its next pull, and sends the next.
The time runs from before the message is encoded to the handler's first line, by the clock that all
processes of a machine share. The answer of a send comes after `fdatasync`, and so does the delivery.
"""

from __future__ import annotations

import time
from typing import Final

from benchmarks.load import BODY_BYTES, SUBJECT, encode_message
from benchmarks.measure import percentile
from benchmarks.processes import Worker
from benchmarks.result import Conditions, Goal, Row
from benchmarks.suite import Bench
from benchmarks.worker import Control
from qmq_client import Consumers, Message, consumer
from qmq_client.transport.http import HttpTransport
from qmq_client.wire.frame import build_message_frame

#: Longer than the handler, its ack and the next pull take.
PAUSE_S: Final = 0.004
#: Before the figures: connections, imports, first blocks of the files.
WARM_UP_MESSAGES: Final = 20
_TIME_BYTES: Final = 8


def run(bench: Bench) -> list[Row]:
    """Percentiles of each round, in milliseconds."""
    message_count = bench.effort.pick(tiny=10, quick=200, full=500)
    rounds = [run_round(bench, message_count) for _ in range(bench.rounds)]
    conditions = Conditions(
        durability="fdatasync before the delivery",
        client="stock httpx through HttpTransport; @consumer in a process of its own, long poll",
        batch_messages=1,
        message_bytes=BODY_BYTES,
        written_bytes=sorted(written for _, _, written in rounds)[len(rounds) // 2],
        note=f"{message_count} messages per round, {1000 * PAUSE_S:.0f} ms after each arrival",
    )
    handled, answered = [times for times, _, _ in rounds], [times for _, times, _ in rounds]
    figures = [
        ("send → handler, p50", handled, 0.5, Goal(bound=1.5, is_floor=False)),
        ("send → handler, p99", handled, 0.99, Goal(bound=5, is_floor=False)),
        ("send → durable answer, p50", answered, 0.5, None),
        ("send → durable answer, p99", answered, 0.99, None),
    ]
    return [
        Row(
            figure=figure,
            unit="ms",
            samples=tuple(percentile(times, share) for times in rounds_of_times),
            conditions=conditions,
            goal=goal,
        )
        for figure, rounds_of_times, share, goal in figures
    ]


def run_round(bench: Bench, message_count: int) -> tuple[list[float], list[float], int]:
    """Milliseconds to the handler and to the answer of each message, and bytes written."""
    with bench.processes() as processes:
        broker = processes.start_broker()
        worker = processes.start_worker(f"{__name__}:receive", broker_url=broker.url)
        worker.hear()
        transport = HttpTransport(broker.url)
        try:
            for _ in range(WARM_UP_MESSAGES):
                send_one(transport, worker)
            written_bytes = broker.written_bytes()
            times = [send_one(transport, worker) for _ in range(message_count)]
            written_bytes = broker.written_bytes() - written_bytes
        finally:
            transport.close()
    return [time[0] for time in times], [time[1] for time in times], written_bytes


def send_one(transport: HttpTransport, worker: Worker) -> tuple[float, float]:
    """Milliseconds until the handler had the message and until the broker answered."""
    time.sleep(PAUSE_S)
    sent_ns = time.monotonic_ns()
    body = sent_ns.to_bytes(_TIME_BYTES, "big").ljust(BODY_BYTES, b".")
    transport.send(build_message_frame({SUBJECT: [encode_message(Message(SUBJECT, body))]}))
    answered_ns = time.monotonic_ns()
    handled_ns: int = worker.hear()
    return handled_ns / 1e6, (answered_ns - sent_ns) / 1e6


def receive(control: Control, *, broker_url: str) -> None:
    """The consumer process; ended by its parent."""

    @consumer(SUBJECT, group="board")
    def on_message(message: Message) -> None:
        arrived_ns = time.monotonic_ns()
        control.tell(arrived_ns - int.from_bytes(message.body[:_TIME_BYTES], "big"))

    control.tell("ready")
    Consumers([on_message], broker_url).run()
