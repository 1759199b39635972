"""What a worker of Spark has loaded is taken out of the search for garbage, by whatever it plans or reads first."""

from __future__ import annotations

import gc
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from qmq_client.wire.message_id import MessageIds
from qmq_pipeline.places.log import COMMIT_LOG
from qmq_pipeline.places.options import LogOptions, Place
from qmq_pipeline.places.outbox_options import OutboxOptions
from qmq_pipeline.places.places import open_log
from qmq_pipeline.sources import log_batches, outbox_batches, worker_heap
from qmq_pipeline.tables.schemas import OUTBOX
from tests.pipeline.world import START_MS, DataDirectory, OutboxDatabase, messages

#: What a worker plans, and what it reads of that.
_Work = tuple[Callable[[], list[Any]], Callable[[Any], list[Any]]]


@pytest.fixture
def heap() -> Iterator[None]:
    """As in a process that has frozen nothing."""
    worker_heap._prepare.cache_clear()
    gc.unfreeze()
    yield
    worker_heap._prepare.cache_clear()
    gc.unfreeze()
    gc.collect()
    gc.freeze()  # as `tests/conftest.py` had it


#: Takes and frees blocks as a scan does, and says how many pages the system had to clear.
_SCAN = """
import resource
from qmq_pipeline.sources.worker_heap import prepare_heap
prepare_heap()
for _ in range(101):
    blocks = [b"x" * number for number in range(1 << 20, (1 << 20) + 4)]
    del blocks
    if not _:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc that is told")
@pytest.mark.parametrize(
    ("is_worker", "faults_min", "faults_max"), [("", 50_000, 500_000), ("1", 0, 1_000)]
)
def test_a_worker_that_is_used_again_keeps_the_memory_of_its_blocks(
    is_worker: str, faults_min: int, faults_max: int
) -> None:
    environment = {
        **os.environ,
        worker_heap.REUSED: is_worker,
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    ran = subprocess.run(
        [sys.executable, "-c", _SCAN], env=environment, check=True, capture_output=True
    )
    assert faults_min <= int(ran.stdout) <= faults_max


@pytest.mark.parametrize("source", ["log", "outbox"])
def test_a_worker_that_is_used_again_searches_only_what_came_in_since_its_first_task(
    source: str, tmp_path: Path, heap: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, read = _SOURCES[source](tmp_path)
    rows = [read(one) for one in plan()]
    assert rows
    assert gc.get_freeze_count() == 0  # somebody's own process
    monkeypatch.setenv(worker_heap.REUSED, "1")
    partitions = plan()
    assert gc.get_freeze_count() > 0
    gc.unfreeze()
    assert [read(one) for one in partitions] == rows
    assert gc.get_freeze_count() == 0  # once in each process
    worker_heap._prepare.cache_clear()
    assert [read(one) for one in partitions] == rows
    assert gc.get_freeze_count() > 0


def _log(tmp_path: Path) -> _Work:
    options = LogOptions(place=Place(path=str(_filled(tmp_path).path)), columns=("sequence",))

    def plan() -> list[Any]:
        log = open_log(options.place, COMMIT_LOG)
        bounds = log.bounds()
        found = log_batches.plan(log, options, bounds.first_offset, bounds.next_offset)
        log.close()
        return [*found]

    return plan, lambda one: list(log_batches.read_partition(one))


def _outbox(tmp_path: Path) -> _Work:
    database = OutboxDatabase(tmp_path / "orders.db")
    database.insert(messages(MessageIds(1), 5), created_at_ms=START_MS)
    database.close()
    names = tuple(name for name in OUTBOX.names if name != "scanned_at")
    section = database.section
    options = OutboxOptions(
        sections=(section,),
        columns=names,
        partition_rows=1_000,
        safety_ms=0,
    )
    return (
        lambda: [*outbox_batches.plan(section, options)],
        lambda one: list(outbox_batches.read_partition(one)),
    )


_SOURCES: dict[str, Callable[[Path], _Work]] = {
    "log": _log,
    "outbox": _outbox,
}


def _filled(tmp_path: Path) -> DataDirectory:
    directory = DataDirectory(tmp_path / "broker")
    directory.append(messages(MessageIds(1), 20))
    directory.close()
    return directory
