"""The journals: what a start would read out of frames is known without, and never believed wrongly."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from qmq_broker.errors import CorruptionError
from qmq_broker.storage import saving
from qmq_broker.storage.files import journal, layout
from qmq_broker.storage.files.format_file import read_format
from qmq_broker.storage.files.journal import Journal
from qmq_broker.storage.ids import journal as id_journal
from qmq_broker.storage.ids.journal import IdJournal
from qmq_broker.storage.ids.runs import IdRun
from qmq_broker.storage.ids.window import DedupeWindow
from qmq_broker.storage.queues.entry_chunk import EntryChunk, EntryRun, encode_entry_chunk
from qmq_broker.storage.queues.queue_files import ENTRY_BYTES
from qmq_broker.storage.store import Store
from tests.broker.storage.damaged import flip
from tests.broker.storage.lives import restarted
from tests.crash.promises import check_messages
from tests.crash.recording_disk import RecordingDisk
from tests.crash.world import OPTIONS, History, World
from tests.kit.clock import FakeClock

STORE_ID = bytes(range(16))
#: Nothing is flushed: all that a start knows of the queues is in the journal.
JOURNALED = replace(OPTIONS, queue_flush_bytes=2**30, checkpoint_ms=1_000)


def lone_messages(count: int, *, subjects: int = 3) -> World:
    """Lone messages to several subjects in turn, a checkpoint after all of them; then killed."""
    world = World(RecordingDisk(), history=History(options=JOURNALED))
    for number in range(count):
        world.send(world.frame(**{f"subject-{number % subjects}": number % 40}))
    world.clock.pass_ms(2_000)
    world.store.step()
    return world


def assert_all_known(world: World, store: Store) -> None:
    """Everything sent is there, and every repeat is answered with its first place."""
    assert check_messages(store, world.history.sent) == len(world.history.sent)
    for one in world.history.sent:
        placed = store.append([one.frame])[0]
        assert (placed.duplicates, placed.places) == (
            one.frame.header.record_count,
            one.placed.places,
        )


def test_R11_B7_a_start_after_a_kill_reads_no_frame_below_the_checkpoint() -> None:
    world = lone_messages(200)
    store = restarted(world)
    assert store.recovery.frames == 1, "the last one is always seen again"
    assert not store.recovery.is_rebuilt
    assert store._ids.next_offset == store._queues.known_offset == store.durable_offset
    reads = store.disk.calls["read"]  # type: ignore[attr-defined]  # a RecordingDisk
    assert reads < 120, "heads of segments, chunks and small files"
    assert_all_known(world, store)


@pytest.mark.parametrize("directory", [layout.IDS, layout.ENTRIES])
def test_B7_B11_whatever_a_journal_says_no_id_and_no_entry_is_missing(directory: str) -> None:
    """Every byte of it altered, and every end cut: what it does not tell is read from the frames."""
    world = lone_messages(24)
    paths = [f"{directory}/{name}" for name in world.disk.names(directory)]
    assert paths
    for path in paths:
        inode = world.disk.image.inodes[world.disk.image.names[path] or 0]
        original = inode.seen
        rng = random.Random(3)
        for position in sorted(rng.sample(range(len(original)), 25)):
            for content in (flip(position)(original), original[:position], b""):
                inode.durable = content
                inode.versions.clear()
                assert_all_known(world, restarted(world))
        inode.durable = original


@pytest.mark.parametrize("directory", [layout.IDS, layout.ENTRIES])
def test_B7_B11_a_whole_chunk_of_something_else_is_not_believed(directory: str) -> None:
    world = lone_messages(24)
    format_ = read_format(world.disk)
    assert format_ is not None
    for name in world.disk.names(directory):
        world.disk.unlink(f"{directory}/{name}")
    strange = Journal(world.disk, directory, format_.store_id)
    strange.append(world.store.durable_offset, b"neither ids nor entries")
    strange.close()
    assert_all_known(world, restarted(world))


@pytest.mark.parametrize(("first", "cut_bytes"), [(1, 0), (0, 7)], ids=["a gap", "half an entry"])
def test_B11_a_chunk_that_does_not_continue_where_its_queues_end_is_not_believed(
    first: int, cut_bytes: int
) -> None:
    world = lone_messages(24)
    format_ = read_format(world.disk)
    assert format_ is not None
    for name in world.disk.names(layout.ENTRIES):
        world.disk.unlink(f"{layout.ENTRIES}/{name}")
    runs = []
    for subject in world.store.subjects():
        queue = world.store.queue(subject)
        assert queue is not None
        entries = queue.unflushed(queue.next_sequence)[1]
        part = entries[first * ENTRY_BYTES : len(entries) - cut_bytes]
        runs.append(EntryRun(subject, first, part))
    strange = Journal(world.disk, layout.ENTRIES, format_.store_id)
    strange.append(world.store.durable_offset, encode_entry_chunk(EntryChunk(0, runs)))
    strange.close()
    assert_all_known(world, restarted(world))


def test_B7_the_window_that_is_restored_is_the_one_that_the_frames_give() -> None:
    rng = random.Random(5)
    disk = RecordingDisk()
    window = DedupeWindow(ids_max=400, age_ms=50_000)
    ids = IdJournal(disk, STORE_ID, window)
    disk.make_directory(layout.IDS)
    ids.load(0, 0)
    ids.start()
    added, counters, offset = [], dict.fromkeys(range(3), 0), 0
    for number in range(900):
        instance = rng.choice([0, 1, 2, rng.getrandbits(64)])
        first = counters.get(instance, 2**64 - 9)
        after = first + rng.randrange(1, 4)
        counters[instance] = after + rng.randrange(2)
        offset += 100
        subject = rng.choice(["orders", "bills"])
        added.append({subject: [IdRun(instance, first, after)]})
        window.add(added[-1], offset=offset, stored_at_ms=number * 90)
        if rng.random() < 0.02:
            ids.write_some(offset + 100)
    while not ids.write_some(offset + 100):
        pass
    again = DedupeWindow(ids_max=400, age_ms=50_000)
    IdJournal(disk, STORE_ID, again).load(window.first_offset or 0, offset + 100)
    assert (again.ids, again.first_offset) == (window.ids, window.first_offset)
    assert [again.find(ids) for ids in added] == [window.find(ids) for ids in added]
    assert len(disk.names(layout.IDS)) == 1


def test_old_files_of_a_journal_go_and_the_rest_is_read_across_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(journal, "FILE_BYTES", 100)
    disk = RecordingDisk()
    disk.make_directory("ids")
    one = Journal(disk, "ids", STORE_ID)
    assert list(one.read(0, 0)) == []
    one.start()
    for offset in range(10, 101, 10):
        one.append(offset, b"%d" % offset * 20)
    assert [chunk.next_offset for chunk in Journal(disk, "ids", STORE_ID).read(35, 100)] == [
        *range(40, 101, 10)
    ]
    one.remove_below(50)
    assert disk.names("ids")[0] == f"{40:020d}"
    again = Journal(disk, "ids", STORE_ID)
    assert [chunk.first_offset for chunk in again.read(50, 100)] == [*range(50, 100, 10)]
    assert list(Journal(disk, "ids", STORE_ID).read(20, 100)) == [], "its beginning is gone"
    late = Journal(disk, "ids", STORE_ID)
    assert list(late.read(150, 200)) == []
    assert late.next_offset == 150, "what ends before that is not gone on with"
    disk.unlink(f"ids/{60:020d}")
    assert [chunk.next_offset for chunk in Journal(disk, "ids", STORE_ID).read(50, 100)] == [60]


def test_B10_files_of_ids_that_the_window_has_left_behind_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(journal, "FILE_BYTES", 100)
    options = replace(JOURNALED, dedupe_ids=16)
    world = World(RecordingDisk(), history=History(options=options))
    for _ in range(60):
        world.send(world.frame(orders=10))
        world.clock.pass_ms(2_000)
        world.store.step()
    window_offset = world.store._window.first_offset
    assert window_offset is not None
    bases = journal.journal_bases(world.disk, layout.IDS)
    assert bases[0] <= window_offset < bases[1]
    assert len(bases) < 30


def test_B4_a_journal_that_knows_more_than_the_log_holds_stops_the_start() -> None:
    for directory in (layout.IDS, layout.ENTRIES):
        world = lone_messages(30)
        other = layout.ENTRIES if directory == layout.IDS else layout.IDS
        names = world.disk.image.names
        last = max(path for path in names if path.startswith("commitlog/"))
        for path in [p for p in names if p.startswith((last, other, "checkpoint"))]:
            del names[path]
        with pytest.raises(CorruptionError, match=f"{directory} says synced up to"):
            restarted(world)


def test_a_thousand_subjects_cost_one_sync_at_a_checkpoint() -> None:
    options = replace(JOURNALED, segment_bytes=2**20)
    world = World(RecordingDisk(), history=History(options=options))
    world.send(world.frame(**{f"subject-{number}": 8 for number in range(1_000)}))
    world.clock.pass_ms(2_000)
    world.disk.calls.clear()
    assert world.store.step()
    assert world.disk.calls["sync"] == 3, "entries, ids, checkpoint"
    assert_all_known(world, restarted(world))


def test_a_clean_stop_of_many_subjects_leaves_them_in_the_journal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(saving, "QUEUES_AT_STOP_MAX", 5)
    world = lone_messages(20, subjects=10)
    world.send(world.frame(orders=[1, 2]))
    world.disk.calls.clear()
    world.store.close()
    assert world.disk.calls["sync"] < 10
    store = restarted(world)
    assert store.recovery.clean
    assert store._queues.indexed_offset < store._queues.known_offset == store.durable_offset
    assert_all_known(world, store)


def test_B6_without_room_the_journals_wait_and_nothing_is_lost() -> None:
    world = lone_messages(10)
    for number in range(20):
        world.send(world.frame(orders=number))
    world.disk.capacity_bytes -= world.disk.free_bytes()
    before = world.store._ids.next_offset
    world.clock.pass_ms(2_000)
    assert world.store.step(), "the checkpoint is written all the same"
    assert world.store._ids.next_offset == before
    assert_all_known(world, restarted(world))
    world.disk.capacity_bytes = 2**40
    world.send(world.frame(orders=1))
    world.clock.pass_ms(2_000)
    world.store.step()
    assert world.store._ids.next_offset == world.store.durable_offset
    assert_all_known(world, restarted(world))


def test_ids_that_wait_too_long_are_given_up_and_read_from_the_frames(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(id_journal, "WAITING_RUNS_MAX", 15)
    world = lone_messages(10)
    for number in range(20):
        world.send(world.frame(orders=number))
    world.clock.pass_ms(2_000)
    world.store.step()
    assert world.disk.names(layout.IDS) == []
    store = restarted(world)
    assert store._ids.next_offset < store.durable_offset
    assert_all_known(world, store)


def test_without_a_window_the_journal_of_ids_goes() -> None:
    world = lone_messages(40)
    world.disk.unlock()
    options = replace(JOURNALED, dedupe_ids=0)
    store = Store.open(RecordingDisk(world.disk.image), FakeClock(), options)
    assert store.recovery.frames == 1
    assert store._window.ids == 0
    assert store.disk.names(layout.IDS) == []
