"""Golden files of version 1 of a data directory are written, and read, byte for byte."""

from __future__ import annotations

import struct
from pathlib import Path

import msgspec
import pytest

from qmq_broker.errors import UnknownFormatError
from qmq_broker.options import StoreOptions
from qmq_broker.storage.files.checkpoint import START, CheckpointFiles
from qmq_broker.storage.files.disk import OsDisk
from qmq_broker.storage.files.format_file import open_format
from qmq_broker.storage.files.retained import Retained
from qmq_broker.storage.files.small_file import replace_file, unseal
from qmq_broker.storage.files.snapshots import SnapshotFiles
from qmq_broker.storage.logs.action_log import ACTION_KINDS, ActionLog
from qmq_broker.storage.logs.frame_scan import FrameScan
from qmq_broker.storage.logs.log_recovery import examine
from qmq_broker.storage.logs.segmented_log import LogSettings, SegmentedLog
from qmq_broker.storage.logs.segments import Segments
from qmq_broker.storage.queues.consume_queues import ConsumeQueues
from qmq_broker.storage.recovery import write_clean_stop
from qmq_client.group.actions import Action
from qmq_client.group.queue import Entry
from qmq_client.wire.frame import FrameKind, parse_message_frame
from tests.golden.storage_version_1 import (
    ACTIONS,
    CHECKPOINT,
    EPOCH,
    NOW_MS,
    SEGMENT_BYTES,
    STORE_ID,
    UNTRIED,
    StoppedClock,
    write_actions,
    write_checkpoint,
    write_queues,
    write_sealed_segment,
)
from tests.golden.version_1 import CONTROLS, FOLDER, FRAMES, RECORDS, golden

FILES = {
    "segment_sealed",
    "actions_frame",
    "actions_untried",
    "checkpoint_slot",
    "queue_entries",
    "queue_table",
    "index_sealed",
    "index_table",
    "summary_sealed",
    "journal_ids",
    "journal_ids_version_2",
    "journal_entries",
    "format_file",
    "clean_stop",
    "keepers",
    "keepers_begun",
    "actions_aside",
    "actions_moved_back",
    "actions_owned",
    "actions_groups",
    "record_expiring",
    "snapshot_first",
    "snapshot_pages",
    "delay_released",
    "delay_rescheduled",
    "delay_scheduled",
    "delay_cancelled",
    "delay_withdrawn",
    "delay_withdrawn_by_subject",
    "delay_schedule_log",
    "delay_dispatch_log",
}
#: Commit log offsets of the two frames of the sealed segment.
FRAME_OFFSETS = (88, 504)


def place(root: Path, path: str, data: bytes) -> OsDisk:
    """A data directory with one file."""
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    return OsDisk(str(root))


def entries_of_the_segment() -> list[Entry]:
    """What a consume queue says of the messages to `flight.departed` in the sealed segment."""
    frame = parse_message_frame(golden("frame_messages"))
    return [
        Entry(offset + frame.positions[index], frame.lengths[index], frame.tag_hashes[index])
        for offset in FRAME_OFFSETS
        for index in range(3)
    ]


def test_every_golden_file_has_its_test() -> None:
    names = {path.stem for path in FOLDER.glob("*.hex")}
    assert names == {*RECORDS, *FRAMES, *CONTROLS, *FILES}


def test_a_sealed_segment_is_written_as_in_version_1(tmp_path: Path) -> None:
    assert write_sealed_segment(tmp_path) == golden("segment_sealed")


def test_the_golden_segment_is_read_to_its_last_byte(tmp_path: Path) -> None:
    disk = place(tmp_path, f"commitlog/{0:020d}", golden("segment_sealed"))
    segments = Segments(disk, "commitlog", SEGMENT_BYTES)
    scan = FrameScan(segments, frozenset({FrameKind.MESSAGES}), store_id=STORE_ID, first_offset=0)
    found = [(frame.header.kind, frame.offset, frame.header.frame_bytes) for frame in scan]
    assert found == [
        (FrameKind.SEGMENT_HEAD, 0, 88),
        (FrameKind.MESSAGES, 88, 416),
        (FrameKind.MESSAGES, 504, 416),
        (FrameKind.PADDING, 920, 104),
    ]
    assert scan.next_offset == SEGMENT_BYTES
    segments.close()


