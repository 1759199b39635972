"""Moments at which a message could fall out of sight, or into it again, each made by hand: it must come once."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq_broker.errors import BusyError, DiskError
from qmq_broker.service.limits import ServiceLimits
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.disk_port import DiskFile
from qmq_broker.storage.schedule.copy import ScheduleCopier
from qmq_client.wire.frame import MessageFrame
from qmq_client.wire.limits import SUBJECTS_PER_FRAME_MAX
from tests.broker.delay.delay_rig import FORGETFUL, HOUR_MS, DelayRig, delayed_frame
from tests.broker.delay.long_retry_rig import MONTH_MS, LongRetryRig
from tests.broker.delay.test_held import spoil_marks
from tests.broker.service.rig import Rig, new_ids

MINUTE_MS = 60_000
MANY = 30


def copied(rig: DelayRig) -> None:
    ScheduleCopier(rig.store.schedule, epoch=rig.store.epoch).copy_all()


def due_at(at_ms: int, name: str = "m") -> dict[bytes, int]:
    """More messages, a second after each other, than are held in memory."""
    return {f"{name}{number}".encode(): at_ms + number * 1_000 for number in range(MANY)}


def test_D3_who_looks_again_while_others_are_overdue_does_not_make_them_wait_for_a_restart(
    tmp_path: Path,
) -> None:
    limits = ServiceLimits(delayed_loaded=8, overdue_per_s=4)
    rig = DelayRig(tmp_path, limits=limits)
    rig.send_delayed({b"held": rig.now_ms + HOUR_MS})
    rig.send_delayed(due_at(rig.now_ms + 3 * HOUR_MS))
    copied(rig)
    path = min(tmp_path.glob("schedule/*/*"))
    whole = spoil_marks(path)
    rig.clock.pass_ms(5 * HOUR_MS)
    rig.restart()
    rig.release()
    found = rig.broker.delayed.query.status()
    assert (len(found.damaged_buckets), 0 < found.released < MANY) == (1, True)
    path.write_bytes(whole)
    rig.broker.delayed.releaser.look_again(found.damaged_buckets)
    for _ in range(2 * MANY):
        rig.pass_and_release(1_000)
    assert sorted(rig.bodies()) == sorted([b"held", *due_at(0)])
    rig.close()


def test_D3_who_looks_again_while_more_is_due_than_is_loaded_forgets_nothing_of_that(
    tmp_path: Path,
) -> None:
    rig = DelayRig(tmp_path, limits=ServiceLimits(delayed_loaded=8))
    rig.send_delayed({b"far": rig.now_ms + 90 * HOUR_MS})
    rig.send_delayed(due_at(rig.now_ms + 2 * HOUR_MS))
    copied(rig)
    rig.restart()
    rig.release()  # nothing is overdue
    releaser = rig.broker.delayed.releaser
    rig.clock.pass_ms(3 * HOUR_MS)
    releaser.step()
    assert releaser.near.loaded_until_ms < rig.now_ms
    releaser.look_again([max(rig.store.schedule.buckets)])
    rig.release()
    assert sorted(rig.bodies()) == sorted(due_at(0))
    rig.close()


def test_D3_what_could_not_be_read_for_want_of_a_file_is_released_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = DelayRig(tmp_path)
    rig.send_delayed({b"one": rig.now_ms + MINUTE_MS})
    releaser, disk = rig.broker.delayed.releaser, rig.store.schedule.disk
    releaser.step()
    copied(rig)
    rig.clock.pass_ms(2 * MINUTE_MS)

    def no_more_files(path: str, *, is_new: bool = False) -> DiskFile:
        raise DiskError(operation="open", path=path, reason="too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(disk, "open", no_more_files)
        with pytest.raises(DiskError, match="too many open files"):
            releaser.step()
    assert rig.bodies() == []
    assert rig.release() == 1
    rig.close()


def test_D3_a_copy_whose_release_is_refused_for_long_is_not_taken_for_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = LongRetryRig(tmp_path, **FORGETFUL)
    rig.start_long_retries(b"away")
    rig.let_segments_go()
    releaser = rig.broker.delayed.releaser

    def refuse(frame: MessageFrame, on_done: object) -> None:
        raise BusyError("the disk is slow", retry_after_s=1.0)

    with monkeypatch.context() as patch:
        patch.setattr(rig.broker.writer, "submit", refuse)
        rig.clock.pass_ms(MONTH_MS)
        for _ in range(10):
            rig.clock.pass_ms(MINUTE_MS)
            releaser.step()
            rig.run_posted()
            rig.turn()
    assert rig.state.lost_count == 0
    rig.pass_and_turn(1_000)
    assert rig.pull().bodies == [b"away"]
    rig.close()


def test_B11_D3_a_message_that_is_late_when_it_comes_is_found_without_a_table_in_a_bucket_of_its_own(
    tmp_path: Path,
) -> None:
    """Were it put into the bucket of its time, it would be taken for one that was released from there."""
    rig = DelayRig(tmp_path)
    due_ms = rig.now_ms + MINUTE_MS
    rig.send_delayed({b"early": due_ms})
    rig.pass_and_release(2 * MINUTE_MS)
    copied(rig)
    rig.pass_and_release(3 * HOUR_MS)
    rig.send_delayed({b"in time": rig.now_ms + HOUR_MS})
    copied(rig)
    copied(rig)
    assert len(list(tmp_path.glob("dispatch/*/*"))) == 0, "the first bucket is done with"
    rig.send_delayed({b"late": due_ms})
    copied(rig)
    Rig.kill(rig)
    (tmp_path / layout.SCHEDULE_TABLE).unlink()
    rig.start()
    rig.pass_and_release(2 * HOUR_MS)
    assert sorted(rig.bodies()) == [b"early", b"in time", b"late"]
    rig.close()


def test_B11_D3_a_removal_that_stops_halfway_leaves_nothing_that_seems_to_wait_without_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its dispatch log, a schedule log of messages that were released would be released again."""
    rig = DelayRig(tmp_path, **FORGETFUL, bucket_grace_ms=100 * HOUR_MS)
    rig.send_delayed({b"one": rig.now_ms + MINUTE_MS})
    rig.pass_and_release(2 * MINUTE_MS)
    copied(rig)
    disk = rig.store.schedule.disk
    unlink, removed = disk.unlink, list[str]()

    def unlink_one(path: str) -> None:
        if path.startswith((layout.SCHEDULE, layout.DISPATCH)):
            if removed:
                raise DiskError(operation="unlink", path=path, reason="planted fault")
            removed.append(path)
        unlink(path)

    rig.let_segments_go()  # the log has forgotten what became of it
    with monkeypatch.context() as patch:
        patch.setattr(disk, "unlink", unlink_one)
        rig.pass_and_release(100 * HOUR_MS)
        rig.send(b"lets the log's time go on")
        rig.commit()
    assert len(removed) == 1
    Rig.kill(rig)
    (tmp_path / layout.SCHEDULE_TABLE).unlink()
    rig.start()
    assert rig.broker.delayed.query.status().pending == 0
    assert rig.pass_and_release(HOUR_MS) == 0
    rig.close()


def test_D3_B10_as_many_subjects_as_no_frame_holds_are_copied_and_released_at_one_moment(
    tmp_path: Path,
) -> None:
    rig = DelayRig(tmp_path)
    due_ms = rig.now_ms + 2 * HOUR_MS
    subjects = [f"subject-{number}" for number in range(SUBJECTS_PER_FRAME_MAX + 1)]
    ids = new_ids()
    for subject in subjects:
        rig.submit(delayed_frame({b"one": due_ms}, subject=subject, ids=ids))
    rig.commit()
    rig.commit()
    copied(rig)
    rig.restart()
    assert rig.pass_and_release(2 * HOUR_MS) == len(subjects)
    assert all(rig.bodies(subject) == [b"one"] for subject in subjects)
    rig.close()
