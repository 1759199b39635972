"""What is done with goes: buckets of delayed messages, and segments of the log that had some."""

from __future__ import annotations

from pathlib import Path
from threading import Event
from typing import Any

import pytest

from qmq_broker.storage.files.background import Work, in_a_thread
from qmq_broker.storage.files.disk import OsDisk
from qmq_broker.storage.schedule.bucket import empty_bucket
from qmq_broker.storage.schedule.columns import IN_SCHEDULE
from tests.broker.delay.delay_rig import FORGETFUL, HOUR_MS, LARGE, DelayRig

DEADLINE_S = 60


def tick(rig: DelayRig) -> None:
    """What a broker does by time, and its writer after that."""
    rig.clock.pass_ms(1_000)
    rig.broker.step()
    for _ in range(4):
        rig.commit()


def files(rig: DelayRig) -> list[str]:
    return [
        path.name for log in ("schedule", "dispatch") for path in rig.directory.glob(f"{log}/*/*")
    ]


def test_files_of_a_bucket_that_is_done_with_go_although_nobody_sends(tmp_path: Path) -> None:
    rig = DelayRig(tmp_path)
    rig.send_delayed({b"one": rig.now_ms + HOUR_MS, b"later": rig.now_ms + 90 * HOUR_MS})
    rig.restart()
    rig.pass_and_release(HOUR_MS)
    before = rig.store.durable_offset
    tick(rig)
    assert rig.store.durable_offset == before, "nothing is written while nothing may go"
    assert len(files(rig)) == 2
    for _ in range(4):
        rig.pass_and_release(HOUR_MS)
        tick(rig)
    assert len(files(rig)) == 1
    marked = rig.store.durable_offset
    for _ in range(20):
        rig.pass_and_release(HOUR_MS)
        tick(rig)
    assert rig.store.durable_offset == marked, "nothing is written when all is done"
    rig.restart()
    assert rig.pass_and_release(90 * HOUR_MS) == 1
    assert rig.bodies() == [b"one", b"later"]
    rig.close()


