"""An archive as a stream: what is archived comes once, by whole segments, and the query may go on at the log."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes

from qmq_client.wire.message_id import MessageIds
from qmq_pipeline.errors import ExpiredRangeError, SourceError
from qmq_pipeline.jobs.archive import archive
from qmq_pipeline.places.config import PipelineConfig
from qmq_pipeline.places.options import Place, parse_log_options
from qmq_pipeline.sources.archive_stream import ArchiveStreamReader
from qmq_pipeline.sources.log_stream import LogStreamReader
from qmq_pipeline.tables.lake import Lake
from qmq_pipeline.work.workers import LocalWorkers
from tests.pipeline.object_store import object_store
from tests.pipeline.streams import take_what_is_there
from tests.pipeline.world import FORGETFUL, DataDirectory, messages

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SEGMENT = FORGETFUL.segment_bytes
Position = dict[str, Any]


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[DataDirectory]:
    made = DataDirectory(tmp_path / "broker", FORGETFUL)
    yield made
    made.close()


@pytest.fixture
def folder(tmp_path: Path) -> str:
    made = str(tmp_path / "archive")
    Lake(made).prepare()
    return made


def archived(workers: LocalWorkers, directory: DataDirectory, folder: str, number: int) -> int:
    """More messages, and what is whole of them archived; where the archive ends."""
    directory.append(messages(MessageIds(number), 1500), frame_records=20)
    config = PipelineConfig(tables=folder, place=Place(path=str(directory.path)))
    return archive(workers, config).next_offsets["commitlog"]


def reader_of(folder: str, **more: str) -> ArchiveStreamReader:
    return ArchiveStreamReader(parse_log_options({"path": folder, "columns": "sequence", **more}))


def sequences(
    reader: ArchiveStreamReader | LogStreamReader, start: Position, end: Position
) -> list[int]:
    found = [
        number
        for part in reader.partitions(start, end)
        for batch in reader.read(part)
        for number in batch["sequence"].to_pylist()
    ]
    return sorted(found)


def test_what_is_archived_comes_once_in_batches_of_whole_segments(
    workers: LocalWorkers, directory: DataDirectory, folder: str
) -> None:
    end = archived(workers, directory, folder, 1)
    reader = reader_of(folder)
    here, found, offsets = reader.initialOffset(), list[int](), list[int]()
    while True:
        after = reader.latestOffset(here, ReadMaxBytes(SEGMENT * 3 // 2))
        if after == here:
            break
        found += sequences(reader, here, after)
        offsets.append(after["offset"])
        here = after
        if here["offset"] == end < 6 * SEGMENT:
            end = archived(workers, directory, folder, end)
    assert offsets == list(range(SEGMENT, end + 1, SEGMENT))
    assert len(offsets) > 4
    assert found == list(range(len(found)))
    assert sequences(reader, reader.initialOffset(), here) == found
    # A bound below a segment's length is one segment, and one of three times as much is three.
    begin = reader.initialOffset()
    assert reader.latestOffset(begin, ReadMaxBytes(1))["offset"] == SEGMENT
    assert reader.latestOffset(begin, ReadMaxBytes(3 * SEGMENT))["offset"] == 3 * SEGMENT
    assert reader.latestOffset(begin, ReadAllAvailable()) == here == reader.reportLatestOffset()


def test_a_query_goes_on_at_the_log_where_the_archive_ends(
    workers: LocalWorkers, directory: DataDirectory, folder: str
) -> None:
    archived(workers, directory, folder, 1)
    reader = reader_of(folder)
    end = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    before = sequences(reader, reader.initialOffset(), end)
    directory.forget(segments=2)
    options = {"path": str(directory.path), "columns": "sequence"}
    at_the_log = LogStreamReader(parse_log_options(options))
    later = at_the_log.latestOffset(end, ReadAllAvailable())
    assert before + sequences(at_the_log, end, later) == list(range(1500))
    assert len(before) < 1500
    at_the_log.stop()


def test_of_an_archive_that_is_empty_a_query_takes_what_comes(
    workers: LocalWorkers, directory: DataDirectory, folder: str
) -> None:
    directory.append(messages(MessageIds(1), 1500), frame_records=20)
    directory.forget(segments=1)
    reader = reader_of(folder)
    start = reader.initialOffset()
    assert reader.latestOffset(start, ReadAllAvailable()) == start == reader.reportLatestOffset()
    assert reader.partitions(start, start) == []
    archived(workers, directory, folder, 2)
    end = reader.latestOffset(start, ReadAllAvailable())
    found = sequences(reader, start, end)
    assert found == list(range(found[0], found[0] + len(found)))
    assert (found[0] > 0, end["offset"] % SEGMENT) == (True, 0)
    below = reader_of(folder, first_offset="100")
    with pytest.raises(ExpiredRangeError, match="the archive begins at"):
        below.partitions(below.initialOffset(), end)


def test_a_query_does_not_go_on_with_the_archive_of_another_store(
    workers: LocalWorkers, directory: DataDirectory, folder: str, tmp_path: Path
) -> None:
    archived(workers, directory, folder, 1)
    other = DataDirectory(tmp_path / "other broker", FORGETFUL)
    archived(workers, other, str(tmp_path / "other"), 1)
    other.close()
    reader, stranger = reader_of(folder), reader_of(str(tmp_path / "other"))
    here = reader.initialOffset()
    with pytest.raises(SourceError, match="the checkpoint is of store"):
        stranger.latestOffset(here, ReadAllAvailable())
    with pytest.raises(SourceError, match="the checkpoint is of store"):
        stranger.partitions(here, reader.latestOffset(here, ReadAllAvailable()))


def test_P1_an_archive_in_an_object_store_is_read_like_a_log(
    directory: DataDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bucket").mkdir()
    with object_store(tmp_path) as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        url = "s3a://bucket/archive"
        with LocalWorkers(1) as own:  # which has the store's address
            end = archived(own, directory, url, 1)
        reader = reader_of(url)
        here = reader.initialOffset()
        found = sequences(reader, here, reader.latestOffset(here, ReadAllAvailable()))
    assert found == list(range(len(found)))
    assert (len(found) > 1000, end) == (True, 2 * SEGMENT)


def test_a_stream_of_an_archive_goes_on_with_what_was_archived_since(
    spark: SparkSession,
    workers: LocalWorkers,
    directory: DataDirectory,
    folder: str,
    tmp_path: Path,
) -> None:
    for number in (1, 2):
        archived(workers, directory, folder, number)
        frame = spark.readStream.format("qmq").option("path", folder)
        bound = frame.option("columns", "sequence").option("maxBytesPerTrigger", str(SEGMENT))
        assert len(take_what_is_there(bound.load(), tmp_path)) >= 2
    rows = [row["sequence"] for row in spark.read.parquet(str(tmp_path / "out")).collect()]
    assert sorted(rows) == list(range(len(rows)))
    assert len(rows) == spark.read.format("qmq").option("path", folder).load().count()


def test_a_query_takes_no_frames_from_the_offset_on_that_it_was_given(
    workers: LocalWorkers, directory: DataDirectory, folder: str
) -> None:
    archived(workers, directory, folder, 1)
    reader, whole = reader_of(folder, next_offset=str(SEGMENT)), reader_of(folder)
    begin = whole.initialOffset()
    end = whole.latestOffset(begin, ReadAllAvailable())
    one_segment = {**begin, "offset": SEGMENT}
    assert end["offset"] > SEGMENT
    assert sequences(reader, begin, end) == sequences(whole, begin, one_segment)
    assert sequences(reader, one_segment, end) == []
