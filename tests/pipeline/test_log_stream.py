"""The streaming reader of `qmq` by itself: what it asks the log for, and when."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from qmq_client.wire.message_id import MessageIds
from qmq_pipeline.errors import ExpiredRangeError, SourceError
from qmq_pipeline.places.options import parse_log_options
from qmq_pipeline.sources.log_batches import LogPartition
from qmq_pipeline.sources.log_stream import LogStreamReader
from tests.pipeline.world import FORGETFUL, DataDirectory, messages


def reader_of(directory: DataDirectory, **more: str) -> LogStreamReader:
    options = {"path": str(directory.path), "columns": "sequence", **more}
    return LogStreamReader(parse_log_options(options))


def rows_of(reader: LogStreamReader, start: dict[str, object], end: dict[str, object]) -> int:
    parts = reader.partitions(start, end)
    assert all(isinstance(part, LogPartition) for part in parts)
    return sum(batch.num_rows for part in parts for batch in reader.read(part))


def test_a_batch_is_planned_with_what_was_read_when_its_end_was_asked_for(tmp_path: Path) -> None:
    """Each look at the log of a broker is some requests; one is enough for a micro-batch."""
    directory = DataDirectory(tmp_path / "broker")
    directory.append(messages(MessageIds(1), 100))
    reader = reader_of(directory)
    start = reader.initialOffset()
    end = reader.latestOffset(start, ReadAllAvailable())
    directory.append(messages(MessageIds(2), 50))
    later = reader.latestOffset(end, ReadAllAvailable())
    away = (directory.path / "FORMAT").rename(directory.path / "AWAY")
    assert len(reader.partitions(end, later)) == 1
    with pytest.raises(SourceError):
        reader.latestOffset(later, ReadAllAvailable())
    away.rename(directory.path / "FORMAT")
    assert (rows_of(reader, start, end), rows_of(reader, end, later)) == (100, 50)
    directory.close()


def test_how_far_a_query_is_behind_is_reported_by_the_look_at_the_log_that_it_had(
    tmp_path: Path,
) -> None:
    """Spark asks for that in each micro-batch."""
    directory = DataDirectory(tmp_path / "broker")
    directory.append(messages(MessageIds(1), 100))
    reader = reader_of(directory)
    end = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    (directory.path / "FORMAT").rename(directory.path / "AWAY")
    assert reader.reportLatestOffset() == end
    (directory.path / "AWAY").rename(directory.path / "FORMAT")
    assert reader_of(directory).reportLatestOffset() == end, "also when it had none"
    directory.close()


def test_a_query_does_not_continue_with_another_store(tmp_path: Path) -> None:
    directory, other = DataDirectory(tmp_path / "broker"), DataDirectory(tmp_path / "other")
    for one in (directory, other):
        one.append(messages(MessageIds(1), 100))
    reader = reader_of(directory)
    end = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    for one in (directory, other):
        one.append(messages(MessageIds(1), 100))
        one.close()
    directory.path.rename(tmp_path / "away")
    other.path.rename(directory.path)
    with pytest.raises(SourceError, match="the checkpoint is of store"):
        reader.latestOffset(end, ReadAllAvailable())


def test_a_query_does_not_continue_with_a_log_that_was_restored_from_a_backup(
    tmp_path: Path,
) -> None:
    directory = DataDirectory(tmp_path / "broker")
    directory.append(messages(MessageIds(1), 50))
    directory.close()
    shutil.copytree(directory.path, tmp_path / "backup")
    directory.open()
    directory.append(messages(MessageIds(2), 50))
    reader = reader_of(directory)
    end = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    directory.close()
    directory.path.rename(tmp_path / "away")
    (tmp_path / "backup").rename(directory.path)
    with pytest.raises(SourceError, match="was it restored from a backup"):
        reader_of(directory).latestOffset(end, ReadAllAvailable())
    directory.open()
    directory.append(messages(MessageIds(3), 90))
    with pytest.raises(SourceError, match="was it restored from a backup"):
        reader_of(directory).latestOffset(end, ReadAllAvailable())
    directory.close()


def test_a_batch_that_is_planned_again_looks_at_the_log_again(tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path / "broker")
    directory.append(messages(MessageIds(1), 100))
    first = reader_of(directory)
    start = first.initialOffset()
    end = first.latestOffset(start, ReadAllAvailable())
    directory.append(messages(MessageIds(2), 50))
    later = reader_of(directory).latestOffset(end, ReadAllAvailable())
    assert rows_of(reader_of(directory), end, later) == 50, "by a reader that was never asked"
    assert rows_of(first, end, later) == 50, "by one that was asked when less was there"
    directory.close()


def test_what_retention_gave_up_before_a_batch_is_planned_is_reported(tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path / "broker", FORGETFUL)
    directory.append(messages(MessageIds(1), 3000), frame_records=20)
    reader = reader_of(directory)
    start = reader.initialOffset()
    end = reader.latestOffset(start, ReadAllAvailable())
    directory.forget(segments=2)
    with pytest.raises(ExpiredRangeError, match="retention"):
        rows_of(reader, start, end)
    with pytest.raises(ExpiredRangeError, match="retention"):
        rows_of(reader_of(directory), start, end)
    directory.close()


def test_a_query_takes_no_frames_from_the_offset_on_that_it_was_given(tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path / "broker")
    directory.append(messages(MessageIds(1), 100))
    end = directory.store.durable_offset
    directory.append(messages(MessageIds(2), 50))
    reader = reader_of(directory, next_offset=str(end))
    start = reader.initialOffset()
    first = reader.latestOffset(start, ReadAllAvailable())
    directory.append(messages(MessageIds(3), 50))
    later = reader.latestOffset(first, ReadAllAvailable())
    assert (rows_of(reader, start, first), rows_of(reader, first, later)) == (100, 0)
    directory.close()
