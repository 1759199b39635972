"""Backups: taken while the store is written, whole or not taken for one, independent of what follows."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from qmq_broker.errors import CorruptionError, StoreError, UnknownFormatError
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.disk import OsDisk, link_file
from qmq_broker.storage.files.faults import Level
from qmq_broker.storage.files.os_file import OsFile
from qmq_broker.storage.store import Store
from qmq_broker.storage.upkeep.backup import EPOCH_STEP, back_up
from qmq_broker.storage.upkeep.quarantine import quarantine_damage
from qmq_broker.storage.upkeep.verify import verify_store
from tests.broker.storage.damaged import Directory, flip
from tests.crash.power_cut import cut_states
from tests.crash.recording_disk import RecordingDisk, RecordingFile, RecordingLock, images
from tests.crash.world import OPTIONS, RETAINING, World, records_of
from tests.kit.clock import FakeClock

Messages = dict[str, list[bytes]]


def never(path: str) -> bool:
    return False


def messages(store: Store) -> Messages:
    return {subject: records_of(store, subject) for subject in store.subjects()}


def live(*, is_retaining: bool = False) -> World:
    """A store that is being written: sealed segments, actions, something not yet synced."""
    world = World(RecordingDisk(), options=RETAINING if is_retaining else OPTIONS)
    for round_ in range(14):
        world.send(world.frame(orders=[100, 200 + round_], invoices=30))
        world.act(3)
        world.clock.pass_ms(600)
        world.store.step()
        if round_ in (4, 8):
            world.note_groups()
        if is_retaining and round_ == 11:
            assert world.give_up() > 0
    world.append(world.frame(orders=40))
    return world


def copied(source: RecordingDisk) -> RecordingDisk:
    target = RecordingDisk()
    back_up(source, target, FakeClock(), link=never)
    return target


@pytest.mark.parametrize("is_retaining", [False, True])
def test_X3_a_backup_of_a_running_store_opens_with_everything_acknowledged(
    is_retaining: bool,
) -> None:
    world = live(is_retaining=is_retaining)
    acknowledged = messages(world.store)
    actions = [action for action, _ in world.history.actions]
    target = copied(world.disk)
    found = verify_store(target, FakeClock(), check_groups=len)
    assert found.faults == []
    store = Store.open(target, FakeClock(), world.options)
    for subject, records in acknowledged.items():
        queue = world.store.queue(subject)
        copy = store.queue(subject)
        assert copy is not None
        assert queue is not None
        assert copy.first_sequence == queue.first_sequence
        assert records_of(store, subject)[: len(records)] == records
    noted = int(store.actions.snapshot.groups if store.actions.snapshot else b"0")
    assert actions[noted:] == list(store.actions.replay())
    assert store.epoch > world.store.epoch + EPOCH_STEP, "no hand-out has two meanings"
    # The original goes on as if nothing had been.
    world.sync()
    world.send(world.frame(orders=[1, 2]))


def test_X3_the_ids_of_a_backup_are_known_again() -> None:
    """What is sent once more after a restore is stored once; what came after the backup is new."""
    world = live()
    world.sync()
    target = copied(world.disk)
    late = world.frame(orders=[77])
    world.send(late)
    store = Store.open(target, FakeClock(), OPTIONS)
    again = [one.frame for one in world.history.sent]
    placed = store.append(again)
    assert [place.duplicates for place in placed[:-1]] == [
        frame.header.record_count for frame in again[:-1]
    ]
    assert placed[-1].duplicates == 0
    store.commit_and_step()
    assert messages(store) == messages(world.store)


def test_B3_a_half_made_backup_is_never_taken_for_a_whole_one() -> None:
    """Every state a power cut may leave: refused, or empty, or whole."""
    world = live()
    world.sync()
    expected = messages(world.store)
    target = copied(world.disk)
    rng = random.Random(9)
    outcomes = {"refused": 0, "empty": 0, "whole": 0}
    for _, image in images(target.first_image, target.operations):
        for state in cut_states(image, rng, scattered=3):
            there = set(state.names) - {layout.LOCK}
            try:
                store = Store.open(RecordingDisk(state), FakeClock(), OPTIONS)
            except UnknownFormatError:
                outcomes["refused"] += 1
                continue
            if there:
                assert messages(store) == expected
                outcomes["whole"] += 1
            else:
                outcomes["empty"] += 1
    assert outcomes["refused"] > 100
    assert outcomes["whole"] > 0


def test_a_backup_of_a_backup_is_a_backup() -> None:
    world = live()
    world.sync()
    first = copied(world.disk)
    second = copied(RecordingDisk(first.image))
    assert messages(Store.open(second, FakeClock(), OPTIONS)) == messages(world.store)


@pytest.mark.parametrize("place", ["tail", "actions", "missing", "FORMAT", "retained"])
def test_B4_a_damaged_store_is_not_backed_up_as_if_it_were_whole(place: str) -> None:
    directory = Directory(is_clean=True)
    tail = max(path for path in directory.files() if path.startswith("commitlog/"))
    actions = max(path for path in directory.files() if path.startswith("actionlog/"))
    harms: dict[str, Callable[[], None]] = {
        "tail": lambda: directory.change(tail, flip(120)),
        "actions": lambda: directory.change(actions, flip(120)),
        "missing": lambda: directory.remove(layout.segment_path(layout.COMMIT_LOG, 2048)),
        "FORMAT": lambda: directory.change(layout.FORMAT, flip(9)),
        "retained": lambda: _add(directory, layout.RETAINED),
    }
    harms[place]()
    target = RecordingDisk()
    with pytest.raises(CorruptionError):
        back_up(RecordingDisk(directory.image), target, FakeClock(), link=never)
    assert layout.FORMAT not in target.image.names


def _add(directory: Directory, path: str) -> None:
    disk = RecordingDisk(directory.image)
    disk.open(path, is_new=True).write(0, [b"nonsense"])
    directory.image = disk.image


def test_what_is_no_store_or_no_empty_directory_is_refused() -> None:
    world = live()
    with pytest.raises(StoreError, match="FORMAT is missing"):
        back_up(RecordingDisk(), RecordingDisk(), FakeClock(), link=never)
    taken = RecordingDisk()
    taken.open("letter.txt", is_new=True)
    with pytest.raises(StoreError, match=r"not empty: there is letter\.txt"):
        back_up(world.disk, taken, FakeClock(), link=never)


class Meddled(RecordingDisk):
    """A disk of a running store: something happens just when a backup opens a certain file."""

    def __init__(self, disk: RecordingDisk) -> None:
        self.__dict__.update(disk.__dict__)
        self.meddle: Callable[[], object] | None = None
        self.log = ""
        #: It happens when the file is open, and not read yet.
        self.is_after = False

    def open(self, path: str, *, is_new: bool = False) -> RecordingFile:
        file = super().open(path, is_new=is_new) if self.is_after else None
        if self.meddle is not None and path.startswith(f"{self.log}/"):
            meddle, self.meddle = self.meddle, None
            meddle()
        return file or super().open(path, is_new=is_new)


def test_X3_two_backups_into_one_directory_do_not_mix() -> None:
    class Slow(RecordingDisk):
        """Where another backup is made, and is done, just before this one has the lock."""

        def lock(self, path: str, holder: str) -> RecordingLock:
            if layout.FORMAT not in self.names(layout.ROOT):
                quick = RecordingDisk(self.image)
                back_up(older, quick, FakeClock(), link=never)
                self.image = quick.image
            return super().lock(path, holder)

    older = live().disk
    target = Slow()
    with pytest.raises(StoreError, match="not empty"):
        back_up(live().disk, target, FakeClock(), link=never)
    assert verify_store(target, FakeClock(), check_groups=len).faults == []


def test_X3_old_segments_may_go_while_they_are_copied() -> None:
    world = World(Meddled(RecordingDisk()), options=RETAINING)
    disk = world.disk
    assert isinstance(disk, Meddled)
    for _ in range(14):
        world.send(world.frame(orders=[300, 200]))
        world.clock.pass_ms(1_500)
        world.store.step()
        world.store.step()
    disk.log, disk.meddle = layout.COMMIT_LOG, world.give_up
    target = copied(disk)
    assert world.store.first_offset > 0
    assert verify_store(target, FakeClock(), check_groups=len).faults == []
    store = Store.open(target, FakeClock(), RETAINING)
    assert store.first_offset == world.store.first_offset
    assert messages(store) == messages(world.store)


def test_X3_a_segment_that_is_written_over_while_it_is_copied_is_not_in_the_copy() -> None:
    world = World(Meddled(RecordingDisk()), options=LINKING)
    disk = world.disk
    assert isinstance(disk, Meddled)
    for _ in range(12):
        _send_one(world)

    def recycle_the_first() -> None:
        assert world.store.give_up_below(LINKING.segment_bytes) == LINKING.segment_bytes
        for _ in range(8):
            _send_one(world)
        written_over.append(first_file.read(0, LINKING.segment_bytes) != first_content)

    written_over: list[bool] = []
    first_file = disk.open(layout.segment_path(layout.COMMIT_LOG, 0))
    first_content = first_file.read(0, LINKING.segment_bytes)
    disk.log, disk.meddle, disk.is_after = layout.COMMIT_LOG, recycle_the_first, True
    target = copied(disk)
    assert written_over == [True]
    assert verify_store(target, FakeClock(), check_groups=len).faults == []
    store = Store.open(target, FakeClock(), LINKING)
    assert store.first_offset == LINKING.segment_bytes
    assert messages(store) == messages(world.store)


def test_X3_the_action_log_may_lose_its_beginning_while_it_is_copied() -> None:
    world = World(Meddled(RecordingDisk()))
    disk = world.disk
    assert isinstance(disk, Meddled)

    def note() -> None:
        for _ in range(2):
            world.act(20)
            world.note_groups()

    note()
    world.act(15)
    disk.log, disk.meddle = layout.ACTION_LOG, note
    store = Store.open(copied(disk), FakeClock(), OPTIONS)
    noted = int(store.actions.snapshot.groups if store.actions.snapshot else b"0")
    actions = [action for action, _ in world.history.actions]
    assert actions[noted:] == list(store.actions.replay())
    assert noted >= 40


LINKING = replace(RETAINING, spare_segments=2, growth_bytes=2048)


def _linked(tmp_path: Path) -> tuple[World, OsDisk, Messages]:
    """A store on the machine's disk, its backup by links, and what was acknowledged before."""
    source, target = OsDisk(str(tmp_path / "data")), OsDisk(str(tmp_path / "copy"))
    world = World.__new__(World)
    made = World(RecordingDisk(), options=LINKING)
    world.__dict__.update(made.__dict__)
    world.store = Store.open(source, world.clock, LINKING)
    for _ in range(12):
        _send_one(world)
    before = messages(world.store)
    made_backup = back_up(
        source, target, FakeClock(), link=lambda path: link_file(source, path, target)
    )
    assert made_backup.linked_segments >= 3
    return world, target, before


