"""B5, B6, B10, B11: what the store does when the disk says no."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qmq_broker.errors import DiskError, DiskFullError, FilesFullError, PoisonedError
from qmq_broker.options import SEGMENT_MULTIPLE_BYTES
from qmq_broker.storage.files import layout
from qmq_broker.storage.queues import consume_queues
from qmq_broker.storage.store import Store
from qmq_client.wire.frame import FRAME_ALIGNMENT_BYTES, FRAME_HEADER_BYTES, parse_message_frame
from tests.broker.delay.delay_rig import delayed_frame
from tests.broker.service.rig import SUBJECT
from tests.broker.storage.lives import restarted
from tests.crash.enumeration import crash_everywhere
from tests.crash.recording_disk import Operation, RecordingDisk
from tests.crash.world import OPTIONS, World, records_of, visible
from tests.kit.clock import FakeClock


class FailingDisk(RecordingDisk):
    """A disk whose calls on some files fail while `failing` says so."""

    def __init__(self) -> None:
        super().__init__()
        self.failing: tuple[str, str] | None = None
        self.error: Exception = DiskError(operation="call", path="file", reason="I/O error")

    def perform(self, call: str, path: str, operation: Operation) -> None:
        if (
            self.failing is not None
            and call == self.failing[0]
            and path.startswith(self.failing[1])
        ):
            raise self.error
        super().perform(call, path, operation)


def test_B5_after_a_failed_sync_nothing_is_acknowledged_any_more() -> None:
    disk = FailingDisk()
    world = World(disk)
    world.send(world.frame(orders=10))
    world.append(world.frame(orders=20))
    disk.failing = ("sync", "commitlog/")
    with pytest.raises(PoisonedError):
        world.store.commit_and_step()
    disk.failing = None
    assert world.visible() == {"orders": 1}
    operations = len(disk.operations)
    for call in (
        world.store.commit_and_step,
        world.store.commit_and_step,
        lambda: world.store.append([world.frame(orders=1)]),
    ):
        with pytest.raises(PoisonedError):
            call()
    world.store.close()
    assert len(disk.operations) == operations
    # The restart believes nothing: it writes the tail once more before showing it.
    store = Store.open(RecordingDisk(disk.image), FakeClock(), OPTIONS)
    assert not store.recovery.clean
    assert store.recovery.rewritten_bytes > 0
    assert visible(store) == {"orders": 2}


@pytest.mark.parametrize(
    "failing",
    [("write", "commitlog/"), ("sync", "commitlog/"), ("sync_directory", "commitlog")],
)
def test_B5_the_first_failure_poisons_the_log(failing: tuple[str, str]) -> None:
    disk = FailingDisk()
    world = World(disk)
    world.send(world.frame(orders=1))
    disk.failing = failing
    with pytest.raises(PoisonedError):
        _ = [world.send(world.frame(orders=length)) for length in (900, 900, 900)]
    disk.failing = None
    before = world.visible()
    with pytest.raises(PoisonedError):
        world.store.append([world.frame(orders=1)])
    assert world.visible() == before


@pytest.mark.parametrize("call", ["write", "sync"])
def test_B5_a_disk_that_is_full_in_the_middle_of_a_write_poisons_too(call: str) -> None:
    disk = FailingDisk()
    world = World(disk)
    world.send(world.frame(orders=1))
    disk.failing, disk.error = (call, "commitlog/"), DiskFullError("no space left")
    with pytest.raises(PoisonedError):
        world.send(world.frame(orders=1))


def test_B5_a_failed_checkpoint_poisons_the_store() -> None:
    disk = FailingDisk()
    world = World(disk)
    world.send(world.frame(orders=1))
    world.clock.pass_ms(2_000)
    disk.failing = ("write", "checkpoint")
    with pytest.raises(PoisonedError):
        world.send(world.frame(orders=1))
    disk.failing = None
    with pytest.raises(PoisonedError):
        world.store.append([world.frame(orders=1)])


def test_B5_a_poisoned_action_log_writes_nothing_more() -> None:
    disk = FailingDisk()
    world = World(disk)
    world.act()
    disk.failing = ("sync", "actionlog/")
    with pytest.raises(PoisonedError):
        world.store.actions.sync()
    disk.failing = None
    with pytest.raises(PoisonedError):
        world.act()
    world.store.close()
    assert layout.CLEAN not in disk.names(layout.ROOT)


def test_B6_a_full_disk_refuses_and_continues_when_there_is_room() -> None:
    disk = RecordingDisk()
    world = World(disk, options=replace(OPTIONS, reserve_bytes=50_000))
    world.send(world.frame(orders=10))
    disk.capacity_bytes = 0
    refused = [world.frame(orders=900) for _ in range(3)]
    with pytest.raises(DiskFullError):
        world.store.append(refused)
    assert world.visible() == {"orders": 1}
    # What fits the room that was taken is still stored, and actions go on.
    world.send(world.frame(orders=10))
    disk.capacity_bytes = 2**39
    placed = world.send(*refused)
    assert [place.duplicates for place in placed] == [0, 0, 0]
    assert world.visible() == {"orders": 5}
    store = restarted(world)
    assert len(records_of(store, "orders")) == 5


@pytest.mark.parametrize(
    ("path", "is_marked"),
    [
        (layout.CONSUME_QUEUES, True),
        (layout.STATE, True),
        (layout.SCHEDULE, True),
        (layout.draft_path(layout.CLEAN), False),
    ],
)
def test_B6_a_stop_on_a_full_disk_loses_nothing_and_leaves_the_rest_to_the_start(
    path: str, is_marked: bool
) -> None:
    disk = FailingDisk()
    disk.error = DiskFullError("no space left")
    world = World(disk)
    world.send(world.frame(orders=10))
    world.store.append([parse_message_frame(delayed_frame({b"later": 2**40}))])
    world.store.commit()
    world.act()
    disk.failing = ("write", path)
    if is_marked:
        world.store.close()
    else:
        with pytest.raises(DiskFullError):
            world.store.close()
    assert (layout.CLEAN in disk.names(layout.ROOT)) == is_marked
    store = restarted(world)
    assert store.recovery.clean == is_marked
    assert store.recovery.frames == 1, "a checkpoint was written all the same"
    assert (visible(store), store.schedule.pending) == ({"orders": 1}, {SUBJECT: 1})
    assert len(list(store.actions.replay())) == 1


@pytest.mark.parametrize("call", ["open", "sync_directory"])
def test_B10_a_process_that_may_open_no_more_files_refuses_and_continues_when_it_may(
    call: str,
) -> None:
    disk = FailingDisk()
    disk.error = FilesFullError("too many open files")
    world = World(disk)
    disk.failing = (call, "commitlog")
    with pytest.raises(FilesFullError):
        world.send(world.frame(orders=10))
    disk.failing = (call, "actionlog")
    with pytest.raises(FilesFullError):
        world.act()
    disk.failing = None
    world.send(world.frame(orders=10))
    world.act()
    world.store.actions.sync()
    store = restarted(world)
    assert len(records_of(store, "orders")) == 1
    assert len(list(store.actions.replay())) == 1


def test_B6_a_disk_without_a_byte_of_room_refuses_before_anything_is_written() -> None:
    disk = RecordingDisk()
    world = World(disk)
    world.send(world.frame(orders=10))
    before = world.store.written_offset
    disk.capacity_bytes = 1
    for _ in range(3):
        with pytest.raises(DiskFullError):
            world.store.append([world.frame(orders=900), world.frame(orders=900)])
    assert world.store.written_offset == before
    disk.capacity_bytes = 2**39
    world.send(world.frame(orders=900), world.frame(orders=900))
    assert world.visible() == {"orders": 3}


def test_B6_a_disk_with_less_room_than_a_step_of_growth_is_used_up_in_small_steps() -> None:
    disk = RecordingDisk()
    step_bytes = 512 * 1024
    options = replace(
        OPTIONS,
        growth_bytes=step_bytes,
        segment_bytes=2 * step_bytes,
        action_segment_bytes=step_bytes,
    )
    world = World(disk, options=options)
    used_bytes = sum(len(inode.seen) for inode in disk.image.inodes.values())
    disk.capacity_bytes = used_bytes + 20_000
    world.act()
    world.send(world.frame(orders=10))
    world.store.actions.sync()
    disk.capacity_bytes = used_bytes
    with pytest.raises(DiskFullError):
        world.act(100)
    disk.capacity_bytes = 2**39
    store = restarted(world)
    assert len(records_of(store, "orders")) == 1
    assert len(list(store.actions.replay())) == 1


def test_B6_whatever_room_there_is_a_frame_that_begins_a_segment_is_stored_or_refused() -> None:
    """The one before is ended by padding, whose header may need room that was not taken yet."""
    options = replace(OPTIONS, segment_bytes=4_096, growth_bytes=SEGMENT_MULTIPLE_BYTES)
    outcomes: set[bool] = set()
    for body in range(0, SEGMENT_MULTIPLE_BYTES, FRAME_ALIGNMENT_BYTES):
        for room_bytes in range(0, 2 * options.segment_bytes, SEGMENT_MULTIPLE_BYTES):
            disk = RecordingDisk()
            world = World(disk, options=options)
            world.send(world.frame(orders=body))
            if -world.store.written_offset % SEGMENT_MULTIPLE_BYTES >= FRAME_HEADER_BYTES:
                break  # there is room for the header
            disk.capacity_bytes = 2**39
            disk.capacity_bytes += room_bytes - disk.free_bytes()
            try:
                world.store.append([world.frame(orders=3_600)])
                outcomes.add(True)
            except DiskFullError:
                outcomes.add(False)
            disk.capacity_bytes = 2**39
            world.send(world.frame(orders=3_600))
    assert outcomes == {True, False}


def test_B6_queues_that_find_no_room_stay_in_memory() -> None:
    disk = RecordingDisk()
    world = World(disk, options=replace(OPTIONS, queue_flush_bytes=1))
    world.send(world.frame(orders=[10] * 9, quiet=10))
    disk.capacity_bytes = 1
    world.clock.pass_ms(2_000)
    assert world.store.step()
    assert not world.store.step()
    queue = world.store.queue("orders")
    assert queue is not None
    assert (queue.flushed_sequence, len(queue.entries(0, 99))) == (0, 9)
    disk.capacity_bytes = 2**39
    world.send(world.frame(orders=10))
    world.clock.pass_ms(2_000)
    world.send(world.frame(orders=10))
    world.send(world.frame(orders=10))
    assert queue.flushed_sequence == 11
    assert len(queue.entries(0, 99)) == 12
    quiet = world.store.queue("quiet")
    assert quiet is not None
    assert quiet.flushed_sequence == 1, "the table says so of all that came before"


def test_B6_a_queue_that_came_while_others_found_no_room_is_in_its_file_when_the_table_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(consume_queues, "SYNCED_PER_STEP", 1)
    disk = RecordingDisk()
    world = World(disk, options=replace(OPTIONS, queue_flush_bytes=1))
    world.send(world.frame(orders=10, bills=10))
    world.clock.pass_ms(2_000)
    world.store.step()
    world.send(world.frame(quiet=10))
    disk.capacity_bytes = 1
    world.store.step()
    disk.capacity_bytes = 2**39
    for _ in range(9):
        world.clock.pass_ms(2_000)
        world.send(world.frame(orders=10))
    quiet = world.store.queue("quiet")
    assert quiet is not None
    assert quiet.flushed_sequence == 1


@pytest.mark.parametrize("synced_max", [99, 3], ids=["each synced", "none synced"])
def test_B11_queues_are_flushed_a_few_at_a_time_and_a_crash_in_between_is_harmless(
    monkeypatch: pytest.MonkeyPatch, synced_max: int, one_in: int
) -> None:
    monkeypatch.setattr(consume_queues, "SYNCED_QUEUES_MAX", synced_max)
    monkeypatch.setattr(consume_queues, "SYNCED_PER_STEP", 2)
    monkeypatch.setattr(consume_queues, "UNSYNCED_PER_STEP", 2)

    def many_subjects(disk: RecordingDisk) -> World:
        world = World(disk)
        names = [f"s{number}" for number in range(7)]
        for _ in range(3):
            world.send(world.frame(**{name: [40, 50] for name in names}))
            world.clock.pass_ms(2_000)
            for number in range(6):
                world.store.step()
                world.send(world.frame(**{names[number]: 20}))
        return world

    disk = RecordingDisk()
    assert crash_everywhere(many_subjects, disk, one_in=one_in) > 400
    assert disk.calls["rename"] > 2