def test_the_golden_segment_of_another_store_is_not_read(tmp_path: Path) -> None:
    disk = place(tmp_path, f"commitlog/{0:020d}", golden("segment_sealed"))
    segments = Segments(disk, "commitlog", SEGMENT_BYTES)
    scan = FrameScan(segments, frozenset({FrameKind.MESSAGES}), store_id=bytes(16), first_offset=0)
    with pytest.raises(Exception, match="segment of store 00112233"):
        list(scan)
    segments.close()


def test_actions_are_written_as_in_version_1(tmp_path: Path) -> None:
    assert write_actions(tmp_path) == golden("actions_untried")


@pytest.mark.parametrize(
    ("name", "actions"),
    [("actions_frame", ACTIONS), ("actions_untried", (*ACTIONS, UNTRIED))],
    ids=["first", "untried"],
)
def test_the_golden_actions_are_replayed(
    tmp_path: Path, name: str, actions: tuple[Action, ...]
) -> None:
    write_actions(tmp_path)
    path = tmp_path / "actionlog" / f"{0:020d}"
    path.write_bytes(path.read_bytes()[:88] + golden(name))
    disk = OsDisk(str(tmp_path))
    segments = Segments(disk, "actionlog", SEGMENT_BYTES)
    finding = examine(segments, ACTION_KINDS, store_id=STORE_ID, point=START)
    told = (finding.epoch, finding.last_stored_at_ms, finding.records)
    assert told == (EPOCH, NOW_MS, len(actions))
    settings = LogSettings(store_id=STORE_ID, epoch=4, growth_bytes=512, reserve_bytes=0)
    log = SegmentedLog(segments, StoppedClock(), settings, finding)
    snapshots = SnapshotFiles(disk, STORE_ID)
    assert tuple(ActionLog(log, segments, STORE_ID, snapshots).replay()) == actions
    log.close()


def test_a_checkpoint_is_written_as_in_version_1(tmp_path: Path) -> None:
    assert write_checkpoint(tmp_path) == golden("checkpoint_slot")


def test_the_golden_checkpoint_is_read_from_either_slot(tmp_path: Path) -> None:
    for slot in ("checkpoint.0", "checkpoint.1"):
        disk = place(tmp_path / slot, slot, golden("checkpoint_slot"))
        assert CheckpointFiles(disk).read() == CHECKPOINT


def test_queues_are_written_as_in_version_1(tmp_path: Path) -> None:
    packed = b"".join(struct.pack(">QIQ", *entry) for entry in entries_of_the_segment())
    queue, table = write_queues(tmp_path, packed)
    assert queue == golden("queue_entries")
    assert table == golden("queue_table")


def test_the_golden_queues_are_taken_over(tmp_path: Path) -> None:
    place(tmp_path, f"consumequeue/flight.departed/{0:020d}", golden("queue_entries"))
    disk = place(tmp_path, "state/queues", golden("queue_table"))
    queues = ConsumeQueues(disk, StoreOptions(), STORE_ID)
    assert queues.load(920, Retained(STORE_ID, 0, {}))
    queue = queues.visible("flight.departed")
    assert queue is not None
    assert queue.entries(0, 100) == entries_of_the_segment()
    assert queues.indexed_offset == 920
    queues.close()


OPTIONS = StoreOptions(segment_bytes=1024, action_segment_bytes=1024)


def test_the_golden_format_is_known_and_stays_as_it_is(tmp_path: Path) -> None:
    disk = place(tmp_path, "FORMAT", golden("format_file"))
    assert open_format(disk, OPTIONS).store_id == STORE_ID
    assert (tmp_path / "FORMAT").read_bytes() == golden("format_file")
    with pytest.raises(UnknownFormatError):
        open_format(disk, StoreOptions())


def test_a_new_format_differs_from_the_golden_one_in_its_store_id_alone(tmp_path: Path) -> None:
    open_format(OsDisk(str(tmp_path)), OPTIONS)
    written = unseal((tmp_path / "FORMAT").read_bytes())
    known = unseal(golden("format_file"))
    assert written is not None
    assert known is not None
    store_id = msgspec.json.decode(written)["store_id"].encode()
    assert written.replace(store_id, STORE_ID.hex().encode()) == known


def test_a_small_file_is_written_as_in_version_1(tmp_path: Path) -> None:
    disk = OsDisk(str(tmp_path))
    content = unseal(golden("format_file"))
    assert content is not None
    replace_file(disk, "FORMAT", content)
    assert (tmp_path / "FORMAT").read_bytes() == golden("format_file")
    write_clean_stop(disk, CHECKPOINT)
    assert (tmp_path / "CLEAN").read_bytes() == golden("clean_stop")
