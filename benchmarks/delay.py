"""R12: delayed messages – their release, its cost beside an ordinary append, their memory, their lateness.

Release and cost are measured in this process, memory in one of its own: the real store and the real
releases, by hand in one thread (a copy waits for the disk in its own, as in the broker), with a clock that
is moved to the moment when everything is due. Lateness is measured on a broker process (`lateness.py`).
"""

from __future__ import annotations

import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from benchmarks import lateness
from benchmarks.load import BODY_BYTES, SUBJECT
from benchmarks.processes import Processes
from benchmarks.result import Conditions, Goal, Row
from benchmarks.suite import Bench
from benchmarks.worker import Control
from qmq_broker.options import StoreOptions
from qmq_broker.service.delay.damage import Damage
from qmq_broker.service.delay.near import Load, Wheel, frozen_sequences
from qmq_broker.service.delay.releasing import Releaser
from qmq_broker.service.delay.rows import end_of
from qmq_broker.service.limits import ServiceLimits
from qmq_broker.service.writer import CommitWriter
from qmq_broker.storage.files.background import in_a_thread
from qmq_broker.storage.files.disk import OsDisk
from qmq_broker.storage.schedule.schedule import Schedule
from qmq_broker.storage.schedule.sorted import SortedBuckets
from qmq_broker.storage.store import Store
from qmq_client.ids import MESSAGE_IDS
from qmq_client.wire.frame import FrameKind, MessageFrame, build_message_frame, parse_message_frame
from qmq_client.wire.record import Record, encode_record

BATCH_MESSAGES: Final = 500
HOUR_MS: Final = 3_600_000
#: Bodies of those that are only loaded: a load reads none, and ten million are ten gigabytes otherwise.
SMALL_BYTES: Final = 128
#: Messages taken out at once.
TAKEN_MAX: Final = 2_000
#: What may be in memory of one bucket, and what the process takes at most with a load under way.
LOADED_MAX: Final = 500_000
MEMORY_MIB_MAX: Final = 128
#: For ten million messages to be stored and loaded, on a slow machine.
_BIG_S_MAX: Final = 900.0
#: Buckets with more messages are sorted on the disk.
UNSORTED_MAX: Final = ServiceLimits().delayed_unsorted


class MovedClock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.wall_ms = time.time_ns() // 1_000_000
        self.steady_s = 0.0

    def now_ms(self) -> int:
        return self.wall_ms

    def monotonic_s(self) -> float:
        return self.steady_s

    def sleep(self, seconds: float) -> None:
        self.pass_ms(round(seconds * 1000))

    def pass_ms(self, ms: int) -> None:
        """Let time pass on both clocks."""
        self.wall_ms += ms
        self.steady_s += ms / 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    release_per_s: float
    #: Processor time of a release against that of an ordinary append of the same messages.
    cost_ratio: float
    written_bytes: int


def run(bench: Bench) -> Iterator[Row]:
    """All figures, one sample each round, as they come."""
    count = bench.effort.pick(tiny=2_000, quick=60_000, full=1_000_000)
    rounds = []
    for _ in range(bench.rounds):
        with tempfile.TemporaryDirectory(dir=bench.directory) as directory:
            rounds.append(_round(Path(directory), count))
    conditions = Conditions(
        durability="fdatasync before a release counts",
        client="releases by hand, in one thread with the writer; copies wait for the disk beside it",
        batch_messages=BATCH_MESSAGES,
        message_bytes=BODY_BYTES,
        written_bytes=rounds[0].written_bytes,
        note=f"{count:,} messages due in one hour",
    )
    rate = Goal(bound=50_000, is_floor=True)
    yield _row("releases", "messages/s", [one.release_per_s for one in rounds], conditions, rate)
    yield _row("release / append", "ratio of CPU", [one.cost_ratio for one in rounds], conditions)
    yield from _big_bucket(bench)
    yield from lateness.rows(bench)


def _row(
    figure: str, unit: str, samples: list[float], conditions: Conditions, goal: Goal | None = None
) -> Row:
    return Row(figure=figure, unit=unit, samples=tuple(samples), conditions=conditions, goal=goal)


