"""R5: processor time of an append – check, validate, index, log – against that of a bare `pwrite`.

All ways get the same frames of 500 messages that were built beforehand, in turns of a few frames within
one process and one thread, and none waits for the disk: the flush costs the same for all and is not in
the figure. The append is all that the writer does for one request: parse and verify the frame, look its
ids up, stamp it, write it, make the entries of its consume queue. The third way is a `pwrite` behind one
checksum over the frame: what no broker can do without that trusts no sender and no line.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.blocks import make_recycled, segment_bytes_for, write_blocks
from benchmarks.load import BATCH_MESSAGES, BODY_BYTES, make_frame, make_messages
from benchmarks.measure import interleave, paired_ratios
from benchmarks.result import Conditions, Row
from benchmarks.suite import Bench
from qmq_broker.options import StoreOptions
from qmq_broker.storage.files.disk import OsDisk
from qmq_broker.storage.store import Store
from qmq_client.clock import SYSTEM_CLOCK
from qmq_client.wire.checksum import crc32c
from qmq_client.wire.frame import parse_message_frame

#: How often each way has its turn within a round.
TURNS: Final = 10
_CLIENT: Final = "one thread, in one process with the store"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    """Processor microseconds per message."""

    append: float
    checked: float
    bare: float
    written_bytes: int


def run(bench: Bench) -> list[Row]:
    """The cost of both ways on recycled and on new blocks, and their ratios."""
    frame_count = bench.effort.pick(tiny=TURNS, quick=20 * TURNS, full=40 * TURNS)
    source = make_messages()
    rows = []
    for is_recycled, name in ((True, "recycled"), (False, "new")):
        rounds = []
        for _ in range(bench.rounds):
            frames = [make_frame(source, BATCH_MESSAGES) for _ in range(frame_count)]
            with tempfile.TemporaryDirectory(dir=bench.directory) as directory:
                rounds.append(_round(Path(directory), frames, is_recycled=is_recycled))
        append, bare = [one.append for one in rounds], [one.bare for one in rounds]
        checked = [one.checked for one in rounds]
        conditions = Conditions(
            durability="none: processor time without the flush",
            client=_CLIENT,
            batch_messages=BATCH_MESSAGES,
            message_bytes=BODY_BYTES,
            written_bytes=rounds[0].written_bytes,
            note=f"{name} blocks",
        )
        unit = "µs per message"
        rows += [
            _row(
                f"append / bare pwrite, {name}",
                "ratio",
                paired_ratios(append, bare),
                conditions,
            ),
            _row(
                f"checksum and pwrite / bare pwrite, {name}",
                "ratio",
                paired_ratios(checked, bare),
                conditions,
            ),
            _row(f"append, {name}", unit, append, conditions),
            _row(f"bare pwrite, {name}", unit, bare, conditions),
        ]
    return rows


def _row(figure: str, unit: str, samples: list[float], conditions: Conditions) -> Row:
    return Row(figure=figure, unit=unit, samples=tuple(samples), conditions=conditions)


def _round(directory: Path, frames: list[bytes], *, is_recycled: bool) -> _Round:
    count = sum(map(len, frames))
    segment_bytes = segment_bytes_for(count)
    data, paths = directory / "data", [directory / "bare", directory / "checked"]
    if is_recycled:
        make_recycled(data, segment_bytes=segment_bytes)
        for path in paths:
            write_blocks(path, segment_bytes)
    options = StoreOptions(segment_bytes=segment_bytes, index_entries=0)
    store = Store.open(OsDisk(str(data)), SYSTEM_CLOCK, options)
    with ExitStack() as stack:
        stack.callback(store.close)
        bare, checked = (_Loop(path) for path in paths)
        for loop in (bare, checked):
            stack.callback(loop.close)
        step = len(frames) // TURNS
        shares = [frames[first : first + step] for first in range(0, len(frames), step)]

        def append(frame: bytes) -> None:
            store.append([parse_message_frame(frame)])

        def check_and_write(frame: bytes) -> None:
            crc32c(frame)
            checked.write(frame)

        ways = {"append": append, "checked": check_and_write, "bare": bare.write}
        left = {name: iter(shares) for name in ways}
        seconds = interleave(
            {name: partial(_next_s, work, left[name]) for name, work in ways.items()}, rounds=TURNS
        )
    messages = TURNS * step * BATCH_MESSAGES
    us = {name: sum(spent) / messages * 1e6 for name, spent in seconds.items()}
    return _Round(
        append=us["append"], checked=us["checked"], bare=us["bare"], written_bytes=3 * count
    )


class _Loop:
    """A file that is written from its beginning on, one frame behind the other."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT)
        self._offset = 0

    def write(self, frame: bytes) -> None:
        self._offset += os.pwrite(self._file, frame, self._offset)

    def close(self) -> None:
        os.close(self._file)


def _next_s(work: Callable[[bytes], object], shares: Iterator[list[bytes]]) -> float:
    return _processor_s(work, next(shares))


def _processor_s(work: Callable[[bytes], object], frames: list[bytes]) -> float:
    started_ns = time.thread_time_ns()
    for frame in frames:
        work(frame)
    return (time.thread_time_ns() - started_ns) / 1e9
