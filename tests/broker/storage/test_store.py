"""What a store promises while nothing breaks, and when the disk says no."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from qmq_broker.errors import ClosedError, CorruptionError, DiskError, DiskFullError, PoisonedError
from qmq_broker.storage import layout
from qmq_broker.storage import store as store_module
from qmq_broker.storage.consume_queue import Entry
from qmq_broker.storage.store import Store
from qmq_client.wire.frame import FrameKind, build_message_frame, parse_message_frame
from qmq_client.wire.message_id import MessageIds
from qmq_client.wire.record import Record, encode_record
from qmq_client.wire.requests import SubjectPlace
from tests.crash.enumeration import crash_everywhere
from tests.crash.recording_disk import Fates, Operation, RecordingDisk
from tests.crash.world import OPTIONS, FakeClock, World, make_frame, records_of, visible


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


def restarted(world: World, *, options: object = OPTIONS) -> Store:
    """The next life on what the disk holds after a power cut."""
    world.disk.unlock()
    return Store.open(RecordingDisk(world.disk.image), FakeClock(), world.options)


def test_B1_what_was_synced_is_there_after_a_power_cut() -> None:
    world = World(RecordingDisk())
    frames = [world.frame(orders=[10, 20], invoices=30), world.frame(orders=40)]
    placed = world.send(*frames)
    assert [place.places for place in placed] == [
        (
            SubjectPlace(subject="orders", first_sequence=0, count=2),
            SubjectPlace(subject="invoices", first_sequence=0, count=1),
        ),
        (SubjectPlace(subject="orders", first_sequence=2, count=1),),
    ]
    store = Store.open(RecordingDisk(world.disk.image.after_cut(Fates())), FakeClock(), OPTIONS)
    assert visible(store) == {"orders": 3, "invoices": 1}
    assert records_of(store, "invoices") == [frames[0].record(2)]


def test_B2_nothing_is_visible_before_its_sync() -> None:
    world = World(RecordingDisk())
    world.append(world.frame(orders=10))
    assert world.store.subjects() == []
    assert world.store.queue("orders") is None
    world.sync()
    queue = world.store.queue("orders")
    assert queue is not None
    world.append(world.frame(orders=10))
    assert (queue.next_sequence, queue.entries(1, 9)) == (1, [])
    world.sync()
    assert (queue.next_sequence, len(queue.entries(1, 9))) == (2, 1)


def test_B8_sequences_are_dense_and_never_change() -> None:
    rng = random.Random(5)
    world = World(RecordingDisk())
    seen: dict[str, list[Entry]] = {}
    for _ in range(30):
        subjects = rng.sample(["orders", "Orders", "invoices"], rng.randrange(1, 4))
        world.send(
            world.frame(**{name: [rng.randrange(90)] * rng.randrange(1, 4) for name in subjects})
        )
        world.clock.pass_ms(400)
        for subject in world.store.subjects():
            queue = world.store.queue(subject)
            assert queue is not None
            entries = queue.entries(0, queue.next_sequence)
            assert entries[: len(seen.get(subject, []))] == seen.get(subject, [])
            assert sorted(entries) == entries
            seen[subject] = entries
    world.store.close()
    store = Store.open(world.disk, FakeClock(), OPTIONS)
    for subject, entries in seen.items():
        queue = store.queue(subject)
        assert queue is not None
        assert queue.entries(0, 999) == entries
        for first in range(len(entries)):
            assert queue.entries(first, 3) == entries[first : first + 3]


def test_B7_a_repeat_is_answered_with_its_first_place_also_after_a_restart() -> None:
    world = World(RecordingDisk())
    frame = world.frame(orders=[10, 20], invoices=30)
    first = world.send(frame)[0]
    again = world.send(frame)[0]
    assert (again.duplicates, again.places) == (3, first.places)
    assert (again.physical_offset, again.stored_at_ms) == (
        first.physical_offset,
        first.stored_at_ms,
    )
    store = restarted(world)
    after = store.append([frame])[0]
    store.sync()
    assert (after.duplicates, after.places) == (3, first.places)
    assert visible(store) == {"orders": 2, "invoices": 1}


def test_B7_repeats_within_one_commit_are_known() -> None:
    world = World(RecordingDisk())
    frame = world.frame(orders=[10, 20])
    placed = world.store.append([frame, world.frame(orders=5), frame])
    assert (placed[2].duplicates, placed[2].places) == (2, placed[0].places)
    placed = world.store.append([frame])
    assert placed[0].duplicates == 2
    world.sync()
    assert world.visible() == {"orders": 3}


def test_B7_a_frame_of_new_and_repeated_messages_stores_the_new_ones() -> None:
    ids = MessageIds(7)
    records = [
        encode_record(Record(message_id=ids.next_id(), subject="orders", body=body, born_at_ms=1))
        for body in (b"a", b"b", b"c", b"d", b"e")
    ]
    invoice = encode_record(
        Record(message_id=ids.next_id(), subject="invoices", body=b"i", born_at_ms=1)
    )

    def frame(**content: list[bytes]) -> object:
        return parse_message_frame(build_message_frame(content))

    world = World(RecordingDisk())
    world.store.append([frame(orders=[records[1]]), frame(orders=[records[3]])])  # type: ignore[list-item]
    world.store.sync()
    placed = world.store.append([frame(orders=records, invoices=[invoice])])[0]  # type: ignore[list-item]
    world.store.sync()
    assert placed.duplicates == 2
    orders = [
        place.first_sequence + number
        for place in placed.places
        if place.subject == "orders"
        for number in range(place.count)
    ]
    assert orders == [2, 0, 3, 1, 4]
    assert placed.places[-1] == SubjectPlace(subject="invoices", first_sequence=0, count=1)
    stored = records_of(world.store, "orders")
    assert [stored[sequence] for sequence in orders] == records
    again = world.store.append([frame(orders=records, invoices=[invoice])])[0]  # type: ignore[list-item]
    assert (again.duplicates, again.places) == (6, placed.places)


def test_B7_a_message_that_is_twice_in_one_frame_is_stored_once() -> None:
    record = make_frame(MessageIds(7), {"orders": 10}).record(0)
    frame = parse_message_frame(build_message_frame({"orders": [record, record, record]}))
    world = World(RecordingDisk())
    placed = world.store.append([frame])[0]
    world.store.sync()
    assert placed.duplicates == 2
    assert records_of(world.store, "orders") == [record]


@pytest.mark.parametrize("subject", ["orders", "invoices"])
def test_B7_an_id_with_other_content_refuses_its_frame_and_no_other(subject: str) -> None:
    world = World(RecordingDisk())
    world.send(world.frame(orders=10))
    message_id = world.history.sent[0].frame.message_ids()[0]
    other = encode_record(
        Record(message_id=message_id, subject=subject, body=b"other", born_at_ms=1)
    )
    new = world.frame(orders=20).record(0)
    content = (
        {"orders": [new, other]} if subject == "orders" else {"orders": [new], subject: [other]}
    )
    conflicting = parse_message_frame(build_message_frame(content))
    placed = world.store.append([world.frame(orders=1), conflicting, world.frame(orders=2)])
    world.store.sync()
    assert [place.conflict for place in placed] == [None, message_id, None]
    assert placed[1].places == ()
    assert world.visible() == {"orders": 3}


def test_B7_a_refused_frame_leaves_its_other_ids_free() -> None:
    world = World(RecordingDisk())
    world.send(world.frame(orders=10))
    message_id = world.history.sent[0].frame.message_ids()[0]
    new = world.frame(orders=20)
    other = encode_record(Record(message_id=message_id, subject="orders", body=b"o", born_at_ms=1))
    refused = parse_message_frame(build_message_frame({"orders": [new.record(0), other]}))
    assert world.store.append([refused])[0].conflict == message_id
    assert world.send(new)[0].duplicates == 0


def test_B5_after_a_failed_sync_nothing_is_acknowledged_any_more() -> None:
    disk = FailingDisk()
    world = World(disk)
    world.send(world.frame(orders=10))
    world.append(world.frame(orders=20))
    disk.failing = ("sync", "commitlog/")
    with pytest.raises(PoisonedError):
        world.store.sync()
    disk.failing = None
    assert world.visible() == {"orders": 1}
    operations = len(disk.operations)
    for call in (
        world.store.sync,
        world.store.sync,
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


def test_B6_a_full_disk_refuses_and_goes_on_when_there_is_room() -> None:
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


def test_B6_queues_that_find_no_room_stay_in_memory() -> None:
    disk = RecordingDisk()
    world = World(disk, options=replace(OPTIONS, queue_flush_bytes=1))
    world.send(world.frame(orders=[10] * 9))
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


def test_B11_queues_are_flushed_a_few_at_a_time_and_a_crash_in_between_is_harmless(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store_module, "QUEUES_PER_STEP", 2)

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
    assert crash_everywhere(many_subjects, disk) > 500
    assert disk.calls["rename"] > 2


def test_times_never_go_back_also_when_the_clock_does() -> None:
    world = World(RecordingDisk())
    first = world.send(world.frame(orders=1))[0].stored_at_ms
    world.clock.wall_ms -= 3_600_000
    assert world.send(world.frame(orders=1))[0].stored_at_ms == first
    world.store.close()
    clock = FakeClock()
    clock.wall_ms -= 10_000_000
    store = Store.open(world.disk, clock, OPTIONS)
    assert store.append([world.frame(orders=1)])[0].stored_at_ms == first


def test_a_clean_stop_is_known_at_the_next_start_and_nothing_is_read_again() -> None:
    world = World(RecordingDisk())
    for _ in range(20):
        world.send(world.frame(orders=[50] * 3))
    world.act()
    world.store.close()
    world.store.close()
    with pytest.raises(ClosedError):
        world.store.append([world.frame(orders=1)])
    store = Store.open(world.disk, FakeClock(), OPTIONS)
    assert store.recovery.clean
    assert (store.recovery.frames, store.recovery.torn_bytes) == (1, 0)
    assert not store.recovery.is_rebuilt
    assert visible(store) == {"orders": 60}
    world.disk.unlock()
    assert not Store.open(world.disk, FakeClock(), OPTIONS).recovery.clean


def test_a_hundred_idle_restarts_leave_nothing_but_a_higher_epoch() -> None:
    disk = RecordingDisk()
    World(disk).store.close()
    files = {path: len(disk.open(path).read(0, 10**6)) for path in all_files(disk)}
    for epoch in range(2, 102):
        store = Store.open(disk, FakeClock(), OPTIONS)
        assert store.epoch == epoch
        store.close()
    grown = {path: len(disk.open(path).read(0, 10**6)) for path in all_files(disk)}
    assert {path: size for path, size in grown.items() if path != layout.CLEAN} == {
        path: size for path, size in files.items() if path != layout.CLEAN
    }


def all_files(disk: RecordingDisk) -> list[str]:
    return [path for path, number in disk.image.names.items() if number is not None]


def test_an_idle_store_writes_one_checkpoint_and_then_nothing() -> None:
    world = World(RecordingDisk())
    world.send(world.frame(orders=1))
    assert not world.store.step()
    world.clock.pass_ms(1_000)
    assert world.store.step()
    operations = len(world.disk.operations)
    for _ in range(5):
        world.clock.pass_ms(60_000)
        assert not world.store.step()
    assert len(world.disk.operations) == operations


def test_records_of_another_subject_are_not_handed_out() -> None:
    world = World(RecordingDisk())
    world.send(world.frame(orders=1, invoices=1))
    queue = world.store.queue("orders")
    assert queue is not None
    with pytest.raises(CorruptionError):
        world.store.read_records(queue.entries(0, 1), subject="invoices")


def test_records_are_read_in_any_order_and_across_segments() -> None:
    world = World(RecordingDisk())
    for length in (10, 900, 20, 900, 30):
        world.send(world.frame(orders=[length, 5]))
    queue = world.store.queue("orders")
    assert queue is not None
    entries = queue.entries(0, 99)
    records = records_of(world.store, "orders")
    order = [7, 3, 3, 0, 9, 1]
    found = world.store.read_records([entries[i] for i in order], subject="orders")
    assert found == [records[i] for i in order]
    assert world.store.read_records([], subject="orders") == []


def test_a_frame_of_another_kind_is_a_mistake_of_the_caller() -> None:
    world = World(RecordingDisk())
    record = encode_record(
        Record(message_id=world.ids.next_id(), subject="a", body=b"", born_at_ms=1, due_at_ms=2)
    )
    delayed = build_message_frame({"a": [record]}, kind=FrameKind.DELAYED)
    with pytest.raises(ValueError, match="DELAYED"):
        world.store.append([parse_message_frame(delayed)])
    with pytest.raises(ValueError, match="frame of"):
        world.store.append([world.frame(a=world.store.frame_bytes_max)])
    assert world.send(world.frame(a=1))[0].places[0].first_sequence == 0


def test_actions_come_back_in_order_also_over_segments() -> None:
    world = World(RecordingDisk())
    assert list(world.store.actions.replay()) == []
    for count in (1, 50, 3, 40):
        world.act(count)
    world.store.actions.append([])
    world.sync_actions()
    store = restarted(world)
    assert list(store.actions.replay()) == [action for action, _ in world.history.actions]
    assert len(world.disk.names(layout.ACTION_LOG)) > 1