def _send_one(world: World) -> None:
    world.store.append([world.frame(orders=[300, 200])])
    world.store.commit_and_step()
    world.clock.pass_ms(1_500)
    world.store.step()
    world.store.step()


def _recycle(world: World) -> None:
    """Give old segments up and write over them."""
    assert world.store.give_up_below(world.store.written_offset) > 0
    for _ in range(12):
        _send_one(world)


def test_X3_what_the_broker_recycles_is_not_written_over_in_the_backup(tmp_path: Path) -> None:
    world, target, before = _linked(tmp_path)
    _recycle(world)
    world.store.close()
    assert verify_store(target, FakeClock(), check_groups=len).faults == []
    store = Store.open(target, FakeClock(), LINKING)
    assert messages(store) == before
    store.close()


def test_X3_without_that_care_the_backup_would_be_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above is able to fail: here is the bug that it must find."""
    monkeypatch.setattr(OsFile, "links", lambda file: 1)
    world, target, _ = _linked(tmp_path)
    _recycle(world)
    world.store.close()
    assert verify_store(target, FakeClock(), check_groups=len).worst is Level.DAMAGED


def test_X3_B4_what_is_given_up_in_one_of_both_is_still_told_as_damage_in_the_other(
    tmp_path: Path,
) -> None:
    world, target, _ = _linked(tmp_path)
    world.store.close()
    path = layout.segment_path(layout.COMMIT_LOG, LINKING.segment_bytes)
    data, copy = tmp_path / "data" / path, tmp_path / "copy" / path
    assert data.samefile(copy)
    with data.open("r+b") as file:  # a block of the disk, under both names
        file.seek(700)
        file.write(b"damage")
    found = copy.read_bytes()
    source = OsDisk(str(tmp_path / "data"))
    (report,) = quarantine_damage(source, FakeClock())
    assert [run.subject for run in report.lost] == ["orders"]
    assert verify_store(source, FakeClock(), check_groups=len).worst is not Level.DAMAGED
    assert copy.read_bytes() == found
    assert verify_store(target, FakeClock(), check_groups=len).worst is Level.DAMAGED
    assert sorted(one.name for one in data.parent.iterdir() if not one.name.isdigit()) == []


def test_X3_a_broker_on_the_backup_leaves_the_original_alone(tmp_path: Path) -> None:
    world, target, before = _linked(tmp_path)
    copy = World(RecordingDisk(), options=LINKING)
    copy.store = Store.open(target, copy.clock, LINKING)
    for _ in range(12):
        _send_one(copy)
    _recycle(copy)
    copy.store.close()
    assert messages(world.store) == before
    world.store.close()
    data = OsDisk(str(tmp_path / "data"))
    assert verify_store(data, FakeClock(), check_groups=len).faults == []
