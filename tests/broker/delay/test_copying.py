"""Copying delayed messages to their files: a little at a time, since all that is sent meanwhile waits."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from qmq_broker.errors import PoisonedError
from qmq_broker.storage import saving
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.background import Work, at_once, in_a_thread
from qmq_broker.storage.schedule import copy
from qmq_broker.storage.schedule.copy import PART_MESSAGES_MAX, PARTS_PER_STEP, ScheduleCopier
from qmq_broker.storage.schedule.files import ScheduleFiles, dispatched_frames
from tests.broker.delay.delay_rig import HOUR_MS, LARGE, DelayRig
from tests.crash.delay_world import DelayLife
from tests.crash.recording_disk import RecordingDisk
from tests.kit.waiting import wait_for


def send_many(rig: DelayRig, count: int) -> dict[bytes, int]:
    due = {f"{number}".encode(): rig.now_ms + HOUR_MS for number in range(count)}
    rig.send_delayed(due)
    return due


def test_D2_without_time_for_more_one_small_part_is_copied_between_two_commits(
    tmp_path: Path,
) -> None:
    rig = DelayRig(tmp_path)
    count = 3 * PART_MESSAGES_MAX
    due = {f"{number}".encode(): rig.now_ms + HOUR_MS for number in range(count)}
    rig.send_delayed(due)
    schedule = rig.store.schedule
    copier = ScheduleCopier(schedule, epoch=rig.store.epoch)
    left = [schedule.uncopied]
    while not copier.copy_some(4, lambda: False):
        left.append(schedule.uncopied)
    assert left == [count, count - PART_MESSAGES_MAX, count - 2 * PART_MESSAGES_MAX]
    assert (schedule.uncopied, schedule.copied_offset) == (0, rig.store.durable_offset)
    rig.close()
    rig.start()
    assert rig.pass_and_release(HOUR_MS) == count
    assert sorted(rig.bodies()) == sorted(due)
    rig.close()


def test_D2_A2_a_disk_that_hangs_in_the_sync_of_a_copy_holds_up_neither_sends_nor_releases(
    tmp_path: Path,
) -> None:
    rig = DelayRig(tmp_path, queue_flush_bytes=1)
    hanging: list[Work] = []
    rig.store.schedule.background.start = hanging.append
    due = send_many(rig, 3 * PARTS_PER_STEP * PART_MESSAGES_MAX)
    schedule, written = rig.store.schedule, []
    for number in range(5):
        rig.send(b"%d" % number, subject="other")
        rig.send_delayed({b"soon %d" % number: rig.now_ms + 1})
        assert rig.pass_and_release(1) == 1
        written.append(schedule.uncopied)
        assert len(hanging) == 1
    assert len(rig.bodies("other")) == 5
    # Nothing is written to files that are being synced: what came since waits.
    assert [later - before for before, later in pairwise(written)] == [2] * 4
    assert schedule.copied_offset == 0
    while hanging:
        hanging.pop()()
        rig.store.step()
    assert schedule.copied_offset > 0
    schedule.background.start = in_a_thread
    rig.close()
    rig.start()
    assert rig.pass_and_release(HOUR_MS) == len(due)
    rig.close()


def test_D3_syncs_beside_the_writer_and_a_stop_in_the_middle_of_one_lose_nothing(
    tmp_path: Path,
) -> None:
    rig = DelayRig(tmp_path, queue_flush_bytes=1)
    schedule = rig.store.schedule
    schedule.background.start = in_a_thread
    due = send_many(rig, 4 * PARTS_PER_STEP * PART_MESSAGES_MAX)
    wait_for(lambda: rig.store.step() or schedule.copied_offset > 0, "a copy")
    due |= {body + b".2": at for body, at in send_many(rig, 1).items()}
    rig.close()
    rig.start()
    assert rig.store.schedule.uncopied == 0
    assert rig.pass_and_release(HOUR_MS) == len(due)
    rig.close()


def test_D3_no_segment_goes_before_what_waits_in_it_is_durably_copied(tmp_path: Path) -> None:
    rig = DelayRig.forgetful(tmp_path)
    hanging: list[Work] = []
    rig.store.schedule.background.start = hanging.append
    due = send_many(rig, 3)
    for _ in range(12):
        rig.send(LARGE, subject="other")
        rig.clock.pass_ms(5)
    rig.store.give_up_below(rig.store.durable_offset)
    rig.store.step()
    assert hanging
    rig.store.give_up_below(rig.store.durable_offset)
    assert (rig.store.first_offset, rig.store.schedule.copied_offset) == (0, 0)
    rig.store.schedule.background.start = at_once
    while hanging:
        hanging.pop()()
    for _ in range(5):
        rig.store.step()
        rig.store.give_up_below(rig.store.durable_offset)
    assert rig.store.first_offset > 0
    assert rig.pass_and_release(HOUR_MS) == len(due)
    assert sorted(rig.bodies()) == sorted(due)
    rig.close()


def test_B6_a_copy_whose_sync_fails_is_not_said_to_be_durable_and_ends_the_writing() -> None:
    disk = RecordingDisk()
    life = DelayLife(disk)
    bodies = life.send(1, 200, 300)
    disk.fails_sync = lambda path: path.startswith("schedule/")
    with pytest.raises(PoisonedError):
        _send_on(life)
    assert life.store.schedule.copied_offset == 0
    disk.fails_sync = lambda _: False
    life.kill()
    life.pass_minutes(310)
    assert life.rig.releaser.counts.released >= len(bodies)


def test_B5_a_sync_that_failed_beside_the_writer_ends_the_writing_and_is_not_made_again() -> None:
    disk = RecordingDisk()
    life = DelayLife(disk)
    waiting: list[Work] = []
    life.store.schedule.background.start = waiting.append
    life.send(1, 200, 300)
    _send_on(life)
    (work,) = waiting
    disk.fails_sync = lambda path: path.startswith("schedule/")
    work()
    disk.fails_sync = lambda _: False
    with pytest.raises(PoisonedError):
        life.store.step()
    assert waiting == [work]


def test_what_no_table_tells_of_is_gone_from_a_file_when_more_is_copied_to_it() -> None:
    files = ScheduleFiles(RecordingDisk(), bytes(16))
    copied = files.append(layout.DISPATCH, 0, 0, dispatched_frames([1]), stored_at_ms=1)
    files.append(layout.DISPATCH, 0, copied, dispatched_frames(range(2, 9)), stored_at_ms=1)
    after = files.append(layout.DISPATCH, 0, copied, dispatched_frames([9]), stored_at_ms=1)
    assert files.length(layout.DISPATCH, 0) == after


def test_D2_when_much_waits_as_much_is_copied_as_came_since_and_no_more_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part, parts_came, parts_max = 50, 20, 40
    monkeypatch.setattr(copy, "PART_MESSAGES_MAX", part)
    monkeypatch.setattr(copy, "UNCOPIED_MAX", parts_max * part)
    monkeypatch.setattr(saving, "COPY_SLICE_S", 0)
    rig = DelayRig(tmp_path)
    copied: list[int] = []
    real = ScheduleFiles.append

    def append(self: ScheduleFiles, *arguments: Any, **more: Any) -> int:
        copied[-1] += 1
        return real(self, *arguments, **more)

    monkeypatch.setattr(ScheduleFiles, "append", append)
    for _ in range(12):
        copied.append(0)
        send_many(rig, parts_came * part)
    assert 1 in copied, "little waits: no more than there is time for"
    assert parts_came < max(copied) <= parts_came + 2
    assert rig.store.schedule.uncopied <= (2 * parts_max + parts_came) * part
    rig.close()


def test_a_copy_syncs_what_it_wrote_and_no_more() -> None:
    disk = RecordingDisk()
    life = DelayLife(disk)
    synced: list[str] = []

    def note(path: str) -> bool:
        synced.extend([path] if path.startswith("schedule/") else [])
        return False

    disk.fails_sync = note
    for minutes in (10, 100, 200):
        synced.clear()
        for _ in range(5):
            life.send(minutes, body_bytes=900)
            life.pass_minutes(0)
        assert len(set(synced)) == 1


def _send_on(life: DelayLife) -> None:
    for _ in range(20):
        life.send(400, body_bytes=200)
        life.store.step()


@pytest.mark.parametrize("is_under_way", [False, True])
def test_F38_D3_a_stop_does_not_write_thousands_of_buckets_and_the_next_start_has_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_under_way: bool
) -> None:
    monkeypatch.setattr(saving, "BUCKETS_AT_STOP_MAX", 2)
    rig = DelayRig(tmp_path)
    due = {f"{number}".encode(): rig.now_ms + number * HOUR_MS for number in range(1, 8)}
    rig.send_delayed(due)
    if is_under_way:
        rig.store._saver._parts.copier.copy_some(2)
    written = sorted(tmp_path.glob("schedule/*/*"))
    assert len(written) == (2 if is_under_way else 0)
    rig.restart()
    assert set(tmp_path.glob("schedule/*/*")) <= set(written)
    assert rig.store.recovery.clean
    assert rig.pass_and_release(3 * HOUR_MS) == 3
    rig.restart()
    assert rig.pass_and_release(9 * HOUR_MS) == 4
    assert sorted(rig.bodies()) == sorted(due)
    rig.restart()  # with nothing that is left out
    assert rig.release() == 0
    rig.close()