class _Broker:
    """A store and its releases, stepped by hand."""

    def __init__(self, directory: Path, *, loaded_max: int) -> None:
        self.clock = MovedClock()
        options = StoreOptions(index_entries=0, reserve_bytes=0)
        self.store = Store.open(OsDisk(str(directory)), self.clock, options)
        limits = ServiceLimits(delayed_loaded=loaded_max)
        self._posted: list[Callable[[], None]] = []
        self.writer = CommitWriter(
            self.store,
            self.clock,
            limits,
            post=self._posted.append,
            on_visible=lambda _: None,
            on_poisoned=print,
        )
        self.releaser = Releaser(
            self.store.schedule,
            self.writer,
            self.clock,
            limits,
            post=self._posted.append,
            refusals=self.store.refusals,
        )
        self.releaser.begin()

    def append(self, frames: list[MessageFrame]) -> float:
        """Append and sync, some requests in each commit; returns the processor time."""
        began_s = time.process_time()
        for first in range(0, len(frames), 4):
            self.store.append(frames[first : first + 4])
            self.store.commit_and_step()
        return time.process_time() - began_s

    def step(self) -> None:
        """One step of the releases, and the commit of what it submitted."""
        self.releaser.step()
        self._run()
        self.writer.step()
        self._run()

    def release(self, count: int) -> tuple[float, float]:
        """Release so many messages; returns wall time and processor time."""
        self.store.schedule.background.start = in_a_thread  # as in the broker
        began_s, cpu_s = time.perf_counter(), time.process_time()
        wanted = self.releaser.counts.released + count
        while self.releaser.counts.released < wanted:
            self.step()
        return time.perf_counter() - began_s, time.process_time() - cpu_s

    def _run(self) -> None:
        posted, self._posted[:] = list(self._posted), []
        for call in posted:
            call()


