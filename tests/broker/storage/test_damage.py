"""Damage: a table of what was done to which file, and what must come of it.

Torn tails are cut, derived files are made again, damage of accepted data stops the broker with a
report and leaves every byte as it is.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from qmq_broker.errors import CorruptionError, StoreError
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.faults import Level
from qmq_broker.storage.logs import frame_scan
from qmq_broker.storage.logs.segments import SEGMENT_HEAD_BYTES
from qmq_broker.storage.store import Store
from qmq_broker.storage.upkeep.verify import verify_store
from qmq_client.wire.errors import QmqError
from tests.broker.storage.damage_cases import swap
from tests.broker.storage.damaged import WITNESSES, Directory, flip, without_its_last_frame
from tests.crash.recording_disk import Image, RecordingDisk
from tests.crash.world import OPTIONS, World, records_of, visible
from tests.kit.clock import FakeClock

SEGMENT = OPTIONS.segment_bytes
FIRST = layout.segment_path(layout.COMMIT_LOG, 0)
SECOND = layout.segment_path(layout.COMMIT_LOG, SEGMENT)
ACTIONS = layout.segment_path(layout.ACTION_LOG, 0)


def append(rest: bytes, next_offset: int) -> Callable[[bytes], bytes]:
    """Let something stand behind the accepted frames."""
    position = next_offset % SEGMENT

    def change(content: bytes) -> bytes:
        return content[:position] + rest + content[position + len(rest) :]

    return change


def frame_of_another_life(length: int) -> bytes:
    """A frame as a log writes it, torn after `length` bytes, of no use where it stands."""
    world = World(RecordingDisk())
    world.send(world.frame(orders=100))
    number = world.disk.image.names[FIRST]
    assert number is not None
    return world.disk.image.inodes[number].seen[88 : 88 + length]


#: What may stand behind the accepted frames after a crash.
TORN: dict[str, bytes] = {
    "one byte": b"x",
    "the start of a header": b"QMQF\x01\x01",
    "a header and nothing": frame_of_another_life(64),
    "half a frame": frame_of_another_life(150),
    "a whole frame of another offset": frame_of_another_life(232),
    "only the end of a frame": bytes(64) + b"rest of a frame",
    "the magic everywhere": b"QMQF" * 40,
    "noise": random.Random(3).randbytes(200),
    "ones": b"\xff" * 200,
}


@pytest.mark.parametrize("rest", TORN.values(), ids=TORN)
@pytest.mark.parametrize("is_clean", [True, False])
def test_B3_a_torn_tail_is_cut_counted_and_logged_once(
    rest: bytes, is_clean: bool, caplog: pytest.LogCaptureFixture
) -> None:
    directory = Directory(is_clean=is_clean)
    path = layout.segment_path(layout.COMMIT_LOG, directory.next_offset // SEGMENT * SEGMENT)
    directory.change(path, append(rest, directory.next_offset))
    store = directory.assert_all_there()
    assert store.recovery.torn_bytes == len(rest.rstrip(b"\0"))
    assert len([line for line in caplog.messages if "torn tail" in line]) == 1
    store.close()


@pytest.mark.parametrize("path", [FIRST, ACTIONS])
@pytest.mark.parametrize("is_clean", [True, False])
def test_B4_any_altered_bit_of_accepted_frames_stops_the_broker_or_is_never_delivered(
    path: str, is_clean: bool
) -> None:
    directory = Directory(is_clean=is_clean, has_checkpoint=False)
    original = directory.content(path)
    log = directory.world.store.actions.log if path == ACTIONS else None
    end = log.written_offset if log else SEGMENT
    refused = 0
    # Every byte of the first two frames, then a sample.
    for position in [*range(560), *range(560, min(end, len(original)), 13)]:
        directory.put(path, flip(position)(original))
        refused += _is_refused_or_harmless(directory)
    # After a clean stop a start does not read the frames; then only the messages themselves count.
    assert refused > (300 if is_clean and path == FIRST else 500)
    directory.put(path, original)
    directory.assert_all_there()


def _is_refused_or_harmless(directory: Directory) -> bool:
    """Whether the opening refuses; else whatever is read must be as it was sent."""
    try:
        store = Store.open(RecordingDisk(directory.image), FakeClock(), OPTIONS)
    except CorruptionError:
        return True
    try:
        for subject in store.subjects():
            found = records_of(store, subject)
            assert found == directory.records[subject][: len(found)]
        list(store.actions.replay())
    except CorruptionError:
        return True
    return False


def test_B4_a_scan_without_stamps_would_let_altered_frames_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The test above is able to fail: here is the bug that it must find."""
    monkeypatch.setattr(frame_scan, "verify_stamp", lambda header, head: None)
    directory = Directory(is_clean=False, has_checkpoint=False)
    original = directory.content(FIRST)
    stamped = [*range(88 + 32, 88 + 40), *range(88 + 44, 88 + 48)]
    for position in stamped:
        directory.put(FIRST, flip(position)(original))
        if not _is_refused_or_harmless(directory):
            return
    raise AssertionError("every altered stamp was found without its checksum")


