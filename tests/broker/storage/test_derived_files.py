"""B11: whatever can be made again may be deleted or damaged, and the answers stay the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from qmq_broker.storage.files import layout
from qmq_broker.storage.files.background import Work, at_once
from qmq_broker.storage.queues.queue_files import ENTRY_BYTES, QueueFiles
from qmq_broker.storage.store import Store
from tests.broker.storage.damaged import Directory, flip
from tests.crash.promises import check
from tests.crash.recording_disk import RecordingDisk, RecordingFile
from tests.crash.world import OPTIONS, RETAINING, History, World
from tests.kit.clock import FakeClock

#: Where derived files are.
DERIVED_IN = (layout.CONSUME_QUEUES, layout.STATE, layout.IDS, layout.ENTRIES)


def derived(directory: Directory) -> Iterator[str]:
    for path, number in directory.image.names.items():
        if number is not None and path.startswith(DERIVED_IN):
            yield path


#: What may happen to a derived file.
DERIVED: dict[str, Callable[[Directory, str], None]] = {
    "deleted": lambda d, path: d.remove(path),
    "empty": lambda d, path: d.put(path, b""),
    "one byte short": lambda d, path: d.change(path, lambda c: c[:-1]),
    "an entry short": lambda d, path: d.change(path, lambda c: c[:-20]),
    "one byte long": lambda d, path: d.change(path, lambda c: c + b"x"),
    "altered": lambda d, path: d.change(path, flip(3)),
    "zeros": lambda d, path: d.change(path, lambda c: bytes(len(c))),
    "two entries swapped": lambda d, path: d.change(path, lambda c: c[20:40] + c[:20] + c[40:]),
}


@pytest.mark.parametrize("harm", DERIVED.values(), ids=DERIVED)
@pytest.mark.parametrize("is_clean", [True, False])
def test_B11_a_derived_file_that_is_gone_or_wrong_is_made_again(
    harm: Callable[[Directory, str], None], is_clean: bool
) -> None:
    paths = list(derived(Directory(is_clean=is_clean)))
    assert len(paths) > 5
    for path in paths:
        directory = Directory(is_clean=is_clean)
        harm(directory, path)
        store = directory.assert_all_there()
        store.close()


def test_B11_all_derived_files_may_be_deleted() -> None:
    directory = Directory(is_clean=True)
    for path in (*DERIVED_IN, *layout.CHECKPOINTS, layout.CLEAN):
        directory.remove(path)
    store = directory.assert_all_there()
    assert store.recovery.is_rebuilt
    placed = store.append([directory.world.history.sent[0].frame])[0]
    assert placed.duplicates == 3


def test_B11_the_queues_made_again_are_the_same_bytes() -> None:
    directory = Directory(is_clean=True)
    queues = (layout.CONSUME_QUEUES, layout.QUEUE_TABLE)
    before = {
        path: directory.content(path) for path in derived(directory) if path.startswith(queues)
    }
    directory.remove(layout.CONSUME_QUEUES)
    directory.forget_queues()
    disk = RecordingDisk(directory.image)
    Store.open(disk, FakeClock(), OPTIONS).close()
    directory.image = disk.image
    after = {
        path: directory.content(path) for path in derived(directory) if path.startswith(queues)
    }
    assert after == before


def test_checkpoints_that_are_gone_cost_a_longer_start_and_nothing_else() -> None:
    directory = Directory(is_clean=True)
    epoch = directory.world.store.epoch
    for path in layout.CHECKPOINTS:
        directory.remove(path)
    store = directory.assert_all_there()
    assert not store.recovery.clean
    assert store.recovery.frames == 12
    assert store.epoch > epoch


@pytest.mark.parametrize(
    "gone",
    [
        (layout.QUEUE_TABLE,),
        (layout.ENTRIES,),
        (layout.QUEUE_TABLE, layout.ENTRIES),
        (*layout.QUEUE_TABLES, layout.ENTRIES, layout.IDS),
    ],
    ids=" and ".join,
)
def test_B11_what_is_gone_is_made_again_where_the_log_has_lost_its_beginning(
    gone: tuple[str, ...],
) -> None:
    """The table before may tell of less than the log has left: then it is of no use."""
    world = World(RecordingDisk(), history=History(options=RETAINING))
    gone_below = tuple(f"{path}/" for path in gone)
    for number in range(12):
        world.send(world.frame(orders=300, **{f"subject-{number}": 50}))
        world.clock.pass_ms(1_100)
        for _ in range(3):
            world.store.step()
        world.give_up()
        image = world.disk.image.copy()
        for path in [path for path in image.names if f"{path}/".startswith(gone_below)]:
            del image.names[path]
        check(image.copy(), world.history)
        disk = RecordingDisk(image)
        Store.open(disk, FakeClock(), world.options).close()
        again = Store.open(RecordingDisk(disk.image), FakeClock(), world.options)
        assert not again.recovery.is_rebuilt
        assert again._queues.indexed_offset == again.durable_offset, "what was made is believed"
    assert world.store.first_offset > 0


def test_the_log_keeps_what_is_not_in_queue_files_and_schedule() -> None:
    """Whatever the checkpoint says: a start would need it should a journal be lost."""
    world = World(RecordingDisk(), history=History(options=replace(RETAINING, dedupe_ids=0)))
    given_up = 0
    for _ in range(40):
        world.send(world.frame(orders=300))
        world.store._saver.write_checkpoint()
        given_up += world.store.give_up_below(world.store.durable_offset)
        kept_offset = min(world.store._queues.indexed_offset, world.store.schedule.copied_offset)
        assert world.store.first_offset <= kept_offset
    assert given_up


def test_the_log_stays_while_a_copy_of_delayed_messages_waits_for_the_disk() -> None:
    world = World(RecordingDisk(), history=History(options=replace(RETAINING, dedupe_ids=0)))
    waiting: list[Work] = []
    world.store.schedule.background.start = waiting.append
    for _ in range(40):
        world.send(world.frame(orders=300))
        world.store._saver.write_checkpoint()
        assert not world.store.give_up_below(world.store.durable_offset)
    assert world.store._queues.indexed_offset > world.options.segment_bytes
    (work,) = waiting
    world.store.schedule.background.start = at_once
    work()
    given_up = 0
    for _ in range(5):
        world.send(world.frame(orders=300))
        world.store._saver.write_checkpoint()
        given_up += world.store.give_up_below(world.store.durable_offset)
    assert given_up


class CountingDisk(RecordingDisk):
    """Counts which files are open."""

    def __init__(self) -> None:
        super().__init__()
        self.open_files: Counter[str] = Counter()

    def open(self, path: str, *, is_new: bool = False) -> RecordingFile:
        file = super().open(path, is_new=is_new)
        return CountedFile(self, path, file.number)


class CountedFile(RecordingFile):
    """One of its files."""

    def __init__(self, disk: CountingDisk, path: str, number: int) -> None:
        super().__init__(disk, path, number)
        self._open_files = disk.open_files
        self._open_files[path] += 1

    def close(self) -> None:
        self._open_files[self.path] -= 1


def test_B10_queue_files_are_open_a_few_at_a_time_and_the_last_used_stay() -> None:
    disk = CountingDisk()
    files = QueueFiles(disk, entries_per_file=4, open_files=2)
    disk.make_directory(layout.CONSUME_QUEUES)
    for subject in "abcd":
        files.add(subject, 0, bytes(ENTRY_BYTES), [], is_synced=True)
    for subject, open_subjects in zip(
        "abacadb", ("a", "ab", "ab", "ac", "ac", "ad", "bd"), strict=True
    ):
        assert files.read(subject, 0, 1) == bytes(ENTRY_BYTES)
        is_open = sorted(path for path, count in disk.open_files.items() if count)
        assert is_open == [layout.queue_path(one, 0) for one in open_subjects]
    files.close()
    assert not +disk.open_files
