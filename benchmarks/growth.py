"""R13: what a send, a pull and a start cost in processor time with many subjects, groups and messages.

The small case has ten subjects, one group and few messages; the large one ten thousand subjects, a
thousand groups and a hundred million messages in a full run. Messages are short, so that the large case
fits a disk; frames hold 500 messages of ten subjects. Everything runs in one process without threads or
network: the store with its log and its queues, and the groups above it.
"""

from __future__ import annotations

import itertools
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.blocks import MIB
from benchmarks.measure import paired_ratios
from benchmarks.result import Conditions, Goal, Row
from benchmarks.suite import Bench
from qmq_broker.options import StoreOptions
from qmq_broker.service.broker import Broker, BrokerSettings
from qmq_broker.storage.files.disk import OsDisk
from qmq_broker.storage.store import Store
from qmq_client.clock import SYSTEM_CLOCK
from qmq_client.wire.frame import MessageFrame, build_message_frame, parse_message_frame
from qmq_client.wire.message_id import MessageIds
from qmq_client.wire.record import Record, encode_record
from qmq_client.wire.requests import PullRequest, Settlement, SettleRequest

SUBJECTS_PER_FRAME: Final = 10
FRAME_MESSAGES: Final = 500
BODY_BYTES: Final = 32
#: Commits, each of one frame, and pulls that are measured in one round.
MEASURED: Final = 100
_FRAMES_PER_COMMIT: Final = 16
_GOAL: Final = Goal(bound=1.5, is_floor=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Size:
    subjects: int
    groups: int
    messages: int


@dataclass(slots=True, kw_only=True)
class _Costs:
    """Processor microseconds per message, one for each round; of a start, seconds."""

    send: list[float]
    pull: list[float]
    start_s: list[float]
    log_bytes: int = 0

    def start_us(self, size: _Size) -> list[float]:
        """Of each start, what it comes to for each message that is stored."""
        return [seconds / size.messages * 1e6 for seconds in self.start_s]


def run(bench: Bench) -> list[Row]:
    """The costs of both cases, and their ratios."""
    small = _Size(
        subjects=10, groups=1, messages=bench.effort.pick(tiny=5_000, quick=200_000, full=1_000_000)
    )
    large = _Size(
        subjects=bench.effort.pick(tiny=50, quick=2_000, full=10_000),
        groups=bench.effort.pick(tiny=5, quick=200, full=1_000),
        messages=bench.effort.pick(tiny=10_000, quick=2_000_000, full=100_000_000),
    )
    found = {name: _case(bench, size) for name, size in (("small", small), ("large", large))}
    rows = [
        _row(
            f"{what}: large / small",
            "ratio",
            paired_ratios(getattr(found["large"], what), getattr(found["small"], what)),
            large,
            found["large"],
            _GOAL,
        )
        for what in ("send", "pull")
    ]
    starts = (found["large"].start_us(large), found["small"].start_us(small))
    rows.append(
        _row(
            "start by message: large / small",
            "ratio",
            paired_ratios(*starts),
            large,
            found["large"],
            _GOAL,
        )
    )
    for name, size in (("small", small), ("large", large)):
        costs = found[name]
        rows += [
            _row(f"send, {name}", "µs per message", costs.send, size, costs),
            _row(f"pull, {name}", "µs per message", costs.pull, size, costs),
            _row(f"start, {name}", "s", costs.start_s, size, costs),
        ]
    return rows


def _row(
    figure: str,
    unit: str,
    samples: list[float],
    size: _Size,
    costs: _Costs,
    goal: Goal | None = None,
) -> Row:
    return Row(
        figure=figure,
        unit=unit,
        samples=tuple(samples),
        goal=goal,
        conditions=Conditions(
            durability="fdatasync for each commit",
            client="one process with store and groups, processor time",
            batch_messages=FRAME_MESSAGES,
            message_bytes=BODY_BYTES,
            written_bytes=costs.log_bytes,
            note=f"{size.subjects:,} subjects, {size.groups:,} groups, {size.messages:,} messages, "
            f"{SUBJECTS_PER_FRAME} subjects a frame",
        ),
    )


def _case(bench: Bench, size: _Size) -> _Costs:
    """Fill a directory, then measure sends, pulls and starts in it."""
    costs = _Costs(send=[], pull=[], start_s=[])
    with tempfile.TemporaryDirectory(dir=bench.directory) as name:
        data = Path(name)
        _fill(data, size)
        fresh = _frames(size, MessageIds(2))
        for _ in range(bench.rounds):
            started_s = time.process_time()
            store = Store.open(OsDisk(str(data)), SYSTEM_CLOCK, _options(dedupe_ids=1_000_000))
            broker = _broker(store)
            costs.start_s.append(time.process_time() - started_s)
            costs.send.append(_send_us(store, fresh))
            costs.pull.append(_pull_us(broker, size))
            costs.log_bytes = store.written_offset
            store.close()
    return costs


def _options(*, dedupe_ids: int = 0) -> StoreOptions:
    return StoreOptions(dedupe_ids=dedupe_ids, index_entries=0, segment_bytes=256 * MIB)


def _fill(data: Path, size: _Size) -> None:
    """So many messages over all subjects, and the groups, on some of them each."""
    store = Store.open(OsDisk(str(data)), SYSTEM_CLOCK, _options())
    # Each subject stands in one of these; they are stored again and again, and repeats are looked for
    # within one commit only.
    count = max(-(-size.subjects // SUBJECTS_PER_FRAME), _FRAMES_PER_COMMIT)
    endless = itertools.cycle(list(itertools.islice(_frames(size, MessageIds(1)), count)))
    for _ in range(0, size.messages, FRAME_MESSAGES * _FRAMES_PER_COMMIT):
        store.append(list(itertools.islice(endless, _FRAMES_PER_COMMIT)))
        store.commit_and_step()
    broker = _broker(store)
    for number in range(size.groups):
        _pull(broker, size, number, 1)
    store.close()


def _broker(store: Store) -> Broker:
    """What is above a store, without its threads."""
    broker = Broker(store, SYSTEM_CLOCK, BrokerSettings(store=_options()), post=lambda call: call())
    broker.delivery.start(broker.time.now_ms())
    return broker


def _frames(size: _Size, ids: MessageIds) -> Iterator[MessageFrame]:
    """Frames without end, over all subjects in turn."""
    names = [f"subject-{number}" for number in range(size.subjects)]
    per_subject = FRAME_MESSAGES // SUBJECTS_PER_FRAME
    body = random.Random(7).randbytes(BODY_BYTES)
    for first in itertools.cycle(range(0, len(names), SUBJECTS_PER_FRAME)):
        records = {
            name: [
                encode_record(
                    Record(message_id=ids.next_id(), subject=name, body=body, born_at_ms=1)
                )
                for _ in range(per_subject)
            ]
            for name in names[first : first + SUBJECTS_PER_FRAME]
        }
        yield parse_message_frame(build_message_frame(records))


def _send_us(store: Store, fresh: Iterator[MessageFrame]) -> float:
    frames = list(itertools.islice(fresh, MEASURED))
    started_s = time.process_time()
    for frame in frames:
        store.append([parse_message_frame(frame.data)])
        store.commit_and_step()
    return (time.process_time() - started_s) / (MEASURED * FRAME_MESSAGES) * 1e6


def _pull_us(broker: Broker, size: _Size) -> float:
    """Every pull is of another group where there are several; what is handed out is acked."""
    got = 0
    started_s = time.process_time()
    for number in range(MEASURED):
        got += _pull(broker, size, number * 11 % size.groups, FRAME_MESSAGES // SUBJECTS_PER_FRAME)
    return (time.process_time() - started_s) / max(1, got) * 1e6


def _pull(broker: Broker, size: _Size, number: int, count: int) -> int:
    """Pull and ack for the group of this number, on its subject; how many messages there were."""
    delivery, now_ms = broker.delivery, broker.time.now_ms()
    subject, group = f"subject-{number * 7 % size.subjects}", f"group-{number}"
    request = PullRequest(subject=subject, group=group, consumer="one", max_messages=count)
    delivery.begin_pull(request, now_ms)
    out = delivery.pull(request, now_ms)
    if out is None:
        return 0
    first = out.head.first_pull_sequence
    acks = ((first, first + len(out.records)),)
    settlement = Settlement(token=out.head.token, acks=acks)
    delivery.settle(
        SettleRequest(subject=subject, group=group, consumer="one", settlements=(settlement,)),
        now_ms,
    )
    return len(out.records)
