"""Several processes for the segments of a verification: CRC-32C and copying keep one core busy.

Small logs are verified in this process: starting another one costs more than reading a few hundred
megabytes.
"""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from threading import Thread
from typing import Final

from qmq_broker.storage.files.disk import OsDisk
from qmq_broker.storage.upkeep.verify_segment import (
    Run,
    SegmentOutcome,
    SegmentTask,
    verify_segment,
)

#: With fewer log bytes, this process does everything.
ALONE_BYTES_MAX: Final = 256 * 1024 * 1024
WORKERS_MAX: Final = 8


def runner(directory: str, workers: int) -> Run:
    """How to read the segments of the data directory, with up to this many processes."""

    def run(tasks: list[SegmentTask]) -> list[SegmentOutcome]:
        segment_bytes = max((task.format.segment_bytes for task in tasks), default=0)
        count = min(workers, len(tasks), WORKERS_MAX)
        if count < 2 or segment_bytes * len(tasks) < ALONE_BYTES_MAX:
            disk = OsDisk(directory, is_read_only=True)
            try:
                return [verify_segment(disk, task) for task in tasks]
            finally:
                disk.close()
        # Fresh processes: nothing of this one, least of all its threads, is copied into them.
        fresh = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(count, fresh, initializer=end_with_parent) as pool:
            return list(pool.map(_verify, [(directory, task) for task in tasks]))

    return run


def end_with_parent() -> None:
    """In a process of a pool: see that it ends when its parent is gone, however that came.

    By itself it would wait for work for ever: its siblings hold the other end of that line, too.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)  # whatever it is in the middle of: nobody will hear of it

    Thread(target=watch, name="parent", daemon=True).start()


def workers_here() -> int:
    """As many as there are cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _verify(work: tuple[str, SegmentTask]) -> SegmentOutcome:
    directory, task = work
    disk = OsDisk(directory, is_read_only=True)
    try:
        return verify_segment(disk, task)
    finally:
        disk.close()
