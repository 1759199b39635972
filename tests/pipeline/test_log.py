"""Ranges of a log, from a directory, a backup and a running broker: the same bytes, or a loud refusal."""

from __future__ import annotations

import os
import random
from contextlib import closing
from pathlib import Path

import pytest

from qmq_broker.options import StoreOptions
from qmq_broker.storage.files.disk import OsDisk
from qmq_broker.storage.files.disk_port import Disk
from qmq_broker.storage.logs.frame_seek import LogRange
from qmq_broker.storage.upkeep.backup import back_up
from qmq_client.clock import SYSTEM_CLOCK
from qmq_client.transport.address import BrokerAddress
from qmq_client.transport.http import HttpTransport
from qmq_client.wire.frame import build_message_frame, parse_message_frame
from qmq_client.wire.message_id import MessageIds
from qmq_client.wire.record import encode_record
from qmq_pipeline.errors import (
    DamagedRangeError,
    ExpiredRangeError,
    OptionError,
    SourceError,
    UnreachableError,
)
from qmq_pipeline.places.disks import LocalDisk, ReadFile
from qmq_pipeline.places.log import ACTION_LOG, COMMIT_LOG, LogReader
from qmq_pipeline.places.options import Place, parse_log_options
from qmq_pipeline.places.places import open_log, with_token
from qmq_pipeline.places.remote import RemoteDisk
from tests.kit.broker_process import BrokerProcess
from tests.pipeline.world import FORGETFUL, DataDirectory, messages

RANGE_BYTES = 64 * 1024


def fill(directory: DataDirectory, count: int = 3000) -> None:
    directory.append(messages(MessageIds(7), count, subjects=("a", "b", "c")), frame_records=40)


def reader(directory: DataDirectory) -> LogReader:
    return LogReader(LocalDisk(str(directory.path)), COMMIT_LOG, source=str(directory.path))


def whole(log: LogReader) -> tuple[list[LogRange], list[bytes]]:
    """The ranges of a log, and the bytes of its frames range by range."""
    bounds = log.bounds()
    ranges = log.parts(bounds.first_offset, bounds.next_offset, RANGE_BYTES)
    return ranges, [b"".join(frame.data for frame in log.frames(one)) for one in ranges]


def test_P1_ranges_cover_the_log_and_a_second_reading_gives_the_same_bytes(
    directory: DataDirectory,
) -> None:
    fill(directory)
    ranges, first = whole(reader(directory))
    assert len(ranges) > 3
    assert [one.next_offset for one in ranges[:-1]] == [one.first_offset for one in ranges[1:]]
    assert ranges[0].first_offset == 0
    assert ranges[-1].next_offset == directory.store.durable_offset
    fill(directory, 500)
    log = reader(directory)
    assert [b"".join(frame.data for frame in log.frames(one)) for one in ranges] == first
    # What was cut at the end of the log goes on where it ended; all others are cut the same way.
    assert log.parts(0, log.bounds().next_offset, RANGE_BYTES)[: len(ranges) - 1] == ranges[:-1]


def test_P1_what_is_not_durable_is_not_read(directory: DataDirectory) -> None:
    fill(directory, 100)
    before = reader(directory).bounds().next_offset
    (record,) = messages(MessageIds(8), 1)
    frame = build_message_frame({record.subject: [encode_record(record)]})
    directory.store.append([parse_message_frame(frame)])
    assert directory.store.written_offset > before
    assert reader(directory).bounds().next_offset == before
    directory.store.commit_and_step()