def test_D1_a_schedule_log_is_durably_gone_before_what_says_that_it_is_done_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, without a table, it would be pending again."""
    rig = DelayRig(tmp_path)
    calls: list[tuple[str, str]] = []
    for name in ("unlink", "sync_directory"):
        call = getattr(OsDisk, name)

        def noted(disk: OsDisk, path: str, *, name: str = name, call: Any = call) -> None:
            if path.startswith(("schedule/", "dispatch/")):
                calls.append((name, path.partition("/")[0]))
            call(disk, path)

        monkeypatch.setattr(OsDisk, name, noted)
    rig.send_delayed({b"one": rig.now_ms + HOUR_MS})
    rig.pass_and_release(HOUR_MS)
    rig.restart()
    assert len(files(rig)) == 2
    calls.clear()
    for _ in range(4):
        rig.pass_and_release(HOUR_MS)
        tick(rig)
    assert files(rig) == []
    assert calls[:3] == [
        ("unlink", "schedule"),
        ("sync_directory", "schedule"),
        ("unlink", "dispatch"),
    ]
    rig.close()


def test_while_one_length_of_buckets_takes_over_from_another_the_longer_one_counts(
    tmp_path: Path,
) -> None:
    """What comes later may belong to a longer bucket that begins with this one."""
    rig = DelayRig(tmp_path, bucket_ms=HOUR_MS, bucket_grace_ms=0)
    schedule = rig.store.schedule
    schedule.bucket_ms = HOUR_MS // 12
    ends = (schedule.bucket_ms, HOUR_MS - 1, HOUR_MS)
    assert [schedule.is_done(empty_bucket(0), ms) for ms in ends] == [False, False, True]
    rig.close()


def test_D2_A2_a_disk_that_is_long_about_removing_files_holds_up_neither_sends_nor_releases(
    tmp_path: Path,
) -> None:
    rig = DelayRig(tmp_path)
    due = {b"one": rig.now_ms + HOUR_MS, b"later": rig.now_ms + 90 * HOUR_MS}
    rig.send_delayed(due)
    rig.restart()
    rig.pass_and_release(HOUR_MS)
    assert len(files(rig)) == 2
    slow: list[Work] = []
    schedule = rig.store.schedule
    schedule.background.start = slow.append
    bucket = min(schedule.buckets)
    while bucket in schedule.buckets:  # its place in the table goes, and then it
        rig.pass_and_release(HOUR_MS)
        tick(rig)
        if bucket in schedule.buckets and slow:
            slow.pop()()
    assert len(slow) == 1
    assert len(files(rig)) == 3, "its two files are there until the disk is done"
    rig.send(b"now", subject="other")
    rig.send_delayed({b"soon": rig.now_ms + 1})
    assert rig.pass_and_release(1) == 1
    slow.pop()()
    assert len(files(rig)) == 1
    schedule.background.start = in_a_thread
    rig.close()
    assert len(files(rig)) == 3, "a stop copies what came since"
    rig.start()
    rig.pass_and_release(90 * HOUR_MS)
    assert sorted(rig.bodies()) == sorted([*due, b"soon"])
    rig.close()


def test_D3_what_is_in_memory_comes_although_its_segment_went_meanwhile(tmp_path: Path) -> None:
    late = {"checkpoint_bytes": 2**30, "queue_flush_bytes": 2**30}
    rig = DelayRig(tmp_path, **FORGETFUL | late | {"retain_ms": 1_000})
    rig.send_delayed({b"one": rig.now_ms + 500_000})
    rig.release()
    assert rig.broker.delayed.releaser.near.loaded == 1
    (waiting,) = rig.find_all()
    assert not waiting.place & IN_SCHEDULE
    while rig.store.first_offset <= waiting.source:
        rig.send(LARGE)
        rig.settle(rig.pull().ack())
        tick(rig)
        rig.release()
    assert rig.broker.delayed.releaser.near.loaded == 1
    rig.pass_and_release(500_000)
    assert b"one" in rig.bodies()
    rig.close()


def test_a_stop_waits_for_files_that_are_being_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = DelayRig(tmp_path)
    rig.send_delayed({b"one": rig.now_ms + HOUR_MS, b"later": rig.now_ms + 90 * HOUR_MS})
    rig.restart()
    rig.pass_and_release(HOUR_MS)
    background, is_waited_for = rig.store.schedule.background, Event()
    real_wait = background.wait

    def start(work: Work) -> None:
        is_waited_for.clear()

        def when_waited_for() -> None:
            assert is_waited_for.wait(DEADLINE_S)
            work()

        in_a_thread(when_waited_for)

    def wait() -> None:
        is_waited_for.set()
        real_wait()

    background.start = start
    monkeypatch.setattr(background, "wait", wait)
    for _ in range(4):
        rig.pass_and_release(HOUR_MS)
        tick(rig)
    assert len(files(rig)) == 3
    rig.close()
    assert not background.is_busy
    assert len(files(rig)) == 1


def test_a_segment_with_delayed_messages_goes_although_too_little_came_for_a_copy(
    tmp_path: Path,
) -> None:
    rig = DelayRig(tmp_path, **FORGETFUL | {"checkpoint_bytes": 2**30, "queue_flush_bytes": 2**30})
    due = {b"%d" % n + LARGE: rig.now_ms + (900 + n) * HOUR_MS for n in range(9)}
    for body, due_at_ms in due.items():
        rig.send_delayed({body: due_at_ms})
    rig.clock.pass_ms(2 * HOUR_MS)
    for _ in range(4):
        tick(rig)
    assert rig.store.first_offset > 0
    rig.kill()
    rig.clock.pass_ms(890 * HOUR_MS)
    for _ in range(20):
        rig.pass_and_release(HOUR_MS)
    assert sorted(rig.bodies()) == sorted(due)
    rig.close()


def test_the_time_is_noted_once_in_a_bucket_length_at_most(tmp_path: Path) -> None:
    rig = DelayRig(tmp_path)
    rig.send_delayed({b"one": rig.now_ms + HOUR_MS})
    rig.pass_and_release(HOUR_MS)
    rig.pass_and_release(3 * HOUR_MS)
    before = rig.store.durable_offset
    tick(rig)
    noted = rig.store.durable_offset
    assert noted > before
    for _ in range(5):
        tick(rig)
    assert rig.store.durable_offset == noted
    rig.pass_and_release(2 * HOUR_MS)
    tick(rig)
    tick(rig)
    assert files(rig) == []
    rig.close()
