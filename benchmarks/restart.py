"""R11: a start of the broker after kill -9, and a full verification, with 10 GiB of log.

Most of the log is made without a broker, quickly. The last part is sent to a real broker with ids of its
own, more than it remembers, so that a start finds as much to do as after months: the ids that may be
repeated, entries that are not in their files, the tail behind the last checkpoint. In each round some
frames more are sent, the broker is killed, and a new one is started on the same directory; then the
directory is verified by as many processes as there are processors. All of it is in the system's cache.
"""

from __future__ import annotations

import itertools
import re
import time
from pathlib import Path
from typing import Final

from benchmarks.blocks import MIB
from benchmarks.load import BATCH_MESSAGES, BODY_BYTES, make_frame, make_messages
from benchmarks.machine import our_processor_seconds
from benchmarks.processes import Broker, Processes
from benchmarks.result import Conditions, Goal, Row
from benchmarks.suite import Bench
from qmq_broker.face.commands.store import runner, workers_here
from qmq_broker.options import StoreOptions
from qmq_broker.storage.files.disk import OsDisk
from qmq_broker.storage.store import Store
from qmq_broker.storage.upkeep.verify import verify_store
from qmq_client.clock import SYSTEM_CLOCK
from qmq_client.transport.http import HttpTransport
from qmq_client.wire.frame import parse_message_frame

#: Frames of the part that is made without a broker; repeats are not looked for there.
_FRAMES: Final = 64
_FRAMES_PER_COMMIT: Final = 8
#: Frames between two kills.
_FRAMES_MORE: Final = 8
_RECOVERY: Final = re.compile(r"recovery\.duration_ms=(\d+)")


class RestartError(Exception):
    """The broker's log does not say how long it took, or the directory is not as it should be."""


def run(bench: Bench) -> list[Row]:
    """Seconds of a start and of a verification, and what they come to for each GiB."""
    size_bytes = bench.effort.pick(tiny=24, quick=1_024, full=10_240) * MIB
    sent_bytes = bench.effort.pick(tiny=4, quick=256, full=1_280) * MIB
    with bench.processes() as processes:
        data = processes.directory / "data"
        _fill(data, size_bytes - sent_bytes)
        broker = processes.start_broker(data=data)
        _send(broker, sent_bytes // (BATCH_MESSAGES * BODY_BYTES) + 1)
        ready_s, recovery_s, ready_cpu_s = [], [], []
        for _ in range(bench.rounds):
            _send(broker, _FRAMES_MORE)
            broker.process.kill()
            broker.process.wait()
            broker, seconds = _started(processes, data)
            ready_s.append(seconds)
            ready_cpu_s.append(broker.cpu_s())
            recovery_s.append(_recovery_s(broker))
        broker.stop()
        verified = [_verified_s(data) for _ in range(bench.rounds + 1)][1:]  # the first one warms
        verify_s, verify_cpu_s = [one[0] for one in verified], [one[1] for one in verified]
        log_bytes = sum(path.stat().st_size for path in (data / "commitlog").iterdir())
    is_full = size_bytes >= 10_240 * MIB
    return [
        _row(
            "kill -9 → ready",
            ready_s,
            size_bytes,
            Goal(bound=2, is_floor=False) if is_full else None,
        ),
        _row("recovery alone", recovery_s, size_bytes),
        _row(
            "verification", verify_s, size_bytes, Goal(bound=5, is_floor=False) if is_full else None
        ),
        _row(
            "verification, of 10 GiB at this rate",
            [seconds * 10_240 * MIB / log_bytes for seconds in verify_s],
            size_bytes,
        ),
        _row("kill -9 → ready, processor time", ready_cpu_s, size_bytes),
        _row("verification, processor time of all processes", verify_cpu_s, size_bytes),
    ]


def _row(figure: str, samples: list[float], size_bytes: int, goal: Goal | None = None) -> Row:
    return Row(
        figure=figure,
        unit="s",
        samples=tuple(samples),
        goal=goal,
        conditions=Conditions(
            durability="fdatasync before the answer",
            client="HttpTransport, one connection",
            batch_messages=BATCH_MESSAGES,
            message_bytes=BODY_BYTES,
            written_bytes=size_bytes,
            note=f"{size_bytes / MIB / 1024:.1f} GiB of log in the system's cache; verified by "
            f"{workers_here()} processes",
        ),
    )


def _fill(data: Path, count: int) -> None:
    """A data directory with so many bytes of log."""
    messages = make_messages()
    frames = [parse_message_frame(make_frame(messages, BATCH_MESSAGES)) for _ in range(_FRAMES)]
    endless = itertools.cycle(frames)
    store = Store.open(OsDisk(str(data)), SYSTEM_CLOCK, StoreOptions(dedupe_ids=0, index_entries=0))
    while store.written_offset < count:
        store.append(list(itertools.islice(endless, _FRAMES_PER_COMMIT)))
        store.commit_and_step()
    store.close()


def _send(broker: Broker, frame_count: int) -> None:
    transport = HttpTransport(broker.url)
    messages = make_messages()
    for _ in range(frame_count):
        transport.send(make_frame(messages, BATCH_MESSAGES))
    transport.close()


def _started(processes: Processes, data: Path) -> tuple[Broker, float]:
    started_s = time.monotonic()
    broker = processes.start_broker(data=data)
    return broker, time.monotonic() - started_s


def _recovery_s(broker: Broker) -> float:
    found = _RECOVERY.search(broker.log.read_text())
    if found is None:
        raise RestartError("the broker does not say how long its recovery took")
    return int(found[1]) / 1000


def _verified_s(data: Path) -> tuple[float, float]:
    """Seconds by the wall and of processors."""
    started_s, started_cpu_s = time.monotonic(), our_processor_seconds()
    found = verify_store(
        OsDisk(str(data)), SYSTEM_CLOCK, check_groups=len, run=runner(str(data), workers_here())
    )
    if found.worst is not None:
        raise RestartError(f"the directory is not whole: {found.faults[0].line()}")
    return time.monotonic() - started_s, our_processor_seconds() - started_cpu_s
