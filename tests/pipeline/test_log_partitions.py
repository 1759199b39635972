"""How a scan of a log is cut into the partitions of Spark's tasks."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq_broker.storage.logs.frame_seek import LogRange
from qmq_pipeline.places.log import COMMIT_LOG, LogReader
from qmq_pipeline.places.options import LogOptions, Place
from qmq_pipeline.places.places import open_log
from qmq_pipeline.sources.log_partitions import plan
from tests.pipeline.world import DataDirectory

MIB = 1024 * 1024


@pytest.mark.parametrize(
    ("log_bytes", "asked_bytes", "range_bytes"),
    [
        (0, None, 48 * MIB),
        (231 * MIB, None, 48 * MIB),
        (1024 * MIB, None, 64 * MIB),
        (10_240 * MIB, None, 128 * MIB),
        (10_240 * MIB, MIB, MIB),
    ],
)
def test_a_scan_is_cut_into_few_partitions_but_enough_for_all_cores(
    log_bytes: int,
    asked_bytes: int | None,
    range_bytes: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory = DataDirectory(tmp_path / "broker")
    options = LogOptions(place=Place(path=str(directory.path)), partition_bytes=asked_bytes)
    asked: list[tuple[int, ...]] = []

    def ranges(_: LogReader, *range_: int) -> list[LogRange]:
        asked.append(range_)
        return []

    monkeypatch.setattr(LogReader, "ranges", ranges)
    log = open_log(options.place, COMMIT_LOG)
    assert plan(log, options, 100, 100 + log_bytes) == []
    log.close()
    assert asked == [(100, 100 + log_bytes, range_bytes)]
