"""R6: a log that goes on for more than 8 GiB, on recycled segments and on new ones, third by third.

The first gigabytes of new blocks come several times faster than those that follow, so only the last
third says what a disk keeps up. Frames of 500 messages are appended and synced four at a time by one
thread, without a network, so that the disk is what is measured. Both logs are given up behind their last
segments, as by retention: one keeps them to be written again, the other removes them and takes new ones.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.blocks import MIB, make_recycled
from benchmarks.load import BATCH_MESSAGES, BODY_BYTES, make_frame, make_messages
from benchmarks.measure import interleave, paired_ratios
from benchmarks.result import Conditions, Goal, Row
from benchmarks.suite import Bench
from qmq_broker.options import StoreOptions
from qmq_broker.storage.files.disk import OsDisk
from qmq_broker.storage.store import Store
from qmq_client.clock import SYSTEM_CLOCK
from qmq_client.wire.frame import MessageFrame, parse_message_frame

#: Frames of one commit: 2.3 MiB.
FRAMES_PER_COMMIT: Final = 4
#: Segments that a log has before the oldest goes.
SEGMENTS_KEPT: Final = 3
PARTS: Final = 3
#: A round writes 22 GiB; more of them would take a slow disk half an hour, and each says by itself
#: what its last third is to its first.
ROUNDS_MAX: Final = 3
#: Frames that take turns; repeats are not looked for.
_FRAMES: Final = 64
_WAYS: Final = {"recycled": 2, "new": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    #: MiB/s of each third.
    parts: tuple[float, ...]
    written_bytes: int

    @property
    def ratio(self) -> float:
        """The last third by the first."""
        return self.parts[-1] / self.parts[0]


def run(bench: Bench) -> list[Row]:
    """Rates of each third on both kinds of blocks, and the ratios of the thirds."""
    size_bytes = bench.effort.pick(tiny=48, quick=1_536, full=9_216) * MIB
    segment_bytes = bench.effort.pick(tiny=16, quick=128, full=1_024) * MIB
    messages = make_messages()
    count = bench.effort.pick(tiny=4, quick=_FRAMES, full=_FRAMES)
    frames = [parse_message_frame(make_frame(messages, BATCH_MESSAGES)) for _ in range(count)]
    runs = interleave(
        {
            name: partial(_run, bench, frames, size_bytes, segment_bytes, spares)
            for name, spares in _WAYS.items()
        },
        rounds=min(bench.rounds, ROUNDS_MAX),
    )
    rows = [
        _row(
            "last third / first third, recycled",
            "ratio",
            [one.ratio for one in runs["recycled"]],
            runs["recycled"],
            goal=Goal(bound=0.5, is_floor=True),
        ),
        _row(
            "last third / first third, new",
            "ratio",
            [one.ratio for one in runs["new"]],
            runs["new"],
        ),
        _row(
            "last third: recycled / new",
            "ratio",
            paired_ratios(*([one.parts[-1] for one in runs[name]] for name in _WAYS)),
            runs["recycled"],
        ),
    ]
    for name, found in runs.items():
        for number in range(PARTS):
            samples = [one.parts[number] for one in found]
            rows.append(_row(f"third {number + 1}, {name}", "MiB/s", samples, found))
    return rows


def _row(
    figure: str, unit: str, samples: list[float], runs: list[_Run], goal: Goal | None = None
) -> Row:
    return Row(
        figure=figure,
        unit=unit,
        samples=tuple(samples),
        goal=goal,
        conditions=Conditions(
            durability="fdatasync for each commit",
            client=f"one thread with the store, {FRAMES_PER_COMMIT} frames a commit",
            batch_messages=BATCH_MESSAGES,
            message_bytes=BODY_BYTES,
            written_bytes=sorted(one.written_bytes for one in runs)[len(runs) // 2],
            note=f"at most {SEGMENTS_KEPT} segments and 2 spares on the disk",
        ),
    )


def _run(
    bench: Bench, frames: list[MessageFrame], size_bytes: int, segment_bytes: int, spares: int
) -> _Run:
    with tempfile.TemporaryDirectory(dir=bench.directory) as name:
        data = Path(name) / "data"
        if spares:
            # A log that has gone on for long: as many written segments as it will have at once.
            make_recycled(data, segment_bytes=segment_bytes, segments=SEGMENTS_KEPT + 1)
        options = StoreOptions(
            segment_bytes=segment_bytes, spare_segments=spares, dedupe_ids=0, index_entries=0
        )
        store = Store.open(OsDisk(str(data)), SYSTEM_CLOCK, options)
        try:
            parts = _write(store, frames, size_bytes, segment_bytes)
            return _Run(parts=parts, written_bytes=store.written_offset)
        finally:
            store.close()


def _write(
    store: Store, frames: list[MessageFrame], size_bytes: int, segment_bytes: int
) -> tuple[float, ...]:
    endless = itertools.cycle(frames)
    rates = []
    for number in range(1, PARTS + 1):
        begun_at, until = store.written_offset, size_bytes * number // PARTS
        started_s = time.monotonic()
        while store.written_offset < until:
            store.append(list(itertools.islice(endless, FRAMES_PER_COMMIT)))
            store.commit_and_step()
            surplus = store.written_offset - SEGMENTS_KEPT * segment_bytes
            if surplus - store.first_offset >= segment_bytes:
                store.give_up_below(surplus)
        duration_s = time.monotonic() - started_s
        rates.append((store.written_offset - begun_at) / MIB / duration_s)
    return tuple(rates)
