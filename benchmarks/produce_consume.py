"""R2: durable produce and consume at the same time, three processes.

The producer encodes each message, builds a frame of 500 and sends it by `HttpTransport`; the consumer
pulls up to 1,000, decodes each record into a `Message` and acks the range with its next pull. Both
run until everything sent in the given time was consumed and acked. A round counts messages from the
common start to the later end, and fails unless each sequence came exactly once, in order. Each round
has a new broker on a new directory, so all blocks of the disk are new ones.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

from benchmarks.load import BATCH_MESSAGES, BODY_BYTES, SUBJECT, make_frame, make_messages
from benchmarks.measure import interleave
from benchmarks.result import Conditions, Goal, Row
from benchmarks.suite import Bench
from benchmarks.worker import Control
from qmq_client.message import decode_message
from qmq_client.transport.http import HttpTransport
from qmq_client.wire.requests import PullRequest, Settlement, SettleRequest

PULL_MESSAGES: Final = 1000
PULL_BYTES: Final = 2 * 1024 * 1024
#: Short: the last pull finds nothing, and ends so long after the last message.
WAIT_MS: Final = 20
GROUP: Final = "board"

#: Requests in flight; the client's publisher is meant to have up to two, so two have the goal.
SENDERS: Final = ("1", "2")
RATE: Final = "produced and consumed"
GOAL: Final = Goal(bound=100_000, is_floor=True)
WRITTEN: Final = "written bytes"
UNITS: Final = {
    RATE: "messages/s",
    "producer alone, meanwhile": "messages/s",
    "consumer behind at the end": "ms",
    "processor time: producer": "µs per message",
    "processor time: broker": "µs per message",
    "processor time: consumer": "µs per message",
    "processor time: all three": "µs per message",
}

Figures = dict[str, float]


class CountError(Exception):
    """What was consumed is not what was accepted."""


def run(bench: Bench) -> list[Row]:
    """Messages per second of both sides together, and what each process spends on one."""
    duration_s = bench.effort.pick(tiny=1, quick=20, full=40) / 10
    rounds = interleave(
        {senders: partial(run_round, bench, duration_s, int(senders)) for senders in SENDERS},
        rounds=bench.rounds,
    )
    rows = []
    for senders in SENDERS:
        conditions = conditions_of(rounds[senders], duration_s, senders)
        rows += [
            Row(
                figure=f"{figure}, {senders} in flight",
                unit=unit,
                samples=tuple(figures[figure] for figures in rounds[senders]),
                conditions=conditions,
                goal=GOAL if (figure, senders) == (RATE, SENDERS[-1]) else None,
            )
            for figure, unit in UNITS.items()
        ]
    return rows


def conditions_of(rounds: list[Figures], duration_s: float, senders: str) -> Conditions:
    """What the rounds with so many requests in flight were run with."""
    return Conditions(
        durability="fdatasync before the answer",
        client=(
            "HttpTransport; a producer process with "
            f"{senders} thread{'' if senders == '1' else 's'}, a consumer process with 1"
        ),
        batch_messages=BATCH_MESSAGES,
        message_bytes=BODY_BYTES,
        written_bytes=sorted(int(figures[WRITTEN]) for figures in rounds)[len(rounds) // 2],
        note=(
            f"pulls of up to {PULL_MESSAGES}; acks counted; new blocks; "
            f"{duration_s} s of sending per round"
        ),
    )


def run_round(bench: Bench, duration_s: float, senders: int) -> Figures:
    """One broker, one producer, one consumer."""
    with bench.processes() as processes:
        broker = processes.start_broker()
        arguments: dict[str, Any] = {"broker_url": broker.url}
        consumer = processes.start_worker(f"{__name__}:consume", **arguments)
        producer = processes.start_worker(
            f"{__name__}:produce", **arguments, duration_s=duration_s, senders=senders
        )
        for worker in (consumer, producer):
            worker.hear()  # it is up and connected
        cpu_s, written_bytes = broker.cpu_s(), broker.written_bytes()
        started_s = time.monotonic()
        for worker in (consumer, producer):
            worker.tell("go")
        produced = producer.hear()
        consumer.tell(produced["accepted"])
        consumed = consumer.hear()
        cpu_s = broker.cpu_s() - cpu_s
        written_bytes = broker.written_bytes() - written_bytes
    check_counts(produced, consumed)
    count = produced["accepted"]
    ended_s = max(produced["ended_s"], consumed["ended_s"])
    figures = {
        "processor time: producer": 1e6 * produced["cpu_s"] / count,
        "processor time: broker": 1e6 * cpu_s / count,
        "processor time: consumer": 1e6 * consumed["cpu_s"] / count,
    }
    return {
        **figures,
        "processor time: all three": sum(figures.values()),
        RATE: count / (ended_s - started_s),
        "producer alone, meanwhile": count / (produced["ended_s"] - started_s),
        "consumer behind at the end": 1000 * (ended_s - produced["ended_s"]),
        WRITTEN: written_bytes,
    }


def check_counts(produced: dict[str, Any], consumed: dict[str, Any]) -> None:
    """Everything accepted was consumed and acked, each sequence once and in order."""
    if consumed["faults"] or consumed["acked"] != produced["accepted"]:
        raise CountError(
            f"{produced['accepted']} messages accepted, {consumed['acked']} acked; "
            f"gaps, repeats and stale acks: {consumed['faults']}"
        )


def produce(control: Control, *, broker_url: str, duration_s: float, senders: int) -> None:
    """The producer process: threads that each encode a batch, send it and wait for its answer."""
    transport = HttpTransport(broker_url)
    accepted = [transport.send(make_frame(make_messages(), 1)).count]
    control.tell("ready")
    control.hear()
    cpu_s, ends_at_s = time.process_time(), time.monotonic() + duration_s
    with ThreadPoolExecutor(senders) as pool:
        sent = [pool.submit(send_until, transport, ends_at_s) for _ in range(senders)]
        accepted += [future.result() for future in sent]
    control.tell(
        {
            "accepted": sum(accepted),
            "ended_s": time.monotonic(),
            "cpu_s": time.process_time() - cpu_s,
        }
    )
    transport.close()


def send_until(transport: HttpTransport, ends_at_s: float) -> int:
    """Send batches until it is time; how many messages were accepted."""
    messages = make_messages()
    accepted = 0
    while time.monotonic() < ends_at_s:
        accepted += transport.send(make_frame(messages, BATCH_MESSAGES)).count
    return accepted


def consume(control: Control, *, broker_url: str) -> None:
    """The consumer process."""
    consumer = Consumer(broker_url)
    consumer.step()  # connects, imports, makes the group
    control.tell("ready")
    control.hear()
    cpu_s = time.process_time()
    expected = control.when_told()
    while (count := expected()) is None or consumer.next_sequence < count:
        consumer.step()
    consumer.settle()
    control.tell(
        {
            "acked": consumer.acked,
            "faults": consumer.faults,
            "ended_s": time.monotonic(),
            "cpu_s": time.process_time() - cpu_s,
        }
    )
    consumer.transport.close()


class Consumer:
    """Pulls, decodes and acks; counts what is out of order."""

    def __init__(self, broker_url: str) -> None:
        self.transport = HttpTransport(broker_url)
        self.next_sequence = 0
        self.acked = 0
        #: Sequences that did not follow the one before, and acks that came too late.
        self.faults = 0
        self._settlements: tuple[Settlement, ...] = ()

    def step(self) -> None:
        """One pull, which acks what the one before brought."""
        request = PullRequest(
            subject=SUBJECT,
            group=GROUP,
            consumer="consumer-1",
            max_messages=PULL_MESSAGES,
            max_bytes=PULL_BYTES,
            wait_ms=WAIT_MS,
            settlements=self._settlements,
        )
        answer = self.transport.pull(request)
        self.faults += len(answer.head.stale)
        self._settlements = ()
        for delivered in answer.messages:
            message = decode_message(SUBJECT, delivered.record)
            self.faults += delivered.sequence != self.next_sequence or not message.body
            self.next_sequence = delivered.sequence + 1
        if count := len(answer.messages):
            first = answer.head.first_pull_sequence
            self.acked += count
            self._settlements = (
                Settlement(token=answer.head.token, acks=((first, first + count),)),
            )

    def settle(self) -> None:
        """Ack what the last pull brought."""
        if self._settlements:
            request = SettleRequest(
                subject=SUBJECT,
                group=GROUP,
                consumer="consumer-1",
                settlements=self._settlements,
            )
            self.faults += len(self.transport.settle(request).stale)
