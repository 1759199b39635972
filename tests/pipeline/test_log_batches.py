"""How a scan of a log is cut into the partitions of Spark's tasks."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from qmq_broker.storage.files import layout
from qmq_broker.storage.logs.frame_seek import LogRange
from qmq_client.wire.frame import build_message_frame, parse_message_frame
from qmq_client.wire.message_id import MessageIds
from qmq_client.wire.record import encode_record
from qmq_pipeline.errors import ExpiredRangeError
from qmq_pipeline.places.disks import LocalDisk, ReadFile
from qmq_pipeline.places.log import COMMIT_LOG, LogReader
from qmq_pipeline.places.options import LogOptions, Place
from qmq_pipeline.places.places import open_log
from qmq_pipeline.sources.log_batches import chosen_offsets, plan
from tests.pipeline.world import FORGETFUL, START_MS, DataDirectory, messages

MIB = 1024 * 1024


@pytest.mark.parametrize(
    ("log_bytes", "asked_bytes", "tasks"),
    [
        (0, None, 1),
        (60 * MIB, None, 1),
        (70 * MIB, None, 2),
        (231 * MIB, None, 4),
        (280 * MIB, None, 4),
        (1024 * MIB, None, 16),
        (10_240 * MIB, None, 80),
        (10_240 * MIB, MIB, 10_240),
        (MIB + 1, MIB, 2),
    ],
)
def test_a_scan_is_cut_into_few_partitions_but_enough_for_all_cores(
    log_bytes: int,
    asked_bytes: int | None,
    tasks: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory = DataDirectory(tmp_path / "broker")
    options = LogOptions(place=Place(path=str(directory.path)), partition_bytes=asked_bytes)
    asked: list[tuple[int, ...]] = []

    def shares(_: LogReader, *share: int) -> list[LogRange]:
        asked.append(share)
        return []

    monkeypatch.setattr(LogReader, "shares", shares)
    log = open_log(options.place, COMMIT_LOG)
    assert plan(log, options, 100, 100 + log_bytes) == []
    log.close()
    assert asked == [(100, 100 + log_bytes, tasks)]


def test_P1_shares_cover_any_part_of_the_log_and_are_about_equally_long(
    tmp_path: Path,
) -> None:
    """Over many segments, for any number of them, and from any frame to any other."""
    directory = DataDirectory(tmp_path / "broker", FORGETFUL)
    ids = MessageIds(9)
    for count in random.Random(21).choices(range(1, 60), k=60):
        directory.append(messages(ids, count), frame_records=count)
    log = LogReader(LocalDisk(str(directory.path)), COMMIT_LOG, source=str(directory.path))
    bounds = log.bounds()
    frames = list(log.frames(LogRange(bounds.first_offset, bounds.next_offset)))
    longest = max(frame.header.frame_bytes for frame in frames)
    begins = [frame.offset for frame in frames]
    assert log.segment_bytes < bounds.next_offset
    for first, after in ((0, bounds.next_offset), (begins[7], begins[-5]), (begins[3], begins[3])):
        for count in (1, 2, 3, 7, 1_000):
            shares = log.shares(first, after, count)
            cuts = [one.first_offset for one in shares]
            assert [*cuts[1:], after] == [one.next_offset for one in shares] or first == after
            assert set(cuts) <= set(begins)
            assert len(shares) <= count
            share_bytes = (after - first) / count
            assert all(abs(b - a - share_bytes) <= longest for a, b in shares) or count == 1_000
            read = [frame.offset for one in shares for frame in log.frames(one)]
            assert read == [one for one in begins if first <= one < after]


def test_P1_times_and_offsets_choose_the_part_of_the_log_that_is_read(tmp_path: Path) -> None:
    """What they leave out is not read at all, and nothing else is left out."""
    directory = DataDirectory(tmp_path / "broker", FORGETFUL)
    ids = MessageIds(3)
    for number in range(60):
        directory.append(messages(ids, 30), at_ms=START_MS + 60_000 * number, frame_records=10)
    options = LogOptions(place=Place(path=str(directory.path)))
    log = open_log(options.place, COMMIT_LOG)
    bounds = log.bounds()
    assert log.segment_bytes < bounds.next_offset
    every = [one for one in log.frames(LogRange(0, bounds.next_offset)) if one.header.record_count]

    def read(**chosen: Any) -> list[int]:
        first, after = chosen_offsets(log, replace(options, **chosen))
        return [one.offset for one in every if first <= one.offset < after]

    for frame in every[::17]:
        at_ms, here = frame.header.stored_at_ms, frame.offset
        early = [one.offset for one in every if one.header.stored_at_ms < at_ms]
        assert read(next_stored_at_ms=at_ms) == early
        assert read(first_stored_at_ms=at_ms) == [one.offset for one in every[len(early) :]]
        for offset in (here - 8, here - 1, here, here + 1):
            late = [one.offset for one in every if one.offset >= offset]
            assert read(skip_below_offset=offset) == late
    assert read(skip_below_offset=bounds.next_offset + 1) == []
    assert read(first_stored_at_ms=START_MS + 60_000, next_stored_at_ms=START_MS) == []
    log.close()
    directory.close()


def test_P1_a_condition_on_offsets_that_are_gone_is_none_that_they_are_there(
    tmp_path: Path,
) -> None:
    directory = DataDirectory(tmp_path / "broker", FORGETFUL)
    directory.append(messages(MessageIds(1), 2_000), frame_records=20)
    first_offset = directory.forget(segments=1)
    options = LogOptions(place=Place(path=str(directory.path)), skip_below_offset=8)
    log = open_log(options.place, COMMIT_LOG)
    assert chosen_offsets(log, options)[0] == first_offset
    with pytest.raises(ExpiredRangeError, match="offset 8 is asked for"):
        chosen_offsets(log, replace(options, first_offset=8))
    log.close()
    directory.close()


class DiskByRequest(LocalDisk):
    """Looks for a file at each read, as a broker does when it is asked over HTTP."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        #: File and position behind which nothing was to be read ahead.
        self.ends: list[tuple[str, int]] = []

    def open(self, path: str, *, is_new: bool = False) -> ReadFile:
        return _Asked(self.root, path, self.ends)


