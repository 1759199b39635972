"""Derived files made again offline: the same answers, the logs untouched, crash-safe at every step."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from qmq_broker.errors import CorruptionError, StoreError
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.disk import OsDisk
from qmq_broker.storage.store import Store
from qmq_broker.storage.upkeep.rebuild import rebuild_store
from tests.broker.storage.damaged import Directory, flip
from tests.crash.power_cut import cut_states
from tests.crash.recording_disk import RecordingDisk, images
from tests.crash.world import OPTIONS, RETAINING, World, records_of
from tests.kit.clock import FakeClock

DERIVED = (layout.CONSUME_QUEUES, *layout.QUEUE_TABLES, layout.ENTRIES, layout.INDEX)


def truth(directory: Directory) -> dict[str, bytes]:
    return {
        path: content for path, content in directory.files().items() if not path.startswith(DERIVED)
    }


@pytest.mark.parametrize("is_clean", [True, False])
@pytest.mark.parametrize("lost", [None, layout.CONSUME_QUEUES, layout.QUEUE_TABLE])
def test_B8_rebuilt_queues_are_the_same_and_no_log_is_touched(
    is_clean: bool, lost: str | None
) -> None:
    directory = Directory(is_clean=is_clean)
    before = directory.files()
    if lost:
        directory.remove(lost)
    known = truth(directory)
    disk = RecordingDisk(directory.image)
    done = rebuild_store(disk, FakeClock())
    directory.image = disk.image
    assert truth(directory) == known
    assert done.entries == sum(len(records) for records in directory.records.values())
    assert done.indexed_offset == directory.next_offset
    if is_clean:
        directory.remove(layout.ENTRIES)
        kept = {path: content for path, content in before.items() if path in directory.files()}
        assert directory.files() == kept, "byte for byte what the broker had written"
        assert all(path.startswith(layout.ENTRIES) for path in before.keys() - kept.keys())
    store = directory.assert_all_there()
    assert not store.recovery.is_rebuilt


def test_B8_queues_that_have_lost_their_beginning_are_rebuilt_from_where_the_log_begins() -> None:
    world = World(RecordingDisk(), options=RETAINING)
    for _ in range(14):
        world.send(world.frame(orders=[100, 200], quiet=30))
        world.clock.pass_ms(1_500)
        world.store.step()
        world.store.step()
    assert world.give_up() > 0
    expected = {name: records_of(world.store, name) for name in world.store.subjects()}
    world.store.close()
    disk = RecordingDisk(world.disk.image)
    rebuild_store(disk, FakeClock(), with_index=True)
    store = Store.open(disk, FakeClock(), RETAINING)
    assert {name: records_of(store, name) for name in store.subjects()} == expected
    assert not store.recovery.is_rebuilt


def test_B4_a_damaged_log_stops_a_rebuild_before_anything_is_removed() -> None:
    directory = Directory(is_clean=True)
    first = layout.segment_path(layout.COMMIT_LOG, 0)
    directory.change(first, flip(500))
    before = directory.files()
    disk = RecordingDisk(directory.image)
    with pytest.raises(CorruptionError):
        rebuild_store(disk, FakeClock())
    directory.image = disk.image
    assert directory.files() == before


def test_B3_a_power_cut_anywhere_in_a_rebuild_leaves_a_directory_that_opens() -> None:
    directory = Directory(is_clean=True)
    disk = RecordingDisk(directory.image)
    rebuild_store(disk, FakeClock(), with_index=True)
    rng = random.Random(4)
    states = 0
    for _, image in images(disk.first_image, disk.operations):
        for state in cut_states(image, rng, scattered=3):
            states += 1
            store = Store.open(RecordingDisk(state), FakeClock(), OPTIONS)
            found = {name: records_of(store, name) for name in store.subjects()}
            assert found == directory.records
    assert states > 150


def test_what_is_no_data_directory_is_not_rebuilt_and_gets_no_file(tmp_path: Path) -> None:
    disk = OsDisk(str(tmp_path))
    with pytest.raises(StoreError, match="FORMAT is missing"):
        rebuild_store(disk, FakeClock())
    assert disk.names(layout.ROOT) == []
    disk.close()
