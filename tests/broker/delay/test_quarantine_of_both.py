"""Damage of the commit log and of the files of delayed messages at once: a quarantine carries on."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from qmq_broker.errors import CorruptionError
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.disk import OsDisk
from qmq_broker.storage.schedule.bucket import Bucket, BucketState
from qmq_broker.storage.schedule.files import ScheduleFiles, dispatched_frames
from qmq_broker.storage.schedule.states import DelayedState, pack_state
from qmq_broker.storage.upkeep.quarantine import quarantine_damage
from qmq_client.wire.record import decode_record
from tests.broker.delay.delay_rig import FORGETFUL, HOUR_MS, DelayRig
from tests.broker.delay.test_backup_and_damage import waiting
from tests.broker.delay.test_quarantine_delayed import (
    HARMS,
    damage_log,
    flip,
    given_up_but_for_one,
    kill,
    three_sent,
)
from tests.broker.service.rig import SUBJECT
from tests.kit.clock import FakeClock

FIRST_FRAME = 88
LATE_MS = 900 * HOUR_MS


def quarantine(directory: Path) -> list[str]:
    """The logs of which something was given up."""
    disk = OsDisk(str(directory))
    reports = quarantine_damage(disk, FakeClock())
    disk.close()
    return [report.log for report in reports]


def make_hole(directory: Path) -> None:
    """Damage the first frame of the last segment; the broker is stopped."""
    flip(max((directory / layout.COMMIT_LOG).glob("0*")), FIRST_FRAME + 70)


def beside(path: Path, log: str) -> Path:
    """The file of the same bucket in another log."""
    return path.parents[2] / log / path.relative_to(path.parents[1])


def bodies(rig: DelayRig) -> list[bytes]:
    """Of what was not lost, in the order of its release; not what only lets segments go."""
    queue = rig.store.queue(SUBJECT)
    assert queue is not None
    there = [one for one in queue.entries(0, queue.next_sequence) if one.record_bytes]
    records = rig.store.read_records(there, subject=SUBJECT)
    found = [decode_record(SUBJECT, record).body for record in records]
    return [body for body in found if not body.startswith(b"xxx")]


@pytest.mark.parametrize("log", ["schedule", "dispatch"])
@pytest.mark.parametrize("harm", ["gone", "cut", "first frame"])
def test_B4_what_the_log_has_not_and_a_hole_in_it_are_given_up_together(
    tmp_path: Path, log: str, harm: str
) -> None:
    rig, schedule_path = given_up_but_for_one(tmp_path)
    path = beside(schedule_path, log)
    whole = path.read_bytes()
    HARMS[harm](path)
    make_hole(tmp_path)
    is_short = harm != "first frame"
    assert quarantine(tmp_path) == [log] * is_short + [layout.COMMIT_LOG]
    rig.start()
    rig.send_delayed({b"new": rig.now_ms + HOUR_MS})
    rig.pass_and_release(LATE_MS)
    assert bodies(rig) == [b"new"], "what is damaged is held"
    rig.close()
    path.write_bytes(whole)
    rig.start()
    rig.pass_and_release(HOUR_MS)
    assert bodies(rig) == [b"new", b"long"], "the file that was put back fits"
    rig.close()


@pytest.mark.parametrize("log", ["schedule", "dispatch"])
@pytest.mark.parametrize("has_hole", [False, True], ids=["whole log", "hole"])
def test_B4_a_bucket_is_made_again_beside_one_that_is_held(
    tmp_path: Path, log: str, has_hole: bool
) -> None:
    rig, held_path = given_up_but_for_one(tmp_path)
    rig.start()
    due_at_ms = rig.now_ms + 800 * HOUR_MS
    rig.send_delayed({b"first": due_at_ms, b"second": due_at_ms, b"third": due_at_ms})
    rig.cancel(next(one for one in rig.find_all() if rig.body(one) == b"second"))
    rig.close()
    (path,) = {*(tmp_path / "schedule").rglob("2*/*")} - {held_path}
    HARMS["cut"](beside(held_path, log))
    flip(path, path.read_bytes().rindex(b"third"))
    HARMS["gone"](beside(path, "dispatch"))
    if has_hole:
        make_hole(tmp_path)
    assert quarantine(tmp_path) == [log] + [layout.COMMIT_LOG] * has_hole
    rig.start()
    assert rig.broker.delayed.query.status().pending == 2, "of these two is known that they wait"
    rig.pass_and_release(LATE_MS)
    assert sorted(bodies(rig)) == [b"first", b"third"], "each once, and what was cancelled never"
    rig.restart()
    assert rig.release() == 0
    rig.close()


@pytest.mark.parametrize("harm", ["gone", "cut", "first frame"])
def test_B4_a_fate_that_the_log_still_knows_does_not_stop_a_start_for_those_that_are_damaged(
    tmp_path: Path, harm: str
) -> None:
    rig, path = given_up_but_for_one(tmp_path)
    rig = DelayRig(tmp_path, **FORGETFUL | {"queue_flush_bytes": 2**30, "checkpoint_ms": 60_000})
    rig.cancel(rig.find_all()[0])
    kill(rig)
    HARMS[harm](beside(path, "dispatch"))
    quarantine(tmp_path)
    rig.start()
    rig.send_delayed({b"new": rig.now_ms + HOUR_MS})
    rig.pass_and_release(LATE_MS)
    assert bodies(rig) == [b"new"]
    rig.close()


def test_B4_what_became_of_a_message_while_its_file_was_damaged_counts_when_that_is_whole_again(
    tmp_path: Path,
) -> None:
    disk = OsDisk(str(tmp_path))
    files = ScheduleFiles(disk, b"s" * 16)
    disk.make_directory(layout.DISPATCH)
    frames = dispatched_frames([pack_state(DelayedState.CANCELLED, 0)])
    next_position = files.append(layout.DISPATCH, 0, 0, frames, stored_at_ms=1)
    bucket = Bucket(BucketState(0, 3, 0, 0, 1, next_position))
    path = tmp_path / layout.bucket_path(layout.DISPATCH, 0)
    flip(path, FIRST_FRAME + 60)
    assert bucket.set_state(files, [1], DelayedState.RELEASED) == [1]
    bucket.settle(DelayedState.RELEASED, [1])
    flip(path, FIRST_FRAME + 60)
    states = bucket.states(files)
    assert [states.get(sequence) for sequence in range(3)] == [
        DelayedState.CANCELLED,
        DelayedState.RELEASED,
        DelayedState.PENDING,
    ]
    files.close()
    disk.close()


def test_B4_a_log_that_ends_before_what_was_copied_is_damaged_and_can_be_given_up(
    tmp_path: Path,
) -> None:
    rig, _ = given_up_but_for_one(tmp_path)
    for pattern in ("checkpoint.*", "state/queues*", "entries/*", "ids/*"):
        for path in tmp_path.glob(pattern):
            path.unlink()
    last = max((tmp_path / layout.COMMIT_LOG).glob("0*"))
    last.write_bytes(last.read_bytes()[:FIRST_FRAME])
    with pytest.raises(CorruptionError, match="state/schedule says synced"):
        rig.start()
    assert quarantine(tmp_path) == [layout.COMMIT_LOG]
    rig.start()
    rig.pass_and_release(LATE_MS)
    assert bodies(rig) == [b"long"]
    rig.close()


@pytest.mark.parametrize("log", ["schedule", "dispatch"])
@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
def test_B4_D3_a_hole_among_other_messages_costs_no_delayed_one(
    tmp_path: Path, log: str, harm: Callable[[Path], object]
) -> None:
    """At the first try: the log has all that was in the files."""
    rig, due = waiting(tmp_path)
    offset = rig.send(b"other").physical_offset
    rig.close()
    flip(max((tmp_path / layout.COMMIT_LOG).glob("0*")), offset + 70)
    shutil.rmtree(tmp_path / layout.IDS)
    for path in sorted((tmp_path / log).rglob("2*/*")):
        harm(path)
    assert quarantine(tmp_path) == [layout.COMMIT_LOG]
    assert quarantine(tmp_path) == [], "nothing is left to be mended"
    rig.start()
    for _ in range(12):
        rig.pass_and_release(HOUR_MS)
    assert sorted(one for one in bodies(rig) if one in due) == sorted(due)
    rig.close()


def test_B4_a_hole_that_held_a_delayed_message_is_one_for_every_later_run(tmp_path: Path) -> None:
    rig, _ = three_sent(tmp_path)
    offset = rig.store.durable_offset
    rig.close()  # all three are in their files
    assert offset > FIRST_FRAME
    damage_log(rig, FIRST_FRAME)
    for path in sorted((tmp_path / "schedule").rglob("2*/*")):
        path.unlink()
    for expected in (["schedule"] * 3 + [layout.COMMIT_LOG], []):
        assert quarantine(tmp_path) == expected
        rig.start()
        assert rig.broker.delayed.query.status().pending == 3, "the files may be put back"
        rig.close()
