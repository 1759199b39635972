"""What keepers wait for is in a backup, and so are they, no further than the backup goes."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq_broker.storage.files import layout
from qmq_broker.storage.files.disk import OsDisk, link_file
from qmq_broker.storage.files.faults import Level
from qmq_broker.storage.files.keepers import read_keepers
from qmq_broker.storage.keepers import LogOffsets, lost_bytes
from qmq_broker.storage.logs.frame_seek import LogRange
from qmq_broker.storage.store import Store
from qmq_broker.storage.upkeep.backup import back_up
from qmq_broker.storage.upkeep.verify import verify_store
from tests.broker.storage.test_backup import Meddled, copied, live
from tests.crash.recording_disk import RecordingDisk
from tests.crash.world import World
from tests.kit.clock import FakeClock


def test_X3_B12_a_backup_waits_for_the_keepers_of_its_store_as_far_as_they_are_in_it() -> None:
    world = live(is_retaining=True)
    world.keep(world.store.durable_offset)
    known = world.store.keepers.all
    target = copied(world.disk)
    assert verify_store(target, FakeClock(), check_groups=len).faults == []
    store = Store.open(target, FakeClock(), world.options)
    assert store.keepers.all == known
    assert store.keepers.needed.commit <= store.durable_offset
    store.close()


def _with_held_actions(disk: RecordingDisk) -> World:
    """A store with five snapshots; the actions below them are there for a keeper only."""
    world = World(disk)
    world.keep(0)
    for _ in range(5):
        world.act(40)
        world.note_groups()
    held = world.store.actions.log.bases()
    assert held[0] == 0
    assert len(held) > 6
    return world


def _read_back(store: Store) -> tuple[int, list[object]]:
    """Where the action log begins, and everything in it, as an archive reads it."""
    actions = store.actions
    within = LogRange(actions.first_offset, actions.log.written_offset)
    return actions.first_offset, [one for _, some in actions.between(within) for one in some]


def _lost(store: Store) -> list[LogOffsets]:
    """What each keeper of a store lacks for good."""
    begins = LogOffsets(store.first_offset, store.actions.first_offset)
    return [lost_bytes(one, begins) for one in store.keepers.all]


@pytest.mark.parametrize("kept_segments", [0, 3])
def test_X3_B12_a_backup_has_the_actions_that_keepers_wait_for(kept_segments: int) -> None:
    """An archive goes on with the restored store as with the first one: without a gap."""
    world = _with_held_actions(RecordingDisk())
    kept_offset = kept_segments * world.options.action_segment_bytes
    world.keep(0, kept_offset)
    world.act(40)
    world.note_groups()
    begins, held = _read_back(world.store)
    assert begins == kept_offset
    target = copied(world.disk)
    assert verify_store(target, FakeClock(), check_groups=len).faults == []
    for _ in range(2):  # a copy of the copy has them, too
        store = Store.open(target, FakeClock(), world.options)
        assert _read_back(store) == (begins, held)
        assert store.actions.snapshot is not None
        assert store.actions.snapshot.groups == b"240"
        assert _lost(store) == [LogOffsets(0, 0)]
        store.close()
        target = copied(target)


def test_X3_B12_the_actions_that_keepers_wait_for_are_linked(tmp_path: Path) -> None:
    """No room for them; and the two brokers go on, each for itself."""
    source, target = OsDisk(str(tmp_path / "data")), OsDisk(str(tmp_path / "copy"))
    world = _with_held_actions(RecordingDisk())
    world.store = Store.open(source, world.clock, world.options)
    world.history.actions.clear()
    world.keep(0)
    for _ in range(5):
        world.act(40)
        world.note_groups()
    made = back_up(source, target, FakeClock(), link=lambda path: link_file(source, path, target))
    assert made.linked_segments > 4
    held = _read_back(world.store)
    copy = Store.open(target, FakeClock(), world.options)
    assert _read_back(copy) == held
    world.end_keeper()
    world.act(40)
    world.note_groups()
    assert world.store.actions.first_offset > 0
    copy.actions.append([action for action, _ in world.history.actions[:40]])
    assert _read_back(copy)[1][:200] == held[1]
    world.store.close()
    copy.close()
    for disk in (source, target):
        assert verify_store(disk, FakeClock(), check_groups=len).faults == []


def test_X3_B12_a_keeper_that_moves_on_while_its_actions_are_copied_has_lost_nothing() -> None:
    world = _with_held_actions(RecordingDisk())
    segment_bytes = world.options.action_segment_bytes
    first_kept, meddled = 3 * segment_bytes, 4 * segment_bytes

    def move_on(path: str) -> bool:
        if path == layout.segment_path(layout.ACTION_LOG, meddled):
            world.keep(0, first_kept)
            world.act(40)
            world.note_groups()
        return False

    target = RecordingDisk()
    back_up(world.disk, target, FakeClock(), link=move_on)
    assert world.store.actions.first_offset == first_kept
    copy = Store.open(target, FakeClock(), world.options)
    assert copy.keepers.all == world.store.keepers.all
    assert _lost(copy) == [LogOffsets(0, 0)]
    begins, found = _read_back(copy)
    written = [action for action, _ in world.history.actions]
    assert begins == first_kept
    assert found == written[200 - len(found) : 200]


def test_X3_B12_a_keeper_further_than_the_copy_is_as_far_as_the_copy() -> None:
    """It is told of what the restored store writes there: those are other messages."""
    disk = Meddled(RecordingDisk())
    world = _with_held_actions(disk)

    def go_on() -> None:
        world.act(80)
        world.sync_actions()
        world.keep(0, world.store.actions.log.durable_offset)

    world.send(world.frame(orders=20))
    disk.log, disk.meddle = layout.COMMIT_LOG, go_on
    disk.is_after = True
    target = copied(disk)
    (keeper,) = read_keepers(target, world.store.store_id)
    copy = Store.open(target, FakeClock(), world.options)
    assert copy.keepers.all == (keeper,)
    assert keeper.kept_actions_offset == copy.actions.log.durable_offset
    assert keeper.kept_actions_offset < world.store.keepers.all[0].kept_actions_offset


def test_X3_the_hole_of_a_damaged_store_is_a_hole_of_its_backup() -> None:
    """Damage that stops no start stops no backup either; `verify` tells of it there, too."""
    world = _with_held_actions(RecordingDisk())
    world.store.close()
    path = layout.segment_path(layout.ACTION_LOG, world.options.action_segment_bytes)
    world.disk.unlink(path)
    target = copied(world.disk)
    for disk in (world.disk, target):
        (fault,) = verify_store(disk, FakeClock(), check_groups=len).faults
        assert (fault.level, fault.file) == (Level.DAMAGED, path)
    Store.open(target, FakeClock(), world.options).close()


def test_a_store_whose_keepers_hold_actions_below_the_snapshots_is_sound() -> None:
    world = World(RecordingDisk())
    world.keep(0)
    for _ in range(6):
        world.act(30)
        world.note_groups()
    first = layout.segment_path(layout.ACTION_LOG, 0)
    store = world.store
    assert first in world.disk.image.names
    assert len(store.actions.log.bases()) > 3
    store.close()
    assert verify_store(world.disk, FakeClock(), check_groups=len).faults == []
    store = Store.open(world.disk, FakeClock(), world.options)
    assert first in world.disk.image.names
    store.close()


@pytest.mark.parametrize("damage", ["altered", "missing"])
def test_B4_B12_damaged_actions_that_a_keeper_has_not_got_are_reported_and_stop_no_start(
    damage: str,
) -> None:
    world = World(RecordingDisk())
    world.keep(0)
    for _ in range(6):
        world.act(30)
        world.note_groups()
    world.store.close()
    path = layout.segment_path(layout.ACTION_LOG, world.options.action_segment_bytes)
    if damage == "missing":
        world.disk.unlink(path)
    else:
        world.disk.open(path).write(300, [b"altered"])
    (fault,) = verify_store(world.disk, FakeClock(), check_groups=len).faults
    assert (fault.level, fault.file) == (Level.DAMAGED, path)
    assert "The broker starts. An archive" in fault.meaning
    assert "from a copy" in fault.remedy
    Store.open(world.disk, FakeClock(), world.options).close()