def test_P1_a_look_at_what_came_since_the_last_one_sees_what_a_look_at_all_sees(
    tmp_path: Path,
) -> None:
    """Over many segments, and whatever the steps are that it comes in."""
    directory = DataDirectory(tmp_path / "broker", FORGETFUL)
    follower = reader(directory)
    known, bases = follower.bounds(), set()
    chosen = random.Random(20)
    ids = MessageIds(9)
    for _ in range(60):
        directory.append(messages(ids, chosen.randrange(1, 300)), frame_records=20)
        whole_bounds = reader(directory).bounds()
        seen = follower.bounds_since(known)
        if seen is None:  # the end of a segment: the next one was not there yet
            seen = follower.bounds()
        assert known.next_offset < seen.next_offset == whole_bounds.next_offset
        known = seen
        bases.add(known.next_offset // FORGETFUL.segment_bytes)
    assert len(bases) > 3
    assert follower.bounds_since(known) == known, "nothing came"
    directory.close()


def test_P1_such_a_look_goes_no_further_than_what_is_durable(directory: DataDirectory) -> None:
    fill(directory, 100)
    follower = reader(directory)
    known = follower.bounds()
    (record,) = messages(MessageIds(8), 1)
    frame = build_message_frame({record.subject: [encode_record(record)]})
    directory.store.append([parse_message_frame(frame)])
    assert follower.bounds_since(known) == known
    directory.store.commit_and_step()
    directory.settle()
    seen = follower.bounds_since(known)
    assert seen is not None
    assert seen.next_offset == directory.store.durable_offset > known.next_offset


def test_such_a_look_tells_nothing_of_a_damaged_log_or_another_store(
    directory: DataDirectory, tmp_path: Path
) -> None:
    fill(directory, 100)
    known = reader(directory).bounds()
    follower = reader(directory)
    fill(directory, 100)
    with (directory.path / "commitlog" / f"{0:020d}").open("r+b") as file:
        file.seek(known.next_offset + 3)
        file.write(b"x")
    assert follower.bounds_since(known) is None
    with pytest.raises(DamagedRangeError):
        list(follower.frames(LogRange(known.next_offset, follower.bounds().next_offset)))
    other = DataDirectory(tmp_path / "other")
    fill(other, 100)
    (directory.path / "FORMAT").write_bytes((other.path / "FORMAT").read_bytes())
    assert follower.bounds_since(known) is None
    other.close()


def test_a_look_at_what_came_since_and_a_planned_range_cost_few_reads(
    directory: DataDirectory,
) -> None:
    """At a broker each is a request, and a micro-batch waits for all of them."""
    fill(directory, 100)
    disk = CountingDisk(str(directory.path))
    log = LogReader(disk, COMMIT_LOG, source="counted")
    known = log.bounds()
    fill(directory, 100)
    disk.asked.clear()
    seen = log.bounds_since(known)
    assert seen is not None
    segment = f"commitlog/{0:020d}"
    assert disk.asked == ["", "FORMAT", segment]
    disk.asked.clear()
    planned = LogReader(disk, COMMIT_LOG, source="counted", known=log.format)
    assert list(planned.frames(LogRange(known.next_offset, seen.next_offset)))
    assert disk.asked == [segment]


class CountingDisk(LocalDisk):
    """Notes what is listed and opened; all that it gives is durable, as at a broker."""

    gives_durable_alone = True

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.asked: list[str] = []

    def open(self, path: str, *, is_new: bool = False) -> ReadFile:
        self.asked.append(path)
        return super().open(path, is_new=is_new)

    def names(self, directory: str) -> list[str]:
        self.asked.append(directory)
        return super().names(directory)


def test_P1_a_range_below_retention_fails_and_names_it(tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path / "broker", FORGETFUL)
    fill(directory)
    old = LogRange(0, FORGETFUL.segment_bytes)
    log = reader(directory)
    assert list(log.frames(old))
    first_offset = directory.forget(segments=2)
    fresh = reader(directory)
    assert fresh.bounds().first_offset == first_offset
    with pytest.raises(ExpiredRangeError, match=str(first_offset)):
        list(fresh.frames(old))
    directory.close()


def test_P1_a_damaged_byte_fails_and_names_file_and_offset(directory: DataDirectory) -> None:
    fill(directory)
    log = reader(directory)
    ranges, _ = whole(log)
    wanted = ranges[2]
    path = directory.path / "commitlog" / f"{0:020d}"
    with path.open("r+b") as file:
        file.seek(wanted.first_offset + 3000)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(DamagedRangeError, match=r"commitlog/0{20}.* offset \d+"):
        list(log.frames(wanted))
    assert list(log.frames(ranges[1]))


def test_a_backup_is_read_like_the_directory(directory: DataDirectory, tmp_path: Path) -> None:
    fill(directory)
    source, copy = OsDisk(str(directory.path)), OsDisk(str(tmp_path / "copy"))
    back_up(source, copy, SYSTEM_CLOCK, link=lambda path: False)
    source.close()
    copy.close()
    backup = LogReader(LocalDisk(str(tmp_path / "copy")), COMMIT_LOG, source="copy")
    assert whole(backup) == whole(reader(directory))


def test_a_running_broker_gives_the_same_bytes_over_http(tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path / "broker", StoreOptions(segment_bytes=16 * 1024 * 1024))
    fill(directory, 4000)
    directory.close()
    with BrokerProcess(directory.path, "--segment-bytes", str(16 * 1024 * 1024)) as broker:
        place = Place(broker_url=broker.url)
        log, actions = open_log(place, COMMIT_LOG), open_log(place, ACTION_LOG)
        ranges, data = whole(log)
        assert len(ranges) > 3
        assert actions.bounds().next_offset >= 0
        log.close()
        actions.close()
    assert (ranges, data) == whole(reader(directory))


def test_what_a_broker_has_accepted_is_read_at_once(tmp_path: Path) -> None:
    """It gives durable bytes alone, so the last frame needs no other behind it that says so."""
    directory = DataDirectory(tmp_path / "broker")
    fill(directory, 100)
    directory.close()
    with BrokerProcess(directory.path) as broker:
        log = open_log(Place(broker_url=broker.url), COMMIT_LOG)
        known = log.bounds()
        with closing(HttpTransport(broker.url)) as transport:
            for count, record in enumerate(messages(MessageIds(8), 3), start=1):
                frame = build_message_frame({record.subject: [encode_record(record)]})
                transport.send(frame)
                seen = log.bounds_since(known)
                assert seen is not None
                within = LogRange(known.next_offset, seen.next_offset)
                assert sum(one.header.record_count for one in log.frames(within)) == count
                assert log.bounds() == seen
        log.close()


def test_a_directory_is_only_read(directory: DataDirectory) -> None:
    fill(directory, 10)
    disk: Disk = LocalDisk(str(directory.path))
    file = disk.open("FORMAT")
    refused = [
        lambda: disk.open("new", is_new=True),
        lambda: disk.unlink("FORMAT"),
        lambda: disk.rename("FORMAT", "OLD"),
        lambda: disk.make_directory("folder"),
        lambda: disk.lock("LOCK", "me"),
        lambda: file.write(0, [b"x"]),
        lambda: file.truncate(0),
        file.sync,
    ]
    for change in refused:
        with pytest.raises(SourceError, match="only read"):
            change()
    file.close()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"path": "/nowhere/at/all"}, "no such directory"),
        ({"broker_url": "http://127.0.0.1:1", "wait_s": "0"}, "does not answer"),
        ({"broker_url": "nonsense"}, "http"),
    ],
)
def test_a_place_that_is_none_is_named_with_a_remedy(given: dict[str, str], says: str) -> None:
    with pytest.raises(SourceError, match=says):
        open_log(parse_log_options(given).place, COMMIT_LOG)


