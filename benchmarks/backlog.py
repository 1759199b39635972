"""A backlog drained by one, two and four consumers of one group, and what one more adds at once.

Each consumer is a process with a batch handler that waits, as handlers do that call something: so
the handler and not the processor is the bound, and more consumers should drain as many times more.
There are no partitions to be dealt out again: a consumer that joins has its first messages with its
first pull. All variants drain the same subject, each with a group of its own.
"""

from __future__ import annotations

import time
from functools import partial
from itertools import count as counting
from typing import Any, Final

from benchmarks.load import SUBJECT
from benchmarks.measure import interleave, paired_ratios
from benchmarks.processes import Broker, Processes
from benchmarks.result import Conditions, Goal, Row
from benchmarks.suite import Bench
from benchmarks.worker import Control
from qmq_client import Consumers, Message, consumer
from qmq_client.ids import MESSAGE_IDS
from qmq_client.message import message_to_record
from qmq_client.transport.http import HttpTransport
from qmq_client.wire.frame import build_message_frame
from qmq_client.wire.record import encode_record

BODY: Final = bytes(100)
SENT_AT_ONCE: Final = 5_000
HANDLED_AT_ONCE: Final = 100
#: What one call of the handler waits.
CALL_S: Final = 0.02
MEMBERS: Final = (1, 2, 4)

Figures = dict[str, float]


def run(bench: Bench) -> list[Row]:
    """Rates by the number of consumers, their ratios, and the wait of one that joins."""
    backlog = bench.effort.pick(tiny=2_000, quick=200_000, full=1_000_000)
    duration_s = bench.effort.pick(tiny=3, quick=15, full=50) / 10
    numbers = counting()
    with bench.processes() as processes:
        broker = processes.start_broker()
        fill(broker, backlog)
        outcomes = interleave(
            {
                str(members): partial(drain, bench, broker, numbers, members, duration_s)
                for members in MEMBERS
            },
            rounds=bench.rounds,
        )
    conditions = Conditions(
        durability="acks synced within 100 ms",
        client="@consumer with batch_size=100, a process for each consumer",
        batch_messages=HANDLED_AT_ONCE,
        message_bytes=len(BODY),
        note=f"backlog {backlog:,}; a call waits {1000 * CALL_S:.0f} ms; {duration_s} s per round",
    )
    return rows_of(outcomes, conditions)


def rows_of(outcomes: dict[str, list[Figures]], conditions: Conditions) -> list[Row]:
    rates = {name: [each["rate"] for each in rounds] for name, rounds in outcomes.items()}
    rows = [
        Row(
            figure=f"drained by {name}",
            unit="messages/s",
            samples=tuple(samples),
            conditions=conditions,
        )
        for name, samples in rates.items()
    ]
    rows += [
        Row(
            figure=f"drained by {members} / by 1",
            unit="ratio",
            samples=tuple(paired_ratios(rates[str(members)], rates["1"])),
            conditions=conditions,
            goal=Goal(bound=0.8 * members, is_floor=True),
        )
        for members in MEMBERS[1:]
    ]
    joined = tuple(each["joined_ms"] for each in outcomes[str(MEMBERS[-1])])
    rows.append(
        Row(
            figure="from the last one's start to its first message",
            unit="ms",
            samples=joined,
            conditions=conditions,
        )
    )
    return rows


def fill(broker: Broker, count: int) -> None:
    """Store small messages."""
    transport = HttpTransport(broker.url)
    message = Message(SUBJECT, BODY)
    for first in range(0, count, SENT_AT_ONCE):
        records = [
            encode_record(message_to_record(message, new_id=MESSAGE_IDS.next_id(), now_ms=1))
            for _ in range(min(SENT_AT_ONCE, count - first))
        ]
        transport.send(build_message_frame({SUBJECT: records}))
    transport.close()


def drain(
    bench: Bench, broker: Broker, numbers: counting[int], members: int, duration_s: float
) -> Figures:
    """Consumers of a new group, all started at once, for so long."""
    group = f"drain-{next(numbers)}"
    with bench.processes() as processes:
        workers = [start(processes, broker, group) for _ in range(members)]
        for worker in workers:
            worker.tell("go")
        first_s = [float(worker.hear()) for worker in workers]
        time.sleep(duration_s)
        for worker in workers:
            worker.tell("stop")
        ended: list[dict[str, Any]] = [worker.hear() for worker in workers]
    handled = sum(each["handled"] for each in ended)
    elapsed_s = sum(each["elapsed_s"] for each in ended) / members
    return {"rate": handled / elapsed_s, "joined_ms": 1000 * first_s[-1]}


def start(processes: Processes, broker: Broker, group: str) -> Any:
    worker = processes.start_worker(f"{__name__}:work", broker_url=broker.url, group=group)
    worker.hear()
    return worker


def work(control: Control, *, broker_url: str, group: str) -> None:
    """A consumer's process: tells how long it waited for its first message, and what it handled."""
    times: list[tuple[float, int]] = []

    @consumer(SUBJECT, group=group, batch_size=HANDLED_AT_ONCE, prefetch_max=HANDLED_AT_ONCE)
    def handler(bodies: list[bytes]) -> None:
        times.append((time.monotonic(), len(bodies)))
        time.sleep(CALL_S)

    consumers = Consumers(handler, broker_url)
    control.tell("ready")
    control.hear()
    started_s = time.monotonic()
    consumers.start()
    while not times:
        time.sleep(0.0005)
    control.tell(times[0][0] - started_s)
    control.hear()
    counted = times[:]
    elapsed_s = time.monotonic() - counted[0][0]
    consumers.stop()
    control.tell({"handled": sum(count for _, count in counted), "elapsed_s": elapsed_s})