class _Asked(ReadFile):
    def __init__(self, root: str, path: str, ends: list[tuple[str, int]]) -> None:
        self._disk, self._path, self._ends = LocalDisk(root), path, ends

    def read(self, position: int, count: int) -> bytes:
        file = self._disk.open(self._path)
        try:
            return file.read(position, count)
        finally:
            file.close()

    def length(self) -> int:
        return len(self.read(0, 1024 * 1024))

    def end_at(self, position: int) -> None:
        self._ends.append((self._path, position))

    def close(self) -> None:
        """Nothing is open."""


def test_who_reads_a_range_says_to_each_file_where_it_ends(tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path / "broker", FORGETFUL)
    directory.append(messages(MessageIds(1), 1_000), frame_records=20)
    disk = DiskByRequest(str(directory.path))
    log = LogReader(disk, COMMIT_LOG, source="broker")
    bounds = log.bounds()
    after = log.frame_from(bounds.next_offset - 20_000, bounds)
    disk.ends.clear()
    assert list(log.frames(LogRange(0, after)))
    bases = range(0, after, FORGETFUL.segment_bytes)
    assert disk.ends == [(layout.segment_path(COMMIT_LOG, one), after - one) for one in bases]
    log.close()
    directory.close()


def test_P1_a_log_that_retention_shortens_while_it_is_cut_is_named(tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path / "broker", FORGETFUL)
    directory.append(messages(MessageIds(1), 4_000), frame_records=20)
    log = LogReader(DiskByRequest(str(directory.path)), COMMIT_LOG, source="broker")
    bounds = log.bounds()
    directory.forget(2)
    with pytest.raises(ExpiredRangeError, match="retention has deleted"):
        log.shares(bounds.first_offset, bounds.next_offset, 50)
    log.close()
    directory.close()


def test_P1_a_frame_that_a_power_cut_left_behind_a_torn_one_is_no_place_to_cut(
    tmp_path: Path,
) -> None:
    """In a recycled segment it stays where it is, and the padding of the segment comes to lie over it."""
    options = replace(FORGETFUL, spare_segments=2, growth_bytes=FORGETFUL.segment_bytes)
    directory = DataDirectory(tmp_path / "before", options)
    ids = MessageIds(9)
    while directory.store.written_offset < 5 * options.segment_bytes:
        directory.append(messages(ids, 100), frame_records=10)
    directory.forget(2)
    while directory.store.written_offset < 6.5 * options.segment_bytes:
        directory.append(messages(ids, 20), frame_records=10)
    torn = directory.store.written_offset
    _append_unsynced(directory, ids, body_bytes=5_000)
    behind = directory.store.written_offset
    _append_unsynced(directory, ids, body_bytes=100)
    shutil.copytree(directory.path, tmp_path / "after")
    directory.close()
    base = torn - torn % options.segment_bytes
    with (tmp_path / "after" / layout.segment_path(COMMIT_LOG, base)).open("r+b") as segment:
        segment.seek(torn - base + 1_000)
        segment.write(b"\xff" * 512)

    directory = DataDirectory(tmp_path / "after", options)
    assert directory.store.written_offset == torn
    directory.append(messages(ids, 1))
    padding = directory.store.written_offset
    room_bytes = base + options.segment_bytes - padding
    _append_unsynced(directory, ids, body_bytes=room_bytes)
    directory.store.commit_and_step()
    directory.settle()
    log = LogReader(LocalDisk(str(directory.path)), COMMIT_LOG, source=str(directory.path))
    bounds = log.bounds()
    assert padding < behind < base + options.segment_bytes < bounds.next_offset
    assert log.frame_from(padding + 8, bounds) == base + options.segment_bytes
    whole = LogRange(bounds.first_offset, bounds.next_offset)
    every = [frame.data for frame in log.frames(whole)]
    for count in range(1, 60):
        shares = log.shares(bounds.first_offset, bounds.next_offset, count)
        assert [frame.data for one in shares for frame in log.frames(one)] == every
    directory.close()


def _append_unsynced(directory: DataDirectory, ids: MessageIds, *, body_bytes: int) -> None:
    """One message in a frame of its own, written and not synced."""
    (record,) = messages(ids, 1)
    long = msgspec.structs.replace(record, body=bytes(body_bytes))
    frame = build_message_frame({long.subject: [encode_record(long)]})
    directory.store.append([parse_message_frame(frame)])