def test_a_folder_that_is_no_data_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="FORMAT"):
        LogReader(LocalDisk(str(tmp_path)), COMMIT_LOG, source=str(tmp_path))


def test_a_format_of_another_version_is_refused_untouched(directory: DataDirectory) -> None:
    from qmq_client.wire.checksum import crc32c

    content = b'{"version":9}'
    (directory.path / "FORMAT").write_bytes(content + b"\ncrc32c %08x\n" % crc32c(content))
    with pytest.raises(SourceError, match=r"format version .* is 9; known: 1"):
        reader(directory)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "neither path nor broker_url"),
        ({"path": "a", "broker_url": "b"}, "both given"),
        ({"path": "a", "tabel": "actions"}, "Did you mean table"),
        ({"path": "a", "table": "mesages"}, "Did you mean messages"),
        ({"path": "a", "columns": "subject,sequense"}, "Did you mean sequence"),
        ({"path": "a", "columns": "subject,subject"}, "each name once"),
        ({"path": "a", "since": "yesterday"}, "2026-01-31"),
        ({"path": "a", "first_offset": "-1"}, "a number from 0"),
        ({"path": "a", "first_offset": "²"}, "a number from 0"),
        ({"path": "a", "first_offset": "9" * 5_000}, "a number from 0"),
        ({"path": "a", "maxBytesPerTrigger": "1"}, "a number from 16384"),
        ({"path": "a", "subject": "no name!"}, "names of subjects"),
        ({"path": "a", "columns": ","}, "',' names no column"),
        (
            {"path": "a", "first_offset": "2", "next_offset": "1"},
            "next_offset: 1, and first_offset is 2",
        ),
        (
            {"path": "a", "since": "2026-02-01", "until": "2026-01-31"},
            "until: 2026-01-31, and since",
        ),
    ],
)
def test_a_wrong_option_is_reported_with_what_is_right(given: dict[str, str], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        parse_log_options(given)


def test_options_are_known_in_the_spelling_of_spark_too() -> None:
    options = parse_log_options(
        {"path": "a", "maxBytesPerTrigger": "65536", "PARTITIONBYTES": "65536"}
    )
    assert (options.batch_bytes_max, options.partition_bytes) == (65536, 65536)


@pytest.mark.parametrize(
    "text",
    ["20261123", "202611231200", "20261123120000", "1774000000", "1774000000000000", "9" * 5_000],
    ids=["day", "minute", "second", "seconds", "microseconds", "endless"],
)
@pytest.mark.parametrize("option", ["since", "until"])
def test_a_number_that_is_no_time_of_a_message_is_answered_with_how_to_write_a_date(
    option: str, text: str
) -> None:
    with pytest.raises(OptionError, match=f"option {option}: .* Write a date as 2026-01-31"):
        parse_log_options({"path": "a", option: text})


@pytest.mark.parametrize(
    ("text", "time_ms"),
    [
        ("946684800000", 946_684_800_000),
        ("9999999999999", 9_999_999_999_999),
        ("20261123T120000Z", 1_795_435_200_000),
        ("2026-11-23", 1_795_392_000_000),
    ],
)
def test_a_time_is_a_number_of_milliseconds_or_a_date(text: str, time_ms: int) -> None:
    assert parse_log_options({"path": "a", "since": text}).first_stored_at_ms == time_ms


@pytest.mark.parametrize("text", ["0", "1970-01-01"])
def test_until_the_first_moment_is_nothing_and_not_everything(text: str) -> None:
    assert parse_log_options({"path": "a", "until": text}).next_stored_at_ms == 0


def test_a_token_comes_from_its_file_or_the_environment_and_is_never_shown(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("sesame-open-1\n")
    place = Place(broker_url="http://b", token_file=str(tmp_path / "token"))
    assert with_token(place, {}).token == "sesame-open-1"
    assert (
        with_token(Place(broker_url="http://b"), {"QMQ_BROKER_TOKEN": "another-token"}).token
        == "another-token"
    )
    assert "sesame" not in repr(with_token(place, {}))
    with pytest.raises(
        OptionError, match=r"option token_file: \S+/none: No such file or directory;"
    ):
        with_token(Place(broker_url="http://b", token_file=str(tmp_path / "none")), {})


def test_nobody_there_is_an_error_of_its_own() -> None:
    disk = RemoteDisk(BrokerAddress(url="http://127.0.0.1:1"), wait_s=0)
    with pytest.raises(UnreachableError):
        disk.names("commitlog")
    disk.close()
