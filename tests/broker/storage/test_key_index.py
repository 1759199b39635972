"""The key index: everything is in it, it survives restarts, harm is mended, and bounds hold."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from qmq_broker.errors import DiskError
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.faults import Level
from qmq_broker.storage.index import key_index
from qmq_broker.storage.index.key_index import IndexTable
from qmq_broker.storage.logs.frame_seek import LogRange
from qmq_broker.storage.store import Store
from qmq_broker.storage.upkeep.inspect_files import sealed_array
from qmq_broker.storage.upkeep.verify import verify_store
from qmq_client.wire.message_id import dedupe_message_id
from tests.broker.storage.damaged import flip
from tests.broker.storage.keyed import INDEXED, Keyed, catch_up, check_answers
from tests.crash.recording_disk import RecordingDisk, images
from tests.kit.clock import FakeClock

MIXED: tuple[tuple[str | None, ...], ...] = (
    ("a", "b", "a"),
    (None,),
    ("a",),
    (None, "c", None, None),
    ("b", "b", "b"),
    ("d",),
    ("a", None),
)


def filled(world: Keyed | None = None) -> Keyed:
    """Messages of two subjects with the same keys, over several segments and index files."""
    world = Keyed() if world is None else world
    for keys in MIXED:
        world.send(*keys)
        world.send(*keys, subject="invoices", room=200)
    return world


def indexed_everything(store: Store) -> bool:
    return store.index.indexed_offset == store.durable_offset


def index_files(disk: RecordingDisk) -> list[str]:
    return [layout.index_path(name) for name in disk.names(layout.INDEX)]


def test_every_message_is_found_by_id_and_by_key() -> None:
    world = filled()
    world.catch_up()
    assert indexed_everything(world.store)
    assert len(world.store.index.files()) > 5
    check_answers(world.store, world.kept)


def test_everything_is_found_before_the_index_has_begun_and_at_each_step() -> None:
    world = filled()
    assert world.store.index.indexed_offset == 0
    check_answers(world.store, world.kept)
    while world.store.index.step(1).is_unfinished:
        check_answers(world.store, world.kept)
    assert indexed_everything(world.store)


def test_a_step_is_bounded_by_its_bytes() -> None:
    world = filled()
    assert world.store.index.step(1).messages == 0  # the head of the segment
    steps = [world.store.index.step(1) for _ in range(len(MIXED))]
    assert [step.messages for step in steps][:3] == [3, 3, 1]
    assert all(step.log_bytes < 2_500 for step in steps)


def test_frames_of_lone_messages_are_read_together() -> None:
    """Each read lets go of the interpreter, which an answer then has to wait for."""
    world = Keyed(options=replace(INDEXED, index_entries=1_000, segment_bytes=1024 * 1024))
    for _ in range(100):
        world.send("a")
    world.store.index.step(1)  # prepares
    reads = world.disk.calls["read"]
    assert world.store.index.step(128 * 1024).messages == 100
    assert world.disk.calls["read"] - reads <= 2


def test_a_message_stored_twice_is_found_twice() -> None:
    world = Keyed()
    (first,) = world.send("a")
    for _ in range(3):
        world.send(*(None,) * 6)  # the window forgets the first one
    world.send("a", ids=[first.message_id])
    world.catch_up()
    found = world.store.search.by_id(first.message_id, 10).found
    assert [one.sequence for one in found] == [19, 0]


def test_ids_made_of_dedupe_keys_and_of_several_producers_are_found() -> None:
    world = Keyed(options=replace(INDEXED, index_entries=40))
    ids = [dedupe_message_id("orders", str(number)) for number in range(20)]
    edge = (2**64 - 2).to_bytes(8)
    ids += [(5).to_bytes(8) + edge, (5).to_bytes(8) + b"\xff" * 8, (6).to_bytes(8) + bytes(8)]
    world.send(*(None,) * len(ids), ids=ids)
    world.catch_up()
    check_answers(world.store, world.kept)


@pytest.mark.parametrize("index_entries", [1, 2, 8, 50, 1_000])
def test_a_kill_costs_only_what_is_indexed_again(index_entries: int) -> None:
    world = filled(Keyed(options=replace(INDEXED, index_entries=index_entries)))
    world.catch_up()
    for _ in range(3):
        world = world.again()
        check_answers(world.store, world.kept, is_complete=None)
        world.send("a", "e")
        world.catch_up()
        check_answers(world.store, world.kept)


def test_a_clean_stop_leaves_nothing_to_be_indexed_again() -> None:
    world = filled()
    world.catch_up()
    before = world.store.durable_offset
    world.store.close()
    world = world.again()
    assert not world.store.index.step(1).messages
    assert world.store.index.indexed_offset == before
    world.send("a")
    assert world.store.index.step(10_000).messages == 1
    world.catch_up()
    check_answers(world.store, world.kept)


HARM: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda c: b"",
    "one byte short": lambda c: c[:-1],
    "an entry short": lambda c: c[:-20],
    "another magic": flip(0),
    "another header": flip(19),
    "a slot altered": flip(43),
    "an entry altered": flip(60),
    "the last byte altered": flip(-1),
    "zeros": lambda c: bytes(len(c)),
    "ones": lambda c: b"\xff" * len(c),
    "two entries swapped": lambda c: c[:-40] + c[-20:] + c[-40:-20],
}


@pytest.mark.parametrize("harm", HARM.values(), ids=HARM)
def test_B11_an_index_file_that_is_wrong_is_made_again(harm: Callable[[bytes], bytes]) -> None:
    world = filled()
    world.catch_up()
    world.store.close()
    paths = [*index_files(world.disk), layout.INDEX_TABLE]
    assert len(paths) > 5
    for path in paths:
        disk = RecordingDisk(world.disk.image)
        number = disk.image.names[path]
        assert number is not None
        disk.image.inodes[number].durable = harm(disk.image.inodes[number].seen)
        disk.image.inodes[number].versions.clear()
        store = Store.open(disk, FakeClock(), INDEXED)
        for one in world.kept:  # nothing false, and nothing that is said to be all
            result = store.search.by_id(one.message_id, 10)
            assert result.found == [one.place] or not result.is_complete
        catch_up(store)
        assert indexed_everything(store)
        check_answers(store, world.kept)


def test_B11_index_files_that_are_deleted_are_made_again_alone() -> None:
    world = filled()
    world.catch_up()
    world.store.close()
    for path in index_files(world.disk):
        disk = RecordingDisk(world.disk.image)
        disk.image.name(path, -1)
        store = Store.open(disk, FakeClock(), INDEXED)
        others = {file.name for file in store.index.files()} - {path.rpartition("/")[2]}
        catch_up(store)
        assert indexed_everything(store)
        assert others <= {file.name for file in store.index.files()}
        check_answers(store, world.kept)


def test_B11_the_whole_index_may_be_deleted() -> None:
    world = filled()
    world.catch_up()
    world.store.close()
    disk = RecordingDisk(world.disk.image)
    for path in [*index_files(disk), layout.INDEX_TABLE, layout.INDEX]:
        disk.image.name(path, -1)
    store = Store.open(disk, FakeClock(), INDEXED)
    check_answers(store, world.kept)
    catch_up(store)
    check_answers(store, world.kept)


def test_a_damaged_chain_is_found_by_the_search_that_meets_it() -> None:
    world = filled()
    world.catch_up()
    file = next(file for file in world.store.index.files() if file.is_sealed)
    number = world.disk.image.names[file.path]
    assert number is not None
    inode = world.disk.image.inodes[number]
    inode.versions.append(inode.seen[:40] + b"\xff" * (len(inode.seen) - 40))
    wanted = next(one for one in world.kept if one.place.physical_offset > file.first_offset)
    assert not world.store.search.by_id(wanted.message_id, 10).is_complete
    world.catch_up()
    assert file not in world.store.index.files()
    check_answers(world.store, world.kept)


def test_files_that_the_table_does_not_know_go_and_foreign_ones_stay() -> None:
    world = filled()
    world.catch_up()
    world.store.close()
    orphan, foreign = layout.index_path("2" * 17), f"{layout.INDEX}/notes.txt"
    for path in (orphan, foreign):
        world.disk.open(path, is_new=True).write(0, [b"x"])
    world = world.again()
    world.catch_up()
    names = world.disk.names(layout.INDEX)
    assert "2" * 17 not in names
    assert "notes.txt" in names
    assert sorted(file.name for file in world.store.index.files()) == names[:-1]
    check_answers(world.store, world.kept)


def test_files_below_the_beginning_of_the_log_go() -> None:
    world = filled()
    for _ in range(8):
        world.send("z", room=400)
        world.clock.pass_ms(2_000)
        world.store.step()
    world.catch_up()
    before = len(index_files(world.disk))
    assert world.store.give_up_below(world.store.written_offset) > 0
    check_answers(world.store, world.kept)
    world.catch_up()
    assert len(index_files(world.disk)) < before
    assert indexed_everything(world.store)
    check_answers(world.store, world.kept)
    world = world.again()
    world.catch_up()
    check_answers(world.store, world.kept)


def test_a_kill_between_the_removal_of_an_index_file_and_its_note_is_no_alarm(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = filled()
    world.catch_up()
    world.store.index.note()
    for _ in range(8):
        world.send("z", room=400)
        world.clock.pass_ms(2_000)
        world.store.step()
    known = set(index_files(world.disk))
    assert world.store.give_up_below(world.store.written_offset) > 0
    world.store.index.step(1)
    gone = known - set(index_files(world.disk))
    assert max(known) in gone, "the growing one too"
    world.disk.unlock()
    found = verify_store(world.disk, FakeClock(), check_groups=len)
    levels = {fault.file: fault.level for fault in found.faults if fault.file in gone}
    assert levels == dict.fromkeys(gone, Level.IGNORED)
    caplog.set_level(logging.INFO)
    world = world.again()
    world.catch_up()
    assert [one for one in caplog.records if one.levelno >= logging.WARNING] == []
    assert indexed_everything(world.store)
    check_answers(world.store, world.kept)


def test_B11_an_index_of_more_log_than_there_is_counts_for_nothing() -> None:
    """As when an older copy of the logs was put back beside it."""
    world = filled()
    older, kept = world.disk.image.copy(), list(world.kept)
    filled(world)
    world.catch_up()
    world.store.close()
    newer = world.disk.image
    for number, path in enumerate([*index_files(world.disk), layout.INDEX_TABLE], start=10_000):
        inode = newer.names[path]
        assert inode is not None
        older.names[path], older.inodes[number] = number, newer.inodes[inode]
    world = Keyed(RecordingDisk(older), kept=kept, instance=100)
    for _ in range(9):
        world.send("a", "b")
    world.catch_up()
    assert indexed_everything(world.store)
    check_answers(world.store, world.kept)


def test_the_log_may_begin_behind_an_index_that_lags() -> None:
    world = filled()
    world.store.index.step(500)
    for _ in range(8):
        world.send("z", room=400)
        world.clock.pass_ms(2_000)
        world.store.step()
    assert world.store.give_up_below(world.store.written_offset) > 0
    world.catch_up()
    assert indexed_everything(world.store)
    check_answers(world.store, world.kept)


def test_the_oldest_of_too_many_files_go_and_are_not_made_again() -> None:
    world = filled(Keyed(options=replace(INDEXED, index_files=3)))
    world.catch_up()
    assert len(world.store.index.files()) <= 4
    assert world.store.index.gaps(LogRange(0, world.store.durable_offset))
    check_answers(world.store, world.kept)  # by looking through the rest


def test_a_kill_while_the_oldest_of_too_many_files_go_leaves_no_table_that_names_them() -> None:
    world = filled(Keyed(options=replace(INDEXED, index_files=2)))
    world.catch_up()
    tables = 0
    for _, image in images(world.disk.first_image, world.disk.operations):
        disk = RecordingDisk(image)
        table, _ = sealed_array(disk, layout.INDEX_TABLE, IndexTable)
        if table is not None:
            tables += 1
            assert {state.name for state in table.files} <= set(disk.names(layout.INDEX))
    assert tables > 10


def test_a_lost_file_is_made_again_and_what_went_for_their_number_is_not() -> None:
    world = filled(Keyed(options=replace(INDEXED, index_files=3)))
    world.catch_up()
    world.store.index.note()
    newest = world.store.index.files()[-1]
    world.disk.unlink(newest.path)
    world = world.again()
    lost = LogRange(newest.first_offset, world.store.durable_offset)
    steps = [world.store.index.step(1) for _ in range(len(MIXED))]
    assert sum(step.log_bytes for step in steps) <= lost.length
    assert not world.store.index.gaps(lost)


def test_without_entries_there_is_no_index_and_everything_is_looked_through() -> None:
    world = filled(Keyed(options=replace(INDEXED, index_entries=0)))
    world.catch_up()
    assert not index_files(world.disk)
    check_answers(world.store, world.kept)


def test_a_full_disk_makes_the_index_wait_and_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    world = filled()
    monkeypatch.setattr(key_index, "TAIL_BYTES_MAX", 1)
    full = world.disk.capacity_bytes - world.disk.free_bytes()
    used = sum(
        len(world.disk.image.inodes[number].seen)
        for number in world.disk.image.names.values()
        if number is not None
    )
    world.disk.capacity_bytes = full + used
    assert not any(world.store.index.step(200).is_unfinished for _ in range(3))
    check_answers(world.store, world.kept)
    assert not world.store.index.fault
    world.disk.capacity_bytes = 2**40
    world.catch_up()
    assert indexed_everything(world.store)
    check_answers(world.store, world.kept)


class FailingDisk(RecordingDisk):
    """Fails calls on files of the index."""

    fails = ""

    def perform(self, call: str, path: str, operation: Any) -> None:
        if call == self.fails and path.startswith((layout.INDEX, layout.INDEX_TABLE)):
            raise DiskError(operation=call, path=path, reason="planted")
        super().perform(call, path, operation)


@pytest.mark.parametrize("call", ["open", "write", "sync", "rename", "sync_directory"])
def test_a_disk_that_fails_the_index_fails_nothing_else(call: str) -> None:
    disk = FailingDisk()
    world = Keyed(disk)
    disk.fails = call
    filled(world)
    world.catch_up()
    assert "planted" in world.store.index.fault
    check_answers(world.store, world.kept)
    world.send("a")
    world.store.close()
    disk.fails = ""
    world = world.again()
    assert world.store.recovery.clean
    world.catch_up()
    check_answers(world.store, world.kept)
