"""R3: consume what is stored already, beside Redis Streams: the same count, bodies and batch.

Each reads with one connection up to 1,000 messages at a time, makes an object of each, and acks them
with its next read, until all are read and acked. Ours looks at every checksum and decodes every
record into a `Message`; of what redis-py gives, text is decoded and an object made. Acks are on the disk within 100 ms
here, within a second there (`appendfsync everysec`, its default).
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.load import BATCH_MESSAGES, BODY_BYTES, make_frame, make_messages
from benchmarks.measure import interleave, paired_ratios
from benchmarks.peers.environment import REDIS, REDIS_DIRECTORY, peers_python
from benchmarks.processes import STOP_DEADLINE_S, Broker, Worker, free_port
from benchmarks.produce_consume import PULL_MESSAGES, Consumer
from benchmarks.result import Conditions, Goal, Row
from benchmarks.suite import Bench
from benchmarks.worker import Control
from qmq_client.transport.http import HttpTransport

US: Final = "qmq"
#: By which parser redis-py reads; hiredis is an extra of it.
THEM: Final = {"Redis Streams": "own", "Redis Streams with hiredis": "hiredis"}
GOAL: Final = Goal(bound=2.3, is_floor=True)
#: Debian's package has the server under the name of its checker too; it goes by how it is called.
SERVER: Final = Path("/usr/bin/redis-check-rdb")

#: Seconds by the wall, and processor seconds of the consumer's process.
Times = tuple[float, float]


def run(bench: Bench) -> list[Row]:
    """Messages per second of both, and the ratio."""
    count = bench.effort.pick(tiny=1_000, quick=50_000, full=200_000)
    python = peers_python(REDIS, REDIS_DIRECTORY)
    with bench.processes() as processes, ExitStack() as stack:
        port = start_redis(bench.directory, stack)
        variants: dict[str, Callable[[], Times]] = {US: partial(ours, bench, count)}
        for name, parser in THEM.items():
            peer = processes.start_worker(
                "benchmarks.peers.with_redis:work", python=python, port=port, parser=parser
            )
            peer.hear()
            variants[name] = partial(theirs, peer, count)
        outcomes = interleave(variants, rounds=bench.rounds)
    return rows_of(outcomes, count)


def theirs(peer: Worker, count: int) -> Times:
    """A stream that has this many, and a process that reads them."""
    peer.tell(count)
    wall_s, cpu_s = peer.hear()
    return wall_s, cpu_s


def ours(bench: Bench, count: int) -> Times:
    """A broker that has this many, and a process that consumes them."""
    with bench.processes() as processes:
        broker = processes.start_broker()
        fill(broker, count)
        consumer = processes.start_worker(f"{__name__}:consume", broker_url=broker.url, count=count)
        consumer.hear()
        consumer.tell("go")
        wall_s, cpu_s = consumer.hear()
        return wall_s, cpu_s


def fill(broker: Broker, count: int) -> None:
    """Store messages."""
    transport, messages = HttpTransport(broker.url), make_messages()
    for first in range(0, count, BATCH_MESSAGES):
        transport.send(make_frame(messages, min(BATCH_MESSAGES, count - first)))
    transport.close()


def consume(control: Control, *, broker_url: str, count: int) -> None:
    """The consumer process."""
    consumer = Consumer(broker_url)
    control.tell("ready")
    control.hear()
    cpu_s, started_s = time.process_time(), time.perf_counter()
    while consumer.next_sequence < count:
        consumer.step()
    consumer.settle()
    assert (consumer.acked, consumer.faults) == (count, 0)
    control.tell((time.perf_counter() - started_s, time.process_time() - cpu_s))
    consumer.transport.close()


def start_redis(directory: Path, stack: ExitStack) -> int:
    """A server with an append-only file, ended with `stack`; its port."""
    from tests.services.packages import find_or_install  # late: only Redis may have to be installed

    server_program = find_or_install("redis-tools", lambda: SERVER if SERVER.exists() else None)
    port, data = free_port(), directory / "redis"
    data.mkdir()
    options = {"port": port, "bind": "127.0.0.1", "dir": data, "save": "", "appendonly": "yes"}
    line = [
        "redis-server",
        *(str(word) for name in options for word in (f"--{name}", options[name])),
    ]
    server = subprocess.Popen(line, executable=server_program, stdout=subprocess.DEVNULL)
    stack.callback(server.wait, STOP_DEADLINE_S)
    stack.callback(server.terminate)
    time.sleep(0.5)  # it listens within milliseconds; the client tries again
    return port


def rows_of(outcomes: dict[str, list[Times]], count: int) -> list[Row]:
    """Rates and processor time of each, then their ratio."""
    rates = {name: [count / wall_s for wall_s, _ in times] for name, times in outcomes.items()}
    rows = []
    for name, times in outcomes.items():
        conditions = Conditions(
            durability="acks synced within 100 ms" if name == US else "appendfsync everysec",
            client="HttpTransport, one connection"
            if name == US
            else f"{', '.join(REDIS)}, parser: {THEM[name]}; one connection, pipelined",
            batch_messages=PULL_MESSAGES,
            message_bytes=BODY_BYTES,
            note=f"{count:,} messages stored before, each round",
        )
        cpu = tuple(1e6 * cpu_s / count for _, cpu_s in times)
        rows += [
            Row(
                figure=f"consumed and acked: {name}",
                unit="messages/s",
                samples=tuple(rates[name]),
                conditions=conditions,
            ),
            Row(
                figure=f"processor time of the consumer: {name}",
                unit="µs per message",
                samples=cpu,
                conditions=conditions,
            ),
        ]
    rows += [
        Row(
            figure=f"consumed and acked: {US} / {name}",
            unit="ratio",
            samples=tuple(paired_ratios(rates[US], rates[name])),
            conditions=rows[0].conditions,
            goal=GOAL if parser == "own" else None,
        )
        for name, parser in THEM.items()
    ]
    return rows
