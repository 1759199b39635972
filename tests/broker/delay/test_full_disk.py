"""B6 with delayed messages: a disk without room holds copies and releases, and loses nothing."""

from __future__ import annotations

from tests.crash.delay_world import MINUTE_MS, DelayLife, _released
from tests.crash.recording_disk import UNLIMITED, RecordingDisk


def test_B6_D3_releases_and_copies_wait_for_room_and_continue_without_a_restart() -> None:
    disk = RecordingDisk()
    life = DelayLife(disk)
    bodies = life.send(1, 2, 3, body_bytes=300) + life.send(4, 30, body_bytes=300)
    disk.capacity_bytes = 0
    life.clock.pass_ms(5 * MINUTE_MS)
    releaser = life.rig.releaser
    for _ in range(5):
        releaser.step()
        life.rig._run()
        life.rig._writer.step()
        life.rig._run()
    assert releaser.counts.released < 4
    disk.capacity_bytes = UNLIMITED
    life.clock.pass_ms(2_000)
    life.rig.release()

    assert sorted(_released(life.store)) == sorted(bodies[:4])
    life.kill()
    life.pass_minutes(40)
    assert sorted(_released(life.store)) == sorted(bodies)
