from __future__ import annotations

import random

import pytest

from qmq_broker.storage.files import layout
from qmq_broker.storage.files.checkpoint import SLOT_BYTES, Checkpoint, CheckpointFiles, LogPoint
from qmq_broker.storage.store import Store
from tests.crash.power_cut import cut_states
from tests.crash.recording_disk import Operation, RecordingDisk, images
from tests.crash.world import OPTIONS, World
from tests.kit.clock import FakeClock


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


class LazyDisk(RecordingDisk):
    """Forgets the syncs of checkpoints while it is lazy: like a process that is killed before one."""

    is_lazy = False

    def perform(self, call: str, path: str, operation: Operation) -> None:
        if not (self.is_lazy and call == "sync" and path in layout.CHECKPOINTS):
            super().perform(call, path, operation)


def test_B3_a_start_makes_the_checkpoint_that_it_read_durable_before_it_writes_over_the_other() -> (
    None
):
    disk = LazyDisk()
    world = World(disk)
    world.clock.pass_ms(10_000)
    world.send(world.frame(orders=10))
    world.send(world.frame(orders=10))
    before = CheckpointFiles(disk).read()
    assert before is not None
    disk.is_lazy = True
    world.clock.pass_ms(10_000)
    assert world.store.step()
    last = CheckpointFiles(disk).read()
    assert last is not None
    assert last.generation == before.generation + 1
    disk.is_lazy = False
    disk.unlock()
    first, known = disk.image.copy(), len(disk.operations)
    Store.open(disk, FakeClock(), OPTIONS).close()
    states = 0
    for _, image in images(first, disk.operations[known:]):
        for state in cut_states(image, random.Random(3), scattered=2):
            states += 1
            found = CheckpointFiles(RecordingDisk(state)).read()
            assert found is not None
            assert found.generation >= before.generation
    assert states > 20
