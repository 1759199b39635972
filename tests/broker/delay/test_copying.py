"""Copying delayed messages to their files: a little at a time, since what is due meanwhile waits."""

from __future__ import annotations

from pathlib import Path

from qmq_broker.storage.schedule.copy import PART_MESSAGES_MAX, ScheduleCopier
from tests.broker.delay.delay_rig import HOUR_MS, DelayRig


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
