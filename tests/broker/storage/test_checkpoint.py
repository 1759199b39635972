from __future__ import annotations

import pytest

from qmq_broker.storage.files import layout
from qmq_broker.storage.files.checkpoint import SLOT_BYTES, Checkpoint, CheckpointFiles, LogPoint
from tests.crash.recording_disk import RecordingDisk


def make_checkpoint(generation: int) -> Checkpoint:
    def point(first: int) -> LogPoint:
        return LogPoint(
            durable_offset=first + 2, last_frame_offset=first, last_stored_at_ms=first + 1
        )

    return Checkpoint(
        generation=generation,
        epoch=generation * 3,
        commit_log=point(generation * 100),
        action_log=point(generation * 200),
        window_offset=generation * 50,
    )


def write_slots(disk: RecordingDisk, *generations: int) -> None:
    files = CheckpointFiles(disk)
    files.prepare()
    for generation in generations:
        files.write(make_checkpoint(generation))
    files.close()


def test_without_a_slot_there_is_no_checkpoint() -> None:
    assert CheckpointFiles(RecordingDisk()).read() is None


def test_the_newest_slot_counts() -> None:
    disk = RecordingDisk()
    write_slots(disk, 1, 2, 3)
    assert CheckpointFiles(disk).read() == make_checkpoint(3)


@pytest.mark.parametrize("torn_at", range(0, SLOT_BYTES, 512))
def test_a_slot_that_was_torn_leaves_the_other(torn_at: int) -> None:
    disk = RecordingDisk()
    write_slots(disk, 1, 2, 3, 4)
    older = disk.open(layout.CHECKPOINTS[1])
    newer = disk.open(layout.CHECKPOINTS[0])
    content = newer.read(0, SLOT_BYTES)
    newer.write(0, [content[:torn_at].ljust(SLOT_BYTES, b"\xff")])
    assert CheckpointFiles(disk).read() == make_checkpoint(3)
    older.truncate(10)
    assert CheckpointFiles(disk).read() is None


def test_any_altered_bit_makes_a_slot_invalid() -> None:
    disk = RecordingDisk()
    write_slots(disk, 2)
    file = disk.open(layout.CHECKPOINTS[0])
    content = file.read(0, SLOT_BYTES)
    for position in [*range(80), 2000, SLOT_BYTES - 1]:
        altered = bytearray(content)
        altered[position] ^= 1 << position % 8
        file.write(0, [bytes(altered)])
        assert CheckpointFiles(disk).read() is None, position