#: What was done, and which offset the report must name.
DAMAGE: dict[str, tuple[Callable[[Directory], None], int | None]] = {
    "a page of zeros": (
        lambda d: d.change(FIRST, lambda c: c[:512] + bytes(512) + c[1024:]),
        None,
    ),
    "a page of ones": (
        lambda d: d.change(FIRST, lambda c: c[:512] + b"\xff" * 512 + c[1024:]),
        None,
    ),
    "another page in its place": (
        lambda d: d.change(FIRST, lambda c: c[:512] + c[1024:1536] + c[1024:]),
        None,
    ),
    "the first segment is missing": (lambda d: d.remove(FIRST), 0),
    "a segment in the middle is missing": (lambda d: d.remove(SECOND), SEGMENT),
    "all segments are missing": (lambda d: d.remove(layout.COMMIT_LOG), None),
    "the first segment is empty": (lambda d: d.put(FIRST, b""), 0),
    "the first segment is cut": (lambda d: d.change(FIRST, lambda c: c[:1000]), None),
    "two segments are swapped": (lambda d: swap(d, FIRST, SECOND), 0),
    "a segment is copied under another name": (
        lambda d: d.put(SECOND, d.content(FIRST)),
        SEGMENT,
    ),
    "a segment of another store": (
        lambda d: d.put(FIRST, Directory(is_clean=True).content(FIRST)),
        0,
    ),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_B4_damage_of_accepted_data_stops_the_broker_and_changes_nothing(
    damage: tuple[Callable[[Directory], None], int | None], has_checkpoint: bool
) -> None:
    directory = Directory(is_clean=False)
    if has_checkpoint:
        directory.forget_queues()
        directory.remove(layout.SCHEDULE_TABLE)
    else:
        for path in layout.CHECKPOINTS:
            directory.put(path, b"")
    harm, offset = damage
    harm(directory)
    error = directory.refusal()
    assert error.segment.startswith("commitlog")
    assert error.reason
    if offset is not None:
        assert error.offset == offset


def test_B4_a_log_that_ends_below_the_checkpoint_is_damaged_not_torn() -> None:
    directory = Directory(is_clean=False)
    path = layout.segment_path(layout.COMMIT_LOG, directory.next_offset // SEGMENT * SEGMENT)
    position = (directory.next_offset - 8) % SEGMENT
    directory.change(path, flip(position))
    error = directory.refusal()
    assert "checkpoint" in error.reason
    # The frame says where it begins, the report where the damage does.
    assert error.offset < directory.next_offset


def test_B4_an_action_log_that_ends_below_its_snapshot_is_damaged_not_torn() -> None:
    world = World(RecordingDisk())
    world.act(3)
    offset = world.store.actions.log.written_offset
    world.act(3)
    world.note_groups()
    world.disk.unlock()
    for path in layout.CHECKPOINTS:
        world.disk.unlink(path)
    world.disk.open(ACTIONS).truncate(offset)
    for _ in range(2):
        with pytest.raises(CorruptionError, match="the snapshot of the groups ends at"):
            Store.open(world.disk, FakeClock(), OPTIONS)


@pytest.mark.parametrize("witness", WITNESSES)
def test_B4_each_file_that_says_how_far_the_log_was_synced_is_enough_to_refuse_a_shorter_one(
    witness: str,
) -> None:
    directory = without_its_last_frame(witnesses=[witness])
    error = directory.refusal()
    assert error.segment.startswith(layout.COMMIT_LOG)
    assert "synced up to" in error.reason
    found = verify_store(RecordingDisk(directory.image), FakeClock(), check_groups=len)
    assert Level.DAMAGED in {fault.level for fault in found.faults}


def test_without_any_witness_a_shorter_log_cannot_be_told_from_a_whole_one() -> None:
    store = without_its_last_frame(witnesses=[]).open()
    assert store.recovery.torn_bytes == 0
    store.close()


def test_B4_damage_anywhere_in_actions_that_are_replayed_is_refused_with_nothing_changed() -> None:
    for position in range(SEGMENT_HEAD_BYTES, 900, 37):
        directory = Directory(is_clean=True)
        directory.change(ACTIONS, flip(position))
        assert directory.refusal().segment == ACTIONS


def test_the_limit_of_B4_damage_in_the_very_last_commit_looks_torn() -> None:
    """Stated in the guarantees: a checkpoint that is written when the log falls idle closes it."""
    directory = Directory(is_clean=False, has_checkpoint=False)
    directory.remove(layout.SCHEDULE_TABLE)  # says how far the log was durable, too
    path = layout.segment_path(layout.COMMIT_LOG, directory.next_offset // SEGMENT * SEGMENT)
    directory.change(path, flip((directory.next_offset - 8) % SEGMENT))
    store = directory.open()
    assert store.recovery.torn_bytes > 0
    assert visible(store)["orders"] == len(directory.records["orders"]) - 2


def test_B4_damage_that_appears_while_the_broker_runs_is_found_when_it_is_read() -> None:
    directory = Directory(is_clean=True)
    store = directory.open()
    queue = store.queue("orders")
    assert queue is not None
    entry = queue.entries(0, 1)[0]
    for position in range(entry.physical_offset, entry.physical_offset + entry.record_bytes):
        disk = RecordingDisk(directory.image)
        store = Store.open(disk, FakeClock(), OPTIONS)
        number = disk.image.names[FIRST]
        assert number is not None
        inode = disk.image.inodes[number]
        inode.durable = flip(position)(inode.durable)
        with pytest.raises(CorruptionError) as caught:
            store.read_records([entry], subject="orders")
        assert caught.value.offset == entry.physical_offset


def test_random_damage_ends_in_a_declared_error_or_in_the_truth() -> None:
    """Bit flips, cuts, insertions and swaps anywhere: nothing undeclared, nothing altered."""
    rng = random.Random(11)
    original = Directory(is_clean=False)
    outcomes: dict[str, int] = {}
    for _ in range(300):
        directory = Directory.__new__(Directory)
        directory.world, directory.records = original.world, original.records
        directory.image = original.image.copy()
        for _ in range(rng.randrange(1, 4)):
            path = rng.choice(sorted(directory.files()))
            directory.change(path, lambda content: _harmed(rng, content))
        outcome = _outcome(directory)
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    assert outcomes.get("refused", 0) > 20
    assert outcomes.get("read", 0) > 20


def _harmed(rng: random.Random, content: bytes) -> bytes:
    first = rng.randrange(len(content) + 1)
    count = rng.choice((1, 8, 100))
    return rng.choice(
        (
            content[:first],
            content[:first] + rng.randbytes(count) + content[first + count :],
            content[:first] + rng.randbytes(count) + content[first:],
            content[:first] + content[first + count :],
            content[:first] + bytes(count) + content[first + count :],
        )
    )


def _outcome(directory: Directory) -> str:
    try:
        store = directory.open()
        for subject in store.subjects():
            found = records_of(store, subject)
            assert found == directory.records[subject][: len(found)]
        list(store.actions.replay())
    except StoreError:
        return "refused"
    except QmqError as error:
        raise AssertionError(f"undeclared: {error!r}") from error
    return "read"


def test_an_image_can_be_damaged_without_harming_its_original() -> None:
    image = Directory(is_clean=True).image
    copy: Image = image.copy()
    copy.names.clear()
    assert image.names
