"""A segment that a frame fills to its last byte: where it ends, the next one begins."""

from __future__ import annotations

from dataclasses import replace

from tests.crash.promises import check
from tests.crash.recording_disk import RecordingDisk
from tests.crash.world import OPTIONS, World

#: So many steps bring everything to its files that waits for them.
STEPS = 10


def _fill_segment(world: World) -> None:
    world.send(world.frame(orders=20))
    room_bytes = -world.store.written_offset % world.options.segment_bytes
    frames = (world.frame(orders=length) for length in range(room_bytes))
    world.send(next(frame for frame in frames if frame.header.frame_bytes == room_bytes))
    assert world.store.written_offset == world.options.segment_bytes


def test_B3_B12_a_full_segment_is_kept_while_the_last_checkpoint_names_a_frame_of_it() -> None:
    """Without ids to remember nothing else needs it: the checkpoint ends where the next one begins."""
    options = replace(OPTIONS, dedupe_ids=0, queue_flush_bytes=1)
    world = World(RecordingDisk(), options=options)
    _fill_segment(world)
    world.clock.pass_ms(options.checkpoint_ms)
    assert world.store.step(), "a checkpoint is due"
    for _ in range(STEPS):
        world.store.step()
    world.send(world.frame(orders=20))
    world.give_up()
    for _ in range(STEPS):
        world.store.step()
    check(world.disk.image.copy(), world.history.up_to(len(world.disk.operations)), goes_on=False)


def test_a_full_segment_goes_when_a_later_checkpoint_names_a_later_frame() -> None:
    """Else the test above would say nothing."""
    options = replace(OPTIONS, dedupe_ids=0, queue_flush_bytes=1)
    world = World(RecordingDisk(), options=options)
    _fill_segment(world)
    world.send(world.frame(orders=20))
    world.clock.pass_ms(options.checkpoint_ms)
    assert world.store.step(), "a checkpoint is due"
    for _ in range(STEPS):
        world.store.step()
    world.give_up()
    for _ in range(STEPS):
        world.store.step()
    assert world.store.first_offset == options.segment_bytes
    check(world.disk.image.copy(), world.history.up_to(len(world.disk.operations)), goes_on=False)
