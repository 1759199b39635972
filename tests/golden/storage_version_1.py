"""What the golden bytes of version 1 of the files on disk mean: written through the storage itself.

Each function leaves files in a data directory the way the broker does. See `version_1.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from qmq_broker.options import StoreOptions
from qmq_broker.storage.files.checkpoint import Checkpoint, CheckpointFiles, LogPoint
from qmq_broker.storage.files.disk import OsDisk
from qmq_broker.storage.files.snapshots import SnapshotFiles
from qmq_broker.storage.logs.action_log import ActionLog
from qmq_broker.storage.logs.log_recovery import LogFinding
from qmq_broker.storage.logs.segmented_log import LogSettings, SegmentedLog
from qmq_broker.storage.logs.segments import Segments
from qmq_broker.storage.queues.consume_queues import ConsumeQueues
from qmq_client.group.actions import (
    Acked,
    Action,
    Dead,
    Expired,
    Extended,
    GroupDefined,
    Nacked,
    Pulled,
)
from qmq_client.wire.deliveries import DeliveryRun
from tests.golden.version_1 import golden

STORE_ID: Final = bytes.fromhex("00112233445566778899aabbccddeeff")
EPOCH: Final = 3
#: 2013-01-01 09:57:00.017 UTC.
NOW_MS: Final = 1_357_034_220_017
SEGMENT_BYTES: Final = 1024

#: One of each kind, in the order of their tags.
ACTIONS: Final[tuple[Action, ...]] = (
    GroupDefined(NOW_MS, "flight.departed", "tallies", 0, 16),
    Pulled(
        NOW_MS,
        "flight.departed",
        "tallies",
        "tallies-1",
        EPOCH,
        7,
        (DeliveryRun(10, 2, 1), DeliveryRun(4, 1, 2)),
        NOW_MS + 30_000,
    ),
    Acked(NOW_MS, "flight.departed", "tallies", "tallies-1", 7, 9),
    Nacked(
        NOW_MS, "flight.departed", "tallies", "tallies-1", 9, 10, NOW_MS + 5_000, "TimeoutError"
    ),
    Extended(NOW_MS, "flight.departed", "tallies", "tallies-1", 11, 12, NOW_MS + 60_000),
    Expired(NOW_MS, "flight.departed", "tallies", "tallies-1", 12, 13, NOW_MS + 1_000),
    Dead(NOW_MS, "flight.departed", "tallies", 4, 16, "attempts used up", "TimeoutError"),
)

#: It came with a field at the end, which those from before do not have.
UNTRIED: Final = Nacked(
    NOW_MS,
    "flight.departed",
    "tallies",
    "tallies-1",
    9,
    10,
    NOW_MS + 5_000,
    "consumer stopped",
    False,
)

CHECKPOINT: Final = Checkpoint(
    generation=2,
    epoch=EPOCH,
    commit_log=LogPoint(durable_offset=1528, last_frame_offset=1112, last_stored_at_ms=NOW_MS),
    action_log=LogPoint(durable_offset=552, last_frame_offset=88, last_stored_at_ms=NOW_MS),
    window_offset=88,
)


class StoppedClock:
    """A clock that stands still."""

    def now_ms(self) -> int:
        return NOW_MS

    def monotonic_s(self) -> float:
        return 0.0

    def sleep(self, seconds: float) -> None:
        raise AssertionError("nothing here waits")


def open_log(root: Path, directory: str) -> tuple[SegmentedLog, Segments]:
    """A new log with small segments."""
    disk = OsDisk(str(root))
    disk.make_directory(directory)
    segments = Segments(disk, directory, SEGMENT_BYTES)
    nothing = LogFinding(
        next_offset=0,
        durable_offset=0,
        last_frame_offset=0,
        last_stored_at_ms=0,
        epoch=0,
        frames=0,
        records=0,
        scanned_bytes=0,
        torn_bytes=0,
        torn_reason="",
    )
    settings = LogSettings(store_id=STORE_ID, epoch=EPOCH, growth_bytes=512, reserve_bytes=0)
    return SegmentedLog(segments, StoppedClock(), settings, nothing), segments


def write_sealed_segment(root: Path) -> bytes:
    """Two frames and padding, sealed because a third did not fit."""
    log, _ = open_log(root, "commitlog")
    frame = golden("frame_messages")
    for first_sequences in ((0, 0), (3, 1), (6, 2)):
        log.append([(frame, first_sequences)])
        log.sync()
    log.close()
    return (root / "commitlog" / f"{0:020d}").read_bytes()


def write_actions(root: Path) -> bytes:
    """The frame of all actions, and one more, as it stands behind the segment's head."""
    log, segments = open_log(root, "actionlog")
    ActionLog(log, segments, STORE_ID, SnapshotFiles(OsDisk(str(root)), STORE_ID)).append(
        (*ACTIONS, UNTRIED)
    )
    next_offset = log.written_offset
    log.close()
    return (root / "actionlog" / f"{0:020d}").read_bytes()[88:next_offset]


def write_checkpoint(root: Path) -> bytes:
    """The first slot."""
    files = CheckpointFiles(OsDisk(str(root)))
    files.prepare()
    files.write(CHECKPOINT)
    files.close()
    return (root / "checkpoint.0").read_bytes()


def write_queues(root: Path, entries: bytes) -> tuple[bytes, bytes]:
    """The queue of one subject, and the table."""
    disk = OsDisk(str(root))
    disk.make_directory("consumequeue")
    disk.make_directory("state")
    queues = ConsumeQueues(disk, StoreOptions(), STORE_ID)
    queues.stage("flight.departed", 0, entries, offset=88)
    queues.make_visible()
    queues.flush(920)
    queues.close()
    queue = root / "consumequeue" / "flight.departed" / f"{0:020d}"
    return queue.read_bytes(), (root / "state" / "queues").read_bytes()
