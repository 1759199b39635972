"""The golden summary of version 1 is written, and read, byte for byte: that of the golden segment."""

from __future__ import annotations

from pathlib import Path

from qmq_broker.storage.files.disk import OsDisk
from qmq_broker.storage.logs.frame_seek import LogRange
from qmq_broker.storage.logs.segments import Segments
from qmq_broker.storage.logs.summaries import Summaries
from qmq_broker.storage.logs.summary import SubjectSpan, TimeMark
from tests.golden.storage_version_1 import NOW_MS, SEGMENT_BYTES, STORE_ID, write_sealed_segment
from tests.golden.version_1 import golden

PATH = f"summary/{0:020d}"


def open_summaries(root: Path) -> Summaries:
    write_sealed_segment(root)
    disk = OsDisk(str(root))
    disk.make_directory("summary")
    segments = Segments(disk, "commitlog", SEGMENT_BYTES)
    bounds = LogRange(0, SEGMENT_BYTES)
    return Summaries(disk, segments, store_id=STORE_ID, bounds=lambda: bounds)


def test_the_summary_is_written_as_in_version_1(tmp_path: Path) -> None:
    summaries = open_summaries(tmp_path)
    while summaries.step(10_000):
        pass
    assert (tmp_path / PATH).read_bytes() == golden("summary_sealed")


def test_the_golden_summary_is_read(tmp_path: Path) -> None:
    summaries = open_summaries(tmp_path)
    (tmp_path / PATH).write_bytes(golden("summary_sealed"))
    found = summaries.find(0)
    assert found is not None
    assert (found.frames, found.messages, found.subject_count) == (2, 8, 2)
    assert (found.first_stored_at_ms, found.last_stored_at_ms) == (NOW_MS, NOW_MS)
    assert found.marks == (TimeMark(88, NOW_MS),)
    assert found.subjects == (
        SubjectSpan("flight.delayed", 2, 0, 2, 88, 504),
        SubjectSpan("flight.departed", 6, 0, 6, 88, 504),
    )
