"""Damage where delayed messages stand: what a quarantine keeps, what is made again, what is lost."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qmq_broker.storage.files import layout
from qmq_broker.storage.files.disk import OsDisk
from qmq_broker.storage.upkeep.quarantine import quarantine_damage
from qmq_broker.storage.upkeep.quarantine_report import QuarantineReport, read_reports
from qmq_broker.storage.upkeep.verify import verify_store
from tests.broker.delay.delay_rig import HOUR_MS, DelayRig
from tests.broker.delay.test_backup_and_damage import waiting
from tests.broker.service.rig import SUBJECT
from tests.kit.clock import FakeClock

RARELY: dict[str, Any] = {"queue_flush_bytes": 2**30}


def quarantine(directory: Path) -> list[QuarantineReport]:
    disk = OsDisk(str(directory))
    reports = quarantine_damage(disk, FakeClock())
    found = verify_store(disk, FakeClock(), check_groups=len)
    disk.close()
    assert not [fault.line() for fault in found.faults if fault.level == "damaged"]
    return reports


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def damage_log(rig: DelayRig, offset: int) -> None:
    """Damage the frame at `offset`, and let the next start read it."""
    flip(rig.directory / "commitlog" / f"{0:020d}", offset + 70)
    shutil.rmtree(rig.directory / layout.IDS)


def kill(rig: DelayRig) -> None:
    """End without a stop: nothing more is copied."""
    rig.store._lock.release()
    rig._disk.close()


def three_sent(directory: Path) -> tuple[DelayRig, list[int]]:
    """Three delayed messages in frames of their own, in the commit log alone."""
    rig = DelayRig(directory, **RARELY)
    offsets = [
        rig.send_delayed({body: rig.now_ms + (n + 1) * HOUR_MS}).physical_offset
        for n, body in enumerate((b"a", b"b", b"c"))
    ]
    return rig, offsets


def test_B4_a_lost_frame_of_delayed_messages_takes_none_but_its_own(tmp_path: Path) -> None:
    rig, offsets = three_sent(tmp_path)
    kill(rig)
    damage_log(rig, offsets[1])
    (report,) = quarantine(tmp_path)
    assert report.first_offset == offsets[1]
    rig.start()
    assert rig.broker.delayed.query.status().pending == 2
    for _ in range(5):
        rig.pass_and_release(HOUR_MS)
    assert rig.bodies() == [b"a", b"c"]
    rig.close()


def test_D4_B4_a_cancellation_behind_a_lost_frame_is_of_the_message_that_was_meant(
    tmp_path: Path,
) -> None:
    """Whoever stood behind the lost one in its bucket has moved up; the mark has the old place, and the source."""
    rig = DelayRig(tmp_path, **RARELY)
    due_ms = rig.now_ms + 5 * HOUR_MS
    lost, *_ = [
        rig.send_delayed({body: due_ms + n}).physical_offset
        for n, body in enumerate((b"lost", b"cancelled", b"comes", b"moved"))
    ]
    _, cancelled, _, moved = rig.find_all()
    rig.cancel(cancelled)
    assert rig.reschedule(moved, due_ms + HOUR_MS)
    kill(rig)
    damage_log(rig, lost)
    assert quarantine(tmp_path)
    rig.start()
    rig.pass_and_release(5 * HOUR_MS + 10)
    assert rig.bodies() == [b"comes"]
    rig.pass_and_release(HOUR_MS)
    assert rig.bodies() == [b"comes", b"moved"]
    rig.close()


def test_D3_a_lost_release_is_made_up_for_by_another(tmp_path: Path) -> None:
    rig, _ = three_sent(tmp_path)
    released_offset = rig.store.durable_offset
    rig.pass_and_release(HOUR_MS)
    assert rig.bodies() == [b"a"]
    rig.clock.pass_ms(2_000)
    rig.store.step()
    kill(rig)
    damage_log(rig, released_offset)
    quarantine(tmp_path)
    rig.start()
    for _ in range(5):
        rig.pass_and_release(HOUR_MS)
    queue = rig.store.queue(SUBJECT)
    assert queue is not None
    lost, *there = queue.entries(0, queue.next_sequence)
    assert lost.record_bytes == 0, "the journal knew of its first place"
    records = rig.store.read_records(there, subject=SUBJECT)
    assert sorted(record[-1:] for record in records) == [b"a", b"b", b"c"]
    rig.close()


def test_B4_what_was_copied_before_the_damage_is_all_there(tmp_path: Path) -> None:
    rig, due = waiting(tmp_path)
    rig.close()
    damage_log(rig, 88)
    quarantine(tmp_path)
    rig.start()
    for _ in range(12):
        rig.pass_and_release(HOUR_MS)
    queue = rig.store.queue(SUBJECT)
    assert queue is not None
    there = [e for e in queue.entries(0, queue.next_sequence) if e.record_bytes]
    records = rig.store.read_records(there, subject=SUBJECT)
    assert sorted(record[-3:] for record in records) == sorted(due)
    rig.close()


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


HARMS: dict[str, Callable[[Path], object]] = {
    "gone": Path.unlink,
    "cut": _cut,
    "empty": lambda path: path.write_bytes(b""),
    "head": lambda path: flip(path, 60),
    "first frame": lambda path: flip(path, 88 + 60),
    "a record": lambda path: flip(path, len(path.read_bytes()) // 2),
}


@pytest.mark.parametrize("log", ["schedule", "dispatch"])
@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
def test_B4_D3_D4_a_damaged_bucket_is_made_again_while_the_log_has_it(
    tmp_path: Path, log: str, harm: Callable[[Path], object]
) -> None:
    rig, due = waiting(tmp_path)
    rig.close()
    for path in sorted((tmp_path / log).rglob("2*/*")):
        harm(path)
    assert quarantine(tmp_path) == [], "nothing is lost"
    rig.start()
    for _ in range(12):
        rig.pass_and_release(HOUR_MS)
    assert sorted(rig.bodies()) == sorted(due), "each once, and what was cancelled never"
    rig.restart()
    assert rig.release() == 0
    rig.close()


def given_up_but_for_one(directory: Path) -> tuple[DelayRig, Path]:
    """The file of a message whose frame the log does not have any more; the broker is stopped."""
    rig = DelayRig.forgetful(directory)
    due_at_ms = rig.now_ms + 900 * HOUR_MS
    rig.send_delayed({b"long": due_at_ms, b"gone": due_at_ms})
    rig.cancel(next(one for one in rig.find_all() if rig.body(one) == b"gone"))
    rig.let_segments_go()
    assert rig.store.first_offset > 0
    rig.close()
    (path,) = (directory / "schedule").rglob("2*/*")
    return rig, path


@pytest.mark.parametrize("log", ["schedule", "dispatch"])
@pytest.mark.parametrize("harm", [Path.unlink, _cut], ids=["gone", "cut"])
def test_B4_a_short_bucket_that_the_log_has_not_is_reported_and_held(
    tmp_path: Path, log: str, harm: Callable[[Path], object]
) -> None:
    rig, schedule_path = given_up_but_for_one(tmp_path)
    path = tmp_path / log / schedule_path.relative_to(tmp_path / "schedule")
    whole = path.read_bytes()
    harm(path)
    left = path.read_bytes() if path.exists() else b""
    disk = OsDisk(str(tmp_path))
    (report,) = quarantine_damage(disk, FakeClock())
    assert (report.log, report.lost) == (log, ())
    assert (report.delayed, report.may_hold_delayed) == (
        (1, False) if log == "schedule" else (0, True)
    )
    assert report.next_offset - report.first_offset == len(whole) - len(left)
    assert report in read_reports(disk)
    assert path.read_bytes() == left.ljust(len(whole), b"\0")
    assert quarantine_damage(disk, FakeClock()) == [], "it is damaged, and no longer short"
    disk.close()
    rig.start()
    rig.send_delayed({b"new": rig.now_ms + HOUR_MS})
    rig.pass_and_release(900 * HOUR_MS)
    released = rig.bodies()
    assert b"new" in released
    assert b"gone" not in released, "nobody knows any more that it was cancelled"
    rig.close()
    path.write_bytes(whole)
    rig.start()
    rig.pass_and_release(HOUR_MS)
    assert rig.bodies()[-1] == b"long", "the file that was put back fits"
    assert b"gone" not in rig.bodies()
    rig.close()


def test_B4_a_damaged_message_that_the_log_has_not_is_held_and_halts_nothing(
    tmp_path: Path,
) -> None:
    rig, path = given_up_but_for_one(tmp_path)
    flip(path, path.read_bytes().rindex(b"long"))
    before = path.read_bytes()
    disk = OsDisk(str(tmp_path))
    assert quarantine_damage(disk, FakeClock()) == []
    disk.close()
    assert path.read_bytes() == before
    rig.start()
    rig.pass_and_release(900 * HOUR_MS)
    assert rig.broker.delayed.query.status().damaged == 1
    rig.close()


def test_B4_a_report_says_how_many_delayed_messages_are_lost_or_that_nobody_knows(
    tmp_path: Path,
) -> None:
    """Else it said that nothing is lost."""
    for position, delayed, is_unknown in ((70, 2, False), (20, 0, True)):
        directory = tmp_path / str(position)
        rig = DelayRig(directory, **RARELY)
        rig.send(b"one")
        due_ms = rig.now_ms + HOUR_MS
        offset = rig.send_delayed({b"a": due_ms, b"b": due_ms}).physical_offset
        rig.send(b"two")
        kill(rig)
        flip(directory / "commitlog" / f"{0:020d}", offset + position)
        (report,) = quarantine(directory)
        assert (report.lost, report.delayed, report.may_hold_delayed) == ((), delayed, is_unknown)
        rig.start()
        assert rig.broker.delayed.query.status().pending == 0
        rig.close()


def test_B4_what_was_copied_does_not_count_as_lost(tmp_path: Path) -> None:
    rig, _ = waiting(tmp_path)
    rig.close()
    damage_log(rig, 88)
    (report,) = quarantine(tmp_path)
    assert (report.delayed, report.may_hold_delayed) == (0, False)