def _frames(
    count: int, first_ms: int | None, *, body_bytes: int = BODY_BYTES
) -> list[MessageFrame]:
    """Messages due over the hour from `first_ms` on; ordinary ones for None."""
    frames = []
    body = (bytes(range(256)) * (BODY_BYTES // 256))[:body_bytes]
    kind = FrameKind.MESSAGES if first_ms is None else FrameKind.DELAYED
    for first in range(0, count, BATCH_MESSAGES):
        records = []
        for number in range(first, min(first + BATCH_MESSAGES, count)):
            due_at_ms = None if first_ms is None else first_ms + number * 7_919 % (HOUR_MS // 2)
            record = Record(
                message_id=MESSAGE_IDS.next_id(),
                subject=SUBJECT,
                body=body,
                born_at_ms=0,
                due_at_ms=due_at_ms,
            )
            records.append(encode_record(record))
        frames.append(parse_message_frame(build_message_frame({SUBJECT: records}, kind=kind)))
    return frames


def _next_hour_ms(clock: MovedClock) -> int:
    return (clock.wall_ms // HOUR_MS + 2) * HOUR_MS


def _round(directory: Path, count: int) -> _Round:
    broker = _Broker(directory / "delayed", loaded_max=LOADED_MAX)
    first_ms = _next_hour_ms(broker.clock)
    for first in range(0, count, 50_000):
        broker.append(_frames(min(50_000, count - first), first_ms))
    while broker.store.step():
        pass
    broker.clock.pass_ms(first_ms + HOUR_MS - broker.clock.wall_ms)
    wall_s, cpu_s = broker.release(count)
    written_bytes = broker.store.durable_offset
    broker.store.close()
    ordinary = _Broker(directory / "ordinary", loaded_max=2)
    sample = min(count, 50_000)
    append_s = ordinary.append(_frames(sample, None)) / sample
    ordinary.store.close()
    return _Round(
        release_per_s=count / wall_s,
        cost_ratio=cpu_s / count / append_s,
        written_bytes=written_bytes,
    )


def _big_bucket(bench: Bench) -> list[Row]:
    """What it takes to load a bucket, to its end, which holds many times what may be in memory."""
    count = bench.effort.pick(tiny=2_000, quick=200_000, full=10_000_000)
    loaded_max = min(LOADED_MAX, max(2, count // 4))
    with (
        tempfile.TemporaryDirectory(dir=bench.directory) as directory,
        Processes(Path(directory)) as processes,
    ):
        # What else was measured in this process has left its memory.
        worker = processes.start_worker(
            f"{__name__}:load_big", directory=directory, count=count, loaded_max=loaded_max
        )
        big = _Big(**worker.hear(within_s=_BIG_S_MAX))
    conditions = Conditions(
        durability="none: memory",
        client="loads by hand",
        message_bytes=SMALL_BYTES,
        written_bytes=big.written_bytes,
        note=f"{count:,} messages in one hour in no order, at most {loaded_max:,} loaded",
    )
    goal = Goal(bound=MEMORY_MIB_MAX, is_floor=False)
    return [
        _row("process before it loads", "MiB resident", [big.before_mib], conditions),
        _row("process while it loads", "MiB resident at most", [big.peak_mib], conditions, goal),
        _row(
            "memory",
            "bytes per loaded message",
            [big.bytes_per_message],
            conditions,
            Goal(bound=64, is_floor=False),
        ),
        _row("sorting", "s of CPU", [big.sort_s], conditions),
        _row("load", "s of CPU", big.load_s, conditions),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Big:
    """What loading a large bucket took."""

    before_mib: float
    peak_mib: float
    sort_s: float
    load_s: list[float]
    bytes_per_message: float
    written_bytes: int


def load_big(control: Control, *, directory: str, count: int, loaded_max: int) -> None:
    """Fill a bucket and load it, in a process of its own; tells a `_Big`."""
    broker = _Broker(Path(directory) / "big", loaded_max=loaded_max)
    first_ms = _next_hour_ms(broker.clock)
    for first in range(0, count, 50_000):
        broker.append(_frames(min(50_000, count - first), first_ms, body_bytes=SMALL_BYTES))
    while broker.store.step():
        pass
    schedule, until_ms = broker.store.schedule, first_ms + HOUR_MS
    unsorted_max = min(UNSORTED_MAX, loaded_max)
    _forget_peak()
    before_mib = _peak_mib()
    sort_s, load_s, loaded = _load_all(schedule, loaded_max, unsorted_max, until_ms)
    assert loaded == count, f"{loaded} of {count} messages were loaded"
    peak_mib = _peak_mib()
    big = _Big(
        before_mib=before_mib,
        peak_mib=peak_mib,
        sort_s=sort_s,
        load_s=load_s,
        bytes_per_message=_bytes_per_message(schedule, loaded_max, unsorted_max, until_ms),
        written_bytes=broker.store.durable_offset,
    )
    broker.store.close()
    control.tell(asdict(big))


def _load_all(
    schedule: Schedule, loaded_max: int, unsorted_max: int, until_ms: int
) -> tuple[float, list[float], int]:
    """Load everything, taking out what is loaded when memory is full.

    Processor time of sorting, and of each load behind it; and how many messages that were.
    """
    sorted_ = SortedBuckets(schedule, messages_min=unsorted_max)
    wheel = Wheel(end_of(0), loaded_max=loaded_max)
    began_s = time.process_time()
    for bucket, messages in frozen_sequences(schedule).items():
        for _ in sorted_.sort(bucket, messages):
            pass
    sort_s = time.process_time() - began_s
    taken_s, loaded = [], 0
    while wheel.loaded_until < end_of(until_ms):
        began_s = time.process_time()
        _load(schedule, wheel, sorted_, until_ms)
        taken_s.append(time.process_time() - began_s)
        if not wheel.room or wheel.loaded_until >= end_of(until_ms):
            while taken := wheel.take(until_ms, TAKEN_MAX):
                loaded += len(taken)
    sorted_.keep(())
    return sort_s, taken_s, loaded


def _load(schedule: Schedule, wheel: Wheel, sorted_: SortedBuckets, until_ms: int) -> None:
    frozen = frozen_sequences(schedule)
    loading = Load(schedule, wheel, frozen, until_ms=until_ms, damage=Damage(), sorted_=sorted_)
    loading.advance()


def _bytes_per_message(
    schedule: Schedule, loaded_max: int, unsorted_max: int, until_ms: int
) -> float:
    """What one loaded message takes, by one load."""
    sorted_ = SortedBuckets(schedule, messages_min=unsorted_max)
    tracemalloc.start()
    before_bytes = tracemalloc.get_traced_memory()[0]
    wheel = Wheel(end_of(0), loaded_max=loaded_max)
    _load(schedule, wheel, sorted_, until_ms)
    used_bytes = tracemalloc.get_traced_memory()[0] - before_bytes
    tracemalloc.stop()
    sorted_.keep(())
    return used_bytes / len(wheel)


def _forget_peak() -> None:
    """Let the most that is resident be counted from here on."""
    Path("/proc/self/clear_refs").write_text("5")


def _peak_mib() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    (peak,) = [line for line in lines if line.startswith("VmHWM:")]
    return int(peak.split()[1]) / 1024
