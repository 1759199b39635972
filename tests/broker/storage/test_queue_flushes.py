"""B11: consume queues whose files nobody syncs, over a power cut."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qmq_broker.storage.files import layout
from qmq_broker.storage.files.background import Work
from qmq_broker.storage.queues import consume_queues
from qmq_broker.storage.store import Store
from qmq_broker.storage.upkeep.verify import verify_store
from tests.broker.storage.lives import restarted
from tests.crash.image import Inode, Moment
from tests.crash.power_cut import Lost
from tests.crash.promises import check_messages
from tests.crash.recording_disk import RecordingDisk
from tests.crash.world import OPTIONS, RETAINING, History, World
from tests.kit.clock import FakeClock

#: Every checkpoint flushes the queues, each to one file that grows.
FLUSHING = replace(
    OPTIONS,
    checkpoint_ms=1_000,
    queue_flush_bytes=1,
    segment_bytes=2**20,
    queue_entries_per_file=1_000,
)
SUBJECTS = [f"subject-{number}" for number in range(5)]
FLUSHES = 3
#: Frames between two flushes.
SENDS = 4


class Unsynced:
    """A store that has flushed some times, with what each queue file was after each flush."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(consume_queues, "SYNCED_QUEUES_MAX", 0)
        self.world = World(RecordingDisk(), history=History(options=FLUSHING))
        self.contents: list[dict[str, bytes]] = []
        self.syncs: list[int] = []
        for _ in range(FLUSHES):
            for _ in range(SENDS):
                self.world.send(self.world.frame(**{subject: [20, 30] for subject in SUBJECTS}))
            self.world.clock.pass_ms(2_000)
            before = self.world.disk.calls["sync"]
            assert self.world.store.step(), "a checkpoint begins the flush"
            self.syncs.append(self.world.disk.calls["sync"] - before)
            self.world.store.step()
            self.contents.append({subject: self._file(subject).seen for subject in SUBJECTS})

    def _file(self, subject: str) -> Inode:
        image = self.world.disk.image
        return image.inodes[image.names[layout.queue_path(subject, 0)] or 0]

    def take_back(self, subject: str, flushes: int) -> None:
        """Let the file be what it was after so many flushes: the disk got no more of it."""
        file = self._file(subject)
        before = self.contents[flushes - 1][subject] if flushes else b""
        assert len(before) < len(file.seen)
        file.durable = before
        file.versions.clear()

    def begin_another(self) -> None:
        """One more message, in a journal of its own, and a flush that has begun and not finished."""
        self.world.send(self.world.frame(**{SUBJECTS[0]: 20}))
        self.world.clock.pass_ms(2_000)
        assert self.world.store.step(), "a checkpoint begins the flush"

    def assert_all_there(self) -> Store:
        store = restarted(self.world)
        sent = self.world.history.sent
        assert check_messages(store, sent) == len(sent) >= FLUSHES * SENDS
        return store


def assert_known(store: Store) -> None:
    """Table and journal together told this start all entries: it read no frame for them."""
    assert not store.recovery.is_rebuilt
    assert store._queues.known_offset == store.durable_offset
    assert store._queues.indexed_offset < store.durable_offset


def test_B11_files_that_a_power_cut_took_back_by_one_flush_cost_no_reading_of_the_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unsynced = Unsynced(monkeypatch)
    for subject in SUBJECTS[:2]:
        unsynced.take_back(subject, FLUSHES - 1)
    assert_known(unsynced.assert_all_there())


def test_B11_a_power_cut_after_a_flush_of_few_queues_costs_no_reading_of_the_log() -> None:
    """Files, their names and those of their folders were synced before the table tells of them."""
    world = World(RecordingDisk(), history=History(options=FLUSHING))
    for _ in range(FLUSHES):
        world.send(world.frame(**{subject: [20, 30] for subject in SUBJECTS}))
        world.clock.pass_ms(2_000)
        assert world.store.step(), "a checkpoint begins the flush"
        world.store.step()
    image = Moment(world.disk.image).after_cut(Lost()).image()
    store = Store.open(RecordingDisk(image), FakeClock(), FLUSHING)
    assert not store.recovery.is_rebuilt
    assert store._queues.indexed_offset == world.store._queues.indexed_offset > 0
    assert check_messages(store, world.history.sent) == FLUSHES


def test_B11_what_is_kept_for_the_table_before_is_no_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unsynced = Unsynced(monkeypatch)
    unsynced.begin_another()
    world = unsynced.world
    world.disk.unlock()
    disk = RecordingDisk(world.disk.image)
    found = verify_store(disk, FakeClock(), check_groups=len)
    assert [fault.line() for fault in found.faults] == []
    assert len(disk.names(layout.ENTRIES)) == 2


def test_B11_files_that_lost_more_are_made_again_from_the_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unsynced = Unsynced(monkeypatch)
    unsynced.take_back(SUBJECTS[1], 0)
    assert unsynced.assert_all_there().recovery.is_rebuilt


@pytest.mark.parametrize("has_newer_journal", [False, True])
def test_B11_a_second_start_still_has_the_table_before_and_its_journal(
    monkeypatch: pytest.MonkeyPatch, has_newer_journal: bool
) -> None:
    unsynced = Unsynced(monkeypatch)
    if has_newer_journal:
        unsynced.begin_another()
    store = unsynced.assert_all_there()
    assert not store.recovery.is_rebuilt
    assert isinstance(store.disk, RecordingDisk)
    unsynced.world.disk = store.disk
    unsynced.take_back(SUBJECTS[0], FLUSHES - 1)
    assert_known(unsynced.assert_all_there())


@pytest.mark.parametrize("lost", [0, 1])
def test_B11_without_one_of_the_tables_or_the_old_journal_nothing_is_missing(
    monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    unsynced = Unsynced(monkeypatch)
    names = unsynced.world.disk.image.names
    del names[layout.QUEUE_TABLES[lost]]
    assert not unsynced.assert_all_there().recovery.is_rebuilt
    journals = sorted(name for name in names if name.startswith(f"{layout.ENTRIES}/"))
    del names[journals[0]]
    unsynced.assert_all_there()


def test_B11_a_flush_of_many_queues_syncs_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    unsynced = Unsynced(monkeypatch)
    assert max(unsynced.syncs) < len(SUBJECTS) + 3
    files = {f"{layout.CONSUME_QUEUES}/{subject}" for subject in SUBJECTS}
    for path, number in unsynced.world.disk.image.names.items():
        if number is not None and path.rpartition("/")[0] in files:
            assert not unsynced.world.disk.image.inodes[number].durable


def test_B11_a_start_removes_the_files_of_what_was_given_up() -> None:
    """The process was killed between the note of where the log begins and the end of the files."""
    world = World(RecordingDisk(), history=History(options=RETAINING))
    waiting: list[Work] = []
    world.store.retention.background.start = waiting.append
    for _ in range(12):
        world.send(world.frame(orders=[300, 300]))
        world.clock.pass_ms(1_100)
        world.store.step()
    world.give_up()
    waiting.pop()()
    world.store.step()
    assert waiting, "the removal has not begun"
    queue, directory = world.store.queue("orders"), layout.queue_directory("orders")
    assert queue is not None
    before = world.disk.names(directory)
    world.disk.unlock()
    Store.open(world.disk, FakeClock(), RETAINING)
    first_file = queue.first_sequence // RETAINING.queue_entries_per_file
    assert world.disk.names(directory) == before[first_file:] != before
