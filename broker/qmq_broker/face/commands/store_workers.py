"""Several processes for the segments of a verification: CRC-32C and copying keep one core busy.

Small logs are done in this process: starting another costs more than reading a few hundred megabytes.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Final

from qmq_broker.storage.files.disk import OsDisk
from qmq_broker.storage.upkeep.verify_segment import (
    Run,
    SegmentOutcome,
    SegmentTask,
    verify_segment,
)

#: Log bytes below which this process does all of it.
ALONE_BYTES_MAX: Final = 256 * 1024 * 1024
WORKERS_MAX: Final = 8


def runner(
    directory: str, workers: int, on_done: Callable[[SegmentTask], None] = lambda task: None
) -> Run:
    """How the segments of the data directory at `directory` are read, by up to so many processes.

    `on_done` is called here, once for each segment.
    """

    def run(tasks: list[SegmentTask]) -> list[SegmentOutcome]:
        segment_bytes = max((task.format.segment_bytes for task in tasks), default=0)
        count = min(workers, len(tasks), WORKERS_MAX)
        outcomes = []
        if count < 2 or segment_bytes * len(tasks) < ALONE_BYTES_MAX:
            disk = OsDisk(directory, is_read_only=True)
            try:
                for task in tasks:
                    outcomes.append(verify_segment(disk, task))
                    on_done(task)
            finally:
                disk.close()
            return outcomes
        # Fresh processes: nothing of this one, its threads least of all, is copied into them.
        fresh = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(count, mp_context=fresh) as pool:
            found = pool.map(_verify, [(directory, task) for task in tasks])
            for task, outcome in zip(tasks, found, strict=True):
                outcomes.append(outcome)
                on_done(task)
        return outcomes

    return run


def workers_here() -> int:
    """As many as this process may use cores."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _verify(work: tuple[str, SegmentTask]) -> SegmentOutcome:
    directory, task = work
    disk = OsDisk(directory, is_read_only=True)
    try:
        return verify_segment(disk, task)
    finally:
        disk.close()
