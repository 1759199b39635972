"""What `qmq store verify` says of every kind of file under every kind of damage, and what a start does.

One table: the file, the harm, the level and file of the worst fault, and what becomes of the next
opening. Verifying changes nothing in any of them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from qmq_broker.errors import CorruptionError, LockedError, StoreError, UnknownFormatError
from qmq_broker.service.delivery.snapshot import decode_groups
from qmq_broker.storage import saving
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.disk import OsDisk
from qmq_broker.storage.files.faults import Level
from qmq_broker.storage.files.small_file import unseal
from qmq_broker.storage.files.snapshots import GroupsContent
from qmq_broker.storage.queues.queue_table import QueueTable
from qmq_broker.storage.store import Store
from qmq_broker.storage.upkeep.verify import Verification, verify_store
from qmq_client.wire.checksum import crc32c
from qmq_client.wire.frame import build_message_frame, parse_message_frame
from qmq_client.wire.message_id import MessageIds
from tests.broker.storage.damage_cases import (
    ACTIONS,
    CASES,
    FIRST,
    QUEUE,
    SECOND,
    SEGMENT,
    THIRD,
    Case,
    directory_with_groups,
)
from tests.broker.storage.damaged import Directory, flip
from tests.crash.recording_disk import RecordingDisk
from tests.crash.world import OPTIONS, RETAINING, World, make_frame, records_of
from tests.kit.clock import FakeClock


def check_groups(content: GroupsContent) -> object:
    return decode_groups(content, 0)


def verify(directory: Directory, *, is_deep: bool = False) -> Verification:
    """Verify, and hold it to changing nothing."""
    disk = RecordingDisk(directory.image)
    before = directory.files()
    found = verify_store(disk, FakeClock(), check_groups=check_groups, is_deep=is_deep)
    directory.image = disk.image
    assert directory.files() == before
    assert not disk.operations
    return found


def start(directory: Directory) -> str:
    """What the next opening does: halts, or serves; and whether it made the queues again."""
    try:
        store = Store.open(RecordingDisk(directory.image), FakeClock(), OPTIONS)
    except (CorruptionError, UnknownFormatError):
        return "halts"
    for subject in store.subjects():
        try:
            assert records_of(store, subject) == directory.records[subject]
        except CorruptionError:
            return "refuses pulls"
    return "rebuilds" if store.recovery.is_rebuilt else "serves"


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_B4_every_class_of_damage_is_reported_with_its_file_and_what_a_start_will_do(
    case: Case,
) -> None:
    directory = directory_with_groups()
    if case.start == "halts" and case.file == ACTIONS:
        assert ACTIONS not in directory.files(), "the snapshots let the first segment go"
    case.harm(directory)
    found = verify(directory)
    assert found.worst == case.level, [fault.line() for fault in found.faults]
    if case.file:
        assert case.file in [fault.file for fault in found.faults if fault.level is case.level]
    assert start(directory) == case.start
    for fault in found.faults:
        assert fault.what
        assert fault.meaning.endswith(".")
        assert fault.remedy.endswith(".")
        assert "\n" not in fault.line()


def test_B4_each_altered_bit_of_both_logs_is_found() -> None:
    directory = directory_with_groups()
    last_actions = sorted(path for path in directory.files() if path.startswith("actionlog/"))[-1]
    for path, end in ((FIRST, SEGMENT), (last_actions, 300)):
        original = directory.content(path)
        for position in range(0, min(end, len(original)), 7):
            directory.put(path, flip(position)(original))
            found = verify(directory)
            # Only the fill of padding has no checksum: it is never read.
            padding = path == FIRST and position >= SEGMENT - 200
            assert found.worst is Level.DAMAGED or padding, position
        directory.put(path, original)
    assert verify(directory).worst is None


def test_B4_what_a_hole_took_is_reported_by_sequence() -> None:
    directory = directory_with_groups()
    directory.remove(SECOND)
    lost = [fault.what for fault in verify(directory).faults if "are lost" in fault.what]
    sent = directory.world.history.sent
    within = [one for one in sent if SEGMENT <= one.placed.physical_offset < 2 * SEGMENT]
    for number, subject in enumerate(("orders", "Invoices")):
        places = [
            place for one in within for place in one.placed.places if place.subject == subject
        ]
        first = places[0].first_sequence
        last = places[-1].first_sequence + places[-1].count - 1
        count = last - first + 1
        expected = f"messages of {subject} with sequences {first} to {last} are lost ({count})"
        assert lost[number] == expected


@pytest.mark.parametrize("first", [7, 1], ids=["left out", "given twice"])
def test_B4_a_sequence_that_no_hole_explains_is_reported_as_such_and_stops_the_start(
    first: int,
) -> None:
    world = World(RecordingDisk())
    world.send(world.frame(orders=[10, 20, 30]))
    log = world.store._commit_log.log
    log.append([(world.frame(orders=[40, 50]).data, (first,))])
    log.sync()
    world.disk.unlock()
    disk = RecordingDisk(world.disk.image)
    (fault,) = verify_store(disk, FakeClock(), check_groups=check_groups).faults
    assert (fault.level, fault.file) == (Level.DAMAGED, FIRST)
    assert fault.what == f"sequence {first} of orders, whose next is 3"
    with pytest.raises(CorruptionError, match=f"first sequence {first} of subject orders"):
        Store.open(disk, FakeClock(), OPTIONS)


def test_B4_a_segment_of_an_older_epoch_behind_a_newer_one_is_reported() -> None:
    world = World(RecordingDisk())
    world.disk.unlock()
    world = World(world.disk, history=world.history)
    log = world.store._commit_log.log
    world.send(world.frame(orders=400))
    # A lone record of `orders` costs 126 bytes beside its body, before the fill.
    world.send(world.frame(orders=SEGMENT - log.written_offset - 126))
    assert log.written_offset == SEGMENT
    log._settings = replace(log._settings, epoch=world.store.epoch - 1)
    world.send(world.frame(orders=10))
    world.disk.unlock()
    disk = RecordingDisk(world.disk.image)
    (fault,) = verify_store(disk, FakeClock(), check_groups=check_groups).faults
    assert (fault.level, fault.file) == (Level.DAMAGED, SECOND)
    assert fault.what == "frames of an earlier start (epoch 1) after those of a later one (epoch 2)"


def test_B4_old_damage_that_no_start_reads_is_found_too() -> None:
    """A start reads from its checkpoint on; here the window of ids has passed the damage."""
    world = World(RecordingDisk(), options=RETAINING)
    directory = Directory.__new__(Directory)
    for _ in range(20):
        world.send(world.frame(orders=[100, 200]))
        world.clock.pass_ms(1_500)
        world.store.step()
        world.store.step()
    directory.world, directory.records = world, {"orders": records_of(world.store, "orders")}
    world.store.close()
    directory.image = world.disk.image
    directory.change(FIRST, flip(300))
    found = verify(directory)
    assert found.worst is Level.DAMAGED
    assert "refuses every pull" in found.faults[0].meaning
    assert start(directory) == "refuses pulls"


def test_an_entry_that_points_elsewhere_is_found_although_its_checksum_fits() -> None:
    """Only the commit log can tell: no checksum of the queue does."""
    directory = directory_with_groups()
    directory.change(QUEUE, lambda c: c[20:40] + c[:20] + c[40:])
    content = unseal(directory.content(layout.QUEUE_TABLE))
    assert content is not None
    table = msgspec.msgpack.decode(content, type=QueueTable)
    states = [
        msgspec.structs.replace(state, crcs=(crc32c(directory.content(QUEUE)), *state.crcs[1:]))
        if state.subject == "orders"
        else state
        for state in table.queues
    ]
    altered = msgspec.msgpack.encode(msgspec.structs.replace(table, queues=tuple(states)))
    directory.put(layout.QUEUE_TABLE, altered + b"\ncrc32c %08x\n" % crc32c(altered))
    found = verify(directory)
    assert [(fault.level, fault.file, fault.offset) for fault in found.faults] == [
        (Level.REBUILT, QUEUE, 0)
    ]
    assert "sequence 0 of orders" in found.faults[0].what


def test_deep_finds_a_record_whose_sender_made_a_wrong_checksum() -> None:
    directory = directory_with_groups()
    world = World(RecordingDisk(directory.image), history=directory.world.history)
    record = make_frame(MessageIds(5), {"orders": 20}).record(0)
    frame = parse_message_frame(build_message_frame({"orders": [flip(50)(record)]}))
    placed = world.send(frame)[0]
    world.store.close()
    directory.image = world.disk.image
    assert verify(directory).worst is None
    fault = verify(directory, is_deep=True).faults[0]
    assert (fault.level, fault.offset) == (
        Level.DAMAGED,
        placed.physical_offset + frame.positions[0],
    )
    assert "checksum under subject orders" in fault.what


def test_the_counts_are_those_of_the_store() -> None:
    directory = directory_with_groups()
    found = verify(directory)
    assert found.is_clean
    assert found.subjects == {
        subject: (0, len(records)) for subject, records in directory.records.items()
    }
    commit, actions = found.logs
    assert (commit.frames, commit.next_offset) == (12, directory.next_offset)
    assert actions.next_offset == directory.world.store.actions.log.written_offset
    directory.change(THIRD, lambda c: c[: directory.next_offset % SEGMENT] + b"QMQF torn tail")
    assert verify(directory).logs[0].torn_bytes == len(b"QMQF torn tail")


def test_a_running_broker_is_left_alone(tmp_path: Path) -> None:
    store = Store.open(OsDisk(str(tmp_path)), FakeClock(), OPTIONS)
    with pytest.raises(LockedError, match="in use by pid"):
        verify_store(OsDisk(str(tmp_path)), FakeClock(), check_groups=check_groups)
    store.close()
    assert verify_store(OsDisk(str(tmp_path)), FakeClock(), check_groups=check_groups).is_clean


def test_an_ordinary_folder_is_no_data_directory(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(StoreError, match="not a data directory"):
        verify_store(OsDisk(str(tmp_path)), FakeClock(), check_groups=check_groups)
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


def test_what_an_unfinished_backup_leaves_is_told_from_damage() -> None:
    directory = directory_with_groups()
    directory.remove(layout.FORMAT)
    (fault,) = verify(directory).faults
    assert "(exit code 3). An unfinished backup or restore has none" in fault.line()


def test_queues_that_a_clean_stop_left_in_their_journal_are_no_fault_while_it_is_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(saving, "QUEUES_AT_STOP_MAX", 2)
    world = World(RecordingDisk())
    world.send(world.frame(a=[1], b=[2], c=[3]))
    world.store.close()
    assert layout.QUEUE_TABLE not in world.disk.image.names

    def told() -> list[tuple[Level, str]]:
        found = verify_store(world.disk, FakeClock(), check_groups=check_groups)
        return [(fault.level, fault.file) for fault in found.faults]

    assert told() == []
    for name in world.disk.names(layout.ENTRIES):
        world.disk.unlink(f"{layout.ENTRIES}/{name}")
    assert told() == [(Level.REBUILT, layout.QUEUE_TABLE)]
