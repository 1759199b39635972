"""What became of delayed messages, read at its first use and kept from then on."""

from __future__ import annotations

import pytest

from qmq_broker.errors import CorruptionError
from qmq_broker.storage.files import layout
from qmq_broker.storage.schedule.bucket import Bucket, BucketState
from qmq_broker.storage.schedule.fates import Fate, pack_fate
from qmq_broker.storage.schedule.files import ScheduleFiles, dispatched_frames
from tests.broker.storage.damaged import flip
from tests.crash.recording_disk import RecordingDisk

HOUR = 1_700_002_800_000


def test_D3_a_fate_that_came_while_the_file_could_not_be_read_is_known_when_it_can() -> None:
    disk = RecordingDisk()
    files = ScheduleFiles(disk, bytes(16))
    files.epoch = 1
    for log in (layout.SCHEDULE, layout.DISPATCH):
        disk.make_directory(log)
    frames = dispatched_frames([pack_fate(Fate.CANCELLED, 0)])
    dispatch_bytes = files.append(layout.DISPATCH, HOUR, 0, frames, stored_at_ms=1)
    files.sync()
    bucket = Bucket(BucketState(HOUR, 3, 0, 0, 1, dispatch_bytes))
    inode = disk.image.inodes[disk.image.names[layout.bucket_path(layout.DISPATCH, HOUR)] or 0]
    whole = inode.durable
    inode.durable = flip(dispatch_bytes - 4)(whole)
    with pytest.raises(CorruptionError):
        bucket.fates(files)
    assert bucket.set_fate(files, [1], Fate.RELEASED) == [1]
    bucket.settle(Fate.RELEASED, [1])
    inode.durable = whole
    fates = bucket.fates(files)
    assert [fates.get(sequence) for sequence in range(3)] == [
        Fate.CANCELLED,
        Fate.RELEASED,
        Fate.PENDING,
    ]
    files.close()
