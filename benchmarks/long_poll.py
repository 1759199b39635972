"""R7: from the send of one message to its handler, while nothing else goes on.

A consumer of the client library waits in a process of its own; this process sends one message, waits
until the handler has it, pauses so that the consumer is waiting in its next pull, and sends the next.
The time runs from before the message is encoded to the handler's first line, by the clock that all
processes of a machine share. The answer of a send comes after `fdatasync`, and so does the delivery.

In turns with it, message by message, the same is done with bare httpx and a server that does nothing
but write and sync (`long_poll_floor.py`): what of the time is this machine's, and what is ours.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from typing import Final

import httpx

from benchmarks import long_poll_floor
from benchmarks.load import BODY_BYTES, SUBJECT, age_ns, encode_message, stamped_body
from benchmarks.measure import interleave, paired_ratios, percentile
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
OURS: Final = "product"
FLOOR: Final = "floor"
#: Of one message: milliseconds to the handler, and to the answer.
Times = tuple[float, float]


def run(bench: Bench) -> list[Row]:
    """Percentiles of each round, in milliseconds."""
    message_count = bench.effort.pick(tiny=10, quick=200, full=500)
    rounds = [run_round(bench, message_count) for _ in range(bench.rounds)]
    written_bytes = sorted(written for _, written in rounds)[len(rounds) // 2]
    samples = {
        (way, part, share): [
            percentile([time[part] for time in times[way]], share) for times, _ in rounds
        ]
        for way in (OURS, FLOOR)
        for part in (0, 1)
        for share in (0.5, 0.99)
    }
    figures = [
        ("send → handler, p50", OURS, 0, 0.5, Goal(bound=1.5, is_floor=False)),
        ("send → handler, p99", OURS, 0, 0.99, Goal(bound=5, is_floor=False)),
        ("send → durable answer, p50", OURS, 1, 0.5, None),
        ("send → durable answer, p99", OURS, 1, 0.99, None),
        ("floor: send → handler, p50", FLOOR, 0, 0.5, None),
        ("floor: send → handler, p99", FLOOR, 0, 0.99, None),
        ("floor: send → durable answer, p50", FLOOR, 1, 0.5, None),
    ]
    rows = [
        Row(
            figure=figure,
            unit="ms",
            samples=tuple(samples[way, part, share]),
            conditions=conditions_of(way, message_count, written_bytes),
            goal=goal,
        )
        for figure, way, part, share, goal in figures
    ]
    ratios = paired_ratios(samples[OURS, 0, 0.5], samples[FLOOR, 0, 0.5])
    conditions = conditions_of(OURS, message_count, written_bytes)
    return [
        *rows,
        Row(
            figure="send → handler, p50, to the floor's",
            unit="ratio",
            samples=tuple(ratios),
            conditions=conditions,
        ),
    ]


def conditions_of(way: str, message_count: int, written_bytes: int) -> Conditions:
    """What the rounds were run with."""
    client = {
        OURS: "HttpTransport; @consumer in a process of its own, long poll",
        FLOOR: "bare httpx.Client in the same processes and threads; a server that only syncs",
    }[way]
    return Conditions(
        durability="fdatasync before the delivery",
        client=client,
        batch_messages=1,
        message_bytes=BODY_BYTES,
        written_bytes=written_bytes,
        note=(
            f"{message_count} messages per round, in turns with the other way's, "
            f"{1000 * PAUSE_S:.0f} ms after each arrival"
        ),
    )


def run_round(bench: Bench, message_count: int) -> tuple[dict[str, list[Times]], int]:
    """The times of each message of both ways, and the bytes that the broker wrote."""
    with bench.processes() as processes:
        broker = processes.start_broker()
        ours = processes.start_worker(f"{__name__}:receive", broker_url=broker.url)
        module = long_poll_floor.__name__
        server = processes.start_worker(f"{module}:serve", directory=str(processes.directory))
        floor_url = server.hear()
        floor = processes.start_worker(f"{module}:receive", url=floor_url)
        for worker in (ours, floor):
            worker.hear()
        client = httpx.Client(timeout=long_poll_floor.TIMEOUT_S)
        with closing(HttpTransport(broker.url)) as transport, client:

            def send(body: bytes) -> None:
                transport.send(
                    build_message_frame({SUBJECT: [encode_message(Message(SUBJECT, body))]})
                )

            def send_bare(body: bytes) -> None:
                client.post(f"{floor_url}/send", content=body).raise_for_status()

            ways = {OURS: lambda: send_one(send, ours), FLOOR: lambda: send_one(send_bare, floor)}
            interleave(ways, rounds=WARM_UP_MESSAGES)
            written_bytes = broker.written_bytes()
            times = interleave(ways, rounds=message_count)
            return times, broker.written_bytes() - written_bytes


def send_one(send: Callable[[bytes], None], worker: Worker) -> Times:
    """Milliseconds until the handler had the message and until the send was answered."""
    time.sleep(PAUSE_S)
    sent_ns = time.monotonic_ns()
    send(stamped_body())
    answered_ns = time.monotonic_ns()
    handled_ns: int = worker.hear()
    return handled_ns / 1e6, (answered_ns - sent_ns) / 1e6


def receive(control: Control, *, broker_url: str) -> None:
    """The consumer process; ended by its parent."""

    @consumer(SUBJECT, group="board")
    def on_message(message: Message) -> None:
        control.tell(age_ns(message.body))

    control.tell("ready")
    Consumers([on_message], broker_url).run()
