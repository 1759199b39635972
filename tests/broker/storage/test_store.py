"""What a store promises while nothing breaks, and when the disk says no."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from qmq_broker.errors import ClosedError, CorruptionError
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.snapshots import GroupsContent
from qmq_broker.storage.store import Store
from qmq_client.group.queue import Entry
from qmq_client.wire.frame import (
    FRAME_HEADER_BYTES,
    FrameKind,
    build_message_frame,
    parse_message_frame,
)
from qmq_client.wire.marks import Marks, pack_marks
from qmq_client.wire.record import Record, encode_record
from qmq_client.wire.requests import SubjectPlace
from tests.broker.storage.lives import restarted
from tests.crash.image import Moment
from tests.crash.power_cut import Lost
from tests.crash.promises import check_messages
from tests.crash.recording_disk import RecordingDisk
from tests.crash.world import OPTIONS, History, World, records_of, visible
from tests.kit.clock import FakeClock


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
    store = Store.open(
        RecordingDisk(Moment(world.disk.image).after_cut(Lost()).image()), FakeClock(), OPTIONS
    )
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


@pytest.mark.parametrize(("behind_ms", "lines"), [(-1, 0), (60_000, 0), (60_001, 1)])
def test_a_start_behind_the_times_of_its_log_is_reported(
    behind_ms: int, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(RecordingDisk())
    world.send(world.frame(orders=1))
    stored_at_ms = world.store.last_stored_at_ms
    world.store.close()
    clock = FakeClock()
    clock.wall_ms = stored_at_ms - behind_ms
    caplog.clear()
    store = Store.open(world.disk, clock, OPTIONS)
    assert store.last_stored_at_ms == stored_at_ms
    told = [line for line in caplog.messages if f"ahead_ms={behind_ms}" in line]
    assert len(told) == len(caplog.messages) == lines


def test_a_checkpoint_comes_after_so_many_bytes_or_so_long_whichever_is_first() -> None:
    options = replace(OPTIONS, checkpoint_bytes=1_000, checkpoint_ms=5_000)
    world = World(RecordingDisk(), history=History(options=options))
    world.store.step()
    world.append(world.frame(orders=10))
    world.store.commit()
    assert not world.store.step(), "neither so many nor so long"
    world.append(world.frame(orders=1_000))
    world.store.commit()
    assert world.store.step(), "so many bytes, at once"
    world.append(world.frame(orders=10))
    world.store.commit()
    world.clock.pass_ms(4_999)
    assert not world.store.step()
    world.clock.pass_ms(1)
    assert world.store.step(), "so long"


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


def test_the_first_start_of_a_directory_rebuilds_nothing() -> None:
    assert not Store.open(RecordingDisk(), FakeClock(), OPTIONS).recovery.is_rebuilt


def test_a_clean_stop_makes_the_last_actions_durable() -> None:
    world = World(RecordingDisk())
    world.act()
    log = world.store.actions.log
    assert log.durable_offset < log.written_offset
    world.store.close()
    assert log.durable_offset == log.written_offset


def test_actions_that_are_damaged_after_the_opening_are_not_replayed_in_part() -> None:
    world = World(RecordingDisk())
    world.act(3)
    store = restarted(world)
    path = layout.segment_path(layout.ACTION_LOG, 0)
    store.disk.open(path).write(store.actions.log.written_offset - 8, [b"altered!"])
    with pytest.raises(CorruptionError, match=path):
        list(store.actions.replay())


def test_the_mark_of_an_older_stop_is_not_taken_for_a_clean_one() -> None:
    """As in a directory whose files come from two copies."""
    disk = RecordingDisk()
    World(disk).store.close()
    mark = disk.open(layout.CLEAN).read(0, 10**6)
    World(disk)
    disk.unlock()
    disk.open(layout.CLEAN, is_new=True).write(0, [mark])
    assert not Store.open(disk, FakeClock(), OPTIONS).recovery.clean


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


@pytest.mark.parametrize("growth_bytes", [512, OPTIONS.segment_bytes])
@pytest.mark.parametrize("left", [0, 8, 56, 64, 72])
def test_B3_a_frame_ends_with_its_segment_or_leaves_room_for_a_header(
    left: int, growth_bytes: int
) -> None:
    """Also where all room was taken before, as in a segment that is written again."""
    options = replace(OPTIONS, growth_bytes=growth_bytes)
    world = World(RecordingDisk(), history=History(options=options))
    world.send(world.frame(orders=100))
    room_bytes = options.segment_bytes - world.store.written_offset
    # A lone record of `orders` costs 126 bytes beside its body, before the fill.
    world.send(world.frame(orders=room_bytes - left - 126))
    fits = left == 0 or left >= FRAME_HEADER_BYTES
    assert (world.store.written_offset == options.segment_bytes - left) == fits
    world.send(world.frame(orders=10))
    store = restarted(world)
    assert check_messages(store, world.history.sent) == 3
    assert store.recovery.torn_bytes == 0


def test_actions_that_are_replayed_are_those_from_before_the_opening() -> None:
    world = World(RecordingDisk())
    world.act(3)
    world.sync_actions()
    store = restarted(world)
    before = list(store.actions.replay())
    assert len(before) == 3
    store.actions.append(before[:1])
    assert list(store.actions.replay()) == before


def test_B11_without_the_newest_snapshot_the_one_before_and_the_log_behind_it_are_there() -> None:
    world = World(RecordingDisk())
    log = world.store.actions.log
    offsets = []
    for content in (b"first", b"second", b"third"):
        world.act(100)
        offsets.append(log.written_offset)
        world.store.actions.write_snapshot(log.written_offset, GroupsContent(content))
    assert log.bases()[0] > 0, "old segments went"
    assert log.base_of(offsets[1]) < log.base_of(offsets[2])
    (newest,) = (path for path in layout.SNAPSHOTS if b"third" in content_of(world.disk, path))
    world.disk.unlink(newest)
    store = restarted(world)
    assert store.actions.snapshot is not None
    assert store.actions.snapshot.groups == b"second"
    assert len(list(store.actions.replay())) == 100


def content_of(disk: RecordingDisk, path: str) -> bytes:
    return disk.open(path).read(0, 10**6)


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
    marks = Marks(sequences=[0], sources=[0], due_at_ms=[2], message_ids=bytes(16))
    scheduled = build_message_frame(
        {"a": [record]},
        kind=FrameKind.SCHEDULED,
        marks=pack_marks(FrameKind.SCHEDULED, marks),
    )
    with pytest.raises(ValueError, match="SCHEDULED"):
        world.store.append([parse_message_frame(scheduled)])
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
