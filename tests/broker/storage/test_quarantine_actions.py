"""Damage of the action log, given up by explicit option: groups go back, nothing is lost, nothing skipped."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from qmq_broker.errors import CorruptionError
from qmq_broker.face.exit_codes import ExitCode
from qmq_broker.options import StoreOptions
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.disk import OsDisk
from qmq_broker.storage.store import Store
from qmq_broker.storage.upkeep.quarantine import quarantine_damage
from qmq_broker.storage.upkeep.verify import verify_store
from qmq_client.group.actions import Acked, Action
from tests.broker.service.rig import SUBJECT, Rig
from tests.broker.storage.damage_cases import (
    EMPTY_GROUPS,
    directory_with_groups,
    flip_both_snapshots,
)
from tests.broker.storage.damaged import Directory, flip
from tests.crash.power_cut import cut_states
from tests.crash.recording_disk import Image, RecordingDisk, images
from tests.crash.world import OPTIONS
from tests.kit.broker_process import BrokerProcess
from tests.kit.clock import FakeClock

#: How the header of a padding frame begins.
PADDING = b"QMQF\x01\x05"
Harm = Callable[[Directory], None]


def segments(directory: Directory) -> list[str]:
    return sorted(path for path in directory.files() if path.startswith("actionlog/"))


def at(number: int, position: int) -> Harm:
    return lambda d: d.change(segments(d)[number], flip(position))


def in_two_places(directory: Directory) -> None:
    at(0, 400)(directory)
    at(1, 150)(directory)


HARMS: dict[str, Harm] = {
    "an action": at(1, 150),
    "a header": at(0, 88 + 9),
    "a segment head": at(1, 60),
    "the padding": lambda d: d.change(segments(d)[0], lambda c: flip(c.rfind(PADDING))(c)),
    "a segment that is cut": lambda d: d.change(segments(d)[1], lambda c: c[:300]),
    "an empty segment": lambda d: d.put(segments(d)[1], b""),
    "the first segment": lambda d: d.remove(segments(d)[0]),
    "the last segment": lambda d: d.remove(segments(d)[-1]),
    "everything": lambda d: d.remove(layout.ACTION_LOG),
    "two places": in_two_places,
}


def actions_of(image: Image, options: StoreOptions = OPTIONS) -> list[Action]:
    """What a start makes of it, and that it is whole."""
    disk = RecordingDisk(image)
    store = Store.open(disk, FakeClock(), options)
    found = list(store.actions.replay())
    store.close()
    worst = verify_store(disk, FakeClock(), check_groups=len)
    assert not [fault for fault in worst.faults if fault.level == "damaged"]
    return found


@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
def test_B4_what_stands_before_the_damage_counts_and_nothing_behind_it(harm: Harm) -> None:
    directory = Directory(is_clean=False)
    everything = [action for action, _ in directory.world.history.actions]
    harm(directory)
    before = directory.files()
    directory.refusal()
    disk = RecordingDisk(directory.image)
    reports = quarantine_damage(disk, FakeClock())
    assert [report.log for report in reports] == [layout.ACTION_LOG] * len(reports)
    kept = actions_of(disk.image)
    assert kept == everything[: len(kept)]
    assert len(kept) < len(everything)
    assert quarantine_damage(disk, FakeClock()) == [], "once is enough"
    # Its bytes are kept as they were found.
    (report,) = reports
    raw = {path: disk.open(path) for path in directory_of(disk) if path.endswith(".raw")}
    assert raw
    for path, file in raw.items():
        first, _, next_ = path.rpartition(".raw")[0].rpartition("actionlog.")[2].partition("-")
        base = int(first) - int(first) % OPTIONS.action_segment_bytes
        found = before.get(layout.segment_path(layout.ACTION_LOG, base), b"")
        part = found[int(first) - base : int(next_) - base]
        assert file.read(0, file.length()) == part
        assert report.first_offset <= int(first) < report.next_offset


def directory_of(disk: RecordingDisk) -> list[str]:
    return [f"{layout.QUARANTINE}/{name}" for name in disk.names(layout.QUARANTINE)]


def test_B4_damage_below_the_snapshot_changes_nothing() -> None:
    directory = directory_with_groups()
    store = directory.open()
    expected, offset = list(store.actions.replay()), store.actions.snapshot_offset
    store.close()
    base = offset - offset % OPTIONS.action_segment_bytes
    assert offset - base > 200
    path = layout.segment_path(layout.ACTION_LOG, base)
    directory = directory_with_groups()
    directory.change(path, flip(150))
    directory.refusal()
    disk = RecordingDisk(directory.image)
    (report,) = quarantine_damage(disk, FakeClock())
    assert report.next_offset <= offset
    assert actions_of(disk.image) == expected


#: One segment for many lives.
LONG = replace(OPTIONS, action_segment_bytes=8192)


class Lived(NamedTuple):
    """An action log of three lives, a snapshot at the end of each of the first two."""

    disk: RecordingDisk
    everything: list[Action]
    #: Where the frames of each life begin.
    offsets: list[list[int]]
    #: Where the newest snapshot ends.
    snapshot_offset: int


def three_lives() -> Lived:
    disk, everything, offsets, snapshot_offset = RecordingDisk(), list[Action](), [], 0
    for life in range(3):
        store = Store.open(disk, FakeClock(), LONG)
        offsets.append(list[int]())
        for _ in range(5):
            number = len(everything)
            offsets[-1].append(store.actions.log.written_offset)
            everything.append(Acked(1, "orders", "billing", "one", number, number + 1))
            store.actions.append(everything[-1:])
        if life < 2:
            snapshot_offset = store.actions.log.written_offset
            store.actions.write_snapshot(snapshot_offset, EMPTY_GROUPS)
        store.close()
    return Lived(disk, everything, offsets, snapshot_offset)


def change(disk: RecordingDisk, path: str, position: int) -> None:
    number = disk.image.names[path]
    assert number is not None
    inode = disk.image.inodes[number]
    inode.durable = flip(position)(inode.seen)
    inode.versions.clear()


@pytest.mark.parametrize("life", [0, 1])
def test_B4_damage_below_the_snapshot_changes_nothing_whatever_life_it_is_of(life: int) -> None:
    lived = three_lives()
    path = layout.segment_path(layout.ACTION_LOG, 0)
    change(lived.disk, path, lived.offsets[life][2] + 70)
    (report,) = quarantine_damage(lived.disk, FakeClock())
    assert (report.first_offset, report.next_offset) == tuple(lived.offsets[life][2:4])
    assert actions_of(lived.disk.image, LONG) == lived.everything[10:]
    assert quarantine_damage(lived.disk, FakeClock()) == [], "once is enough"


@pytest.mark.parametrize("path", layout.SNAPSHOTS)
def test_B4_no_snapshot_continues_through_damage_that_was_covered_below_a_newer_one(
    path: str,
) -> None:
    lived = three_lives()
    change(lived.disk, layout.segment_path(layout.ACTION_LOG, 0), lived.offsets[1][2] + 70)
    assert quarantine_damage(lived.disk, FakeClock())
    change(lived.disk, path, 9)
    assert actions_of(lived.disk.image, LONG) == lived.everything[10:]


def test_B4_a_power_cut_while_old_actions_are_covered_leaves_no_snapshot_that_lacks_them() -> None:
    lived = three_lives()
    change(lived.disk, layout.segment_path(layout.ACTION_LOG, 0), lived.offsets[1][2] + 70)
    lived.disk.image.durable_names = dict(lived.disk.image.names)
    disk = RecordingDisk(lived.disk.image)
    quarantine_damage(disk, FakeClock())
    rng = random.Random(5)
    outcomes = {"halts": 0, "whole": 0}
    for _, image in images(disk.first_image, disk.operations):
        for state in cut_states(image, rng, scattered=2):
            for path in layout.SNAPSHOTS:
                hurt = RecordingDisk(state.copy())
                change(hurt, path, 9)
                try:
                    assert actions_of(hurt.image, LONG) == lived.everything[10:]
                    outcomes["whole"] += 1
                except CorruptionError:
                    outcomes["halts"] += 1
    assert min(outcomes.values()) > 3


@pytest.mark.parametrize("how", ["altered", "cut", "gone"])
def test_B4_damage_from_below_the_snapshot_to_beyond_it_leaves_the_groups_as_they_were_noted(
    how: str,
) -> None:
    directory = directory_with_groups()
    store = directory.open()
    offset, end = store.actions.snapshot_offset, store.actions.log.written_offset
    assert list(store.actions.replay())
    store.close()
    base = offset - offset % OPTIONS.action_segment_bytes
    path = layout.segment_path(layout.ACTION_LOG, base)
    directory = directory_with_groups()
    begin = offset - base - 20
    changes: dict[str, Callable[[bytes], bytes]] = {
        "altered": lambda c: c[:begin] + b"\xff" * 40 + c[begin + 40 :],
        "cut": lambda c: c[:begin],
    }
    if how in changes:
        directory.change(path, changes[how])
    else:
        directory.remove(path)
    directory.refusal()
    disk = RecordingDisk(directory.image)
    (report,) = quarantine_damage(disk, FakeClock())
    assert report.first_offset < offset < report.next_offset == end
    assert actions_of(disk.image) == []
    assert quarantine_damage(disk, FakeClock()) == []


def test_B4_without_a_snapshot_and_a_beginning_all_groups_begin_again() -> None:
    directory = directory_with_groups()
    flip_both_snapshots(directory)
    if segments(directory)[0] == layout.segment_path(layout.ACTION_LOG, 0):
        directory.remove(segments(directory)[0])
    directory.refusal()
    disk = RecordingDisk(directory.image)
    assert quarantine_damage(disk, FakeClock())
    assert actions_of(disk.image) == []
    assert quarantine_damage(disk, FakeClock()) == []


@pytest.mark.parametrize("name", ["an action", "a header", "an empty segment", "two places"])
def test_B4_a_power_cut_anywhere_in_it_never_lets_the_log_continue_behind_the_damage(
    name: str,
) -> None:
    directory = Directory(is_clean=False)
    everything = [action for action, _ in directory.world.history.actions]
    HARMS[name](directory)
    directory.image.durable_names = dict(directory.image.names)
    disk = RecordingDisk(directory.image)
    quarantine_damage(disk, FakeClock())
    expected = actions_of(disk.image)
    assert expected == everything[: len(expected)]
    rng = random.Random(3)
    outcomes = {"halts": 0, "whole": 0}
    for _, image in images(disk.first_image, disk.operations):
        for state in cut_states(image, rng, scattered=2):
            try:
                assert actions_of(RecordingDisk(state).image) == expected
                outcomes["whole"] += 1
            except CorruptionError:
                outcomes["halts"] += 1
            again = RecordingDisk(state)
            quarantine_damage(again, FakeClock())
            found = actions_of(again.image)
            assert found == everything[: len(found)]
            assert len(found) <= len(expected)
    assert outcomes["halts"] > 10


def test_B4_consumers_get_again_what_was_settled_behind_the_damage(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "data")
    for number in range(6):
        rig.send(b"%d" % number)
    offsets = []
    for _ in range(3):
        given = rig.pull(max_messages=2)
        offsets.append(rig.store.actions.log.written_offset)
        rig.settle(given.ack((given.part(0)[0], given.part(1)[1])))
    rig.close()
    path = tmp_path / "data" / "actionlog" / f"{0:020d}"
    content = bytearray(path.read_bytes())
    content[offsets[0] + 90] ^= 1  # the first ack
    path.write_bytes(content)
    with pytest.raises(CorruptionError):
        rig.start()
    assert BrokerProcess(rig.directory).run_to_end() == ExitCode.CORRUPTION
    disk = OsDisk(str(rig.directory))
    (report,) = quarantine_damage(disk, rig.clock)
    assert report.first_offset == offsets[0]
    rig.start()
    sequences: list[int] = []
    for _ in range(5):
        rig.pass_ms(100_000)
        while (given := rig.pull()).bodies:
            sequences += given.sequences
            rig.settle(given.ack((given.part(0)[0], given.part(len(given.bodies) - 1)[1])))
    assert sorted(sequences) == [0, 1, 2, 3, 4, 5], f"all of {SUBJECT} comes again, once"
    rig.close()
