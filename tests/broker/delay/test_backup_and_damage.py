"""Delayed messages in backups, in a verification, and with files that are gone or damaged."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qmq_broker.errors import CorruptionError
from qmq_broker.face.commands.store_dump import DumpQuestion, dump
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.disk import OsDisk
from qmq_broker.storage.files.faults import NOT_STARTED, Fault, Level
from qmq_broker.storage.upkeep.backup import back_up
from qmq_broker.storage.upkeep.verify import verify_store
from qmq_client.wire.message_id import format_message_id
from tests.broker.delay.delay_rig import HOUR_MS, DelayRig
from tests.kit.clock import FakeClock

#: Copies follow each few messages, as they do each hundred megabytes.
OFTEN: dict[str, Any] = {"queue_flush_bytes": 1}


def waiting(directory: Path) -> tuple[DelayRig, dict[bytes, int]]:
    """Messages over several buckets: some released, one cancelled, most to come."""
    rig = DelayRig(directory, **OFTEN)
    due = {
        f"{hour}.{n}".encode(): rig.now_ms + hour * HOUR_MS + n for hour in range(9) for n in (1, 2)
    }
    rig.send_delayed(due)
    rig.pass_and_release(2 * HOUR_MS + 10)
    (gone,) = [one for one in rig.find_all() if rig.body(one) == b"8.1"]
    rig.cancel(gone)
    for _ in range(10):
        rig.store.step()
    return rig, {body: at for body, at in due.items() if body != b"8.1"}


def verified(directory: Path) -> list[Fault]:
    disk = OsDisk(str(directory))
    found = verify_store(disk, FakeClock(), check_groups=len)
    disk.close()
    return found.faults


def faults(directory: Path) -> list[tuple[str, str]]:
    return [(fault.level, fault.file) for fault in verified(directory)]


def finish(rig: DelayRig, due: dict[bytes, int]) -> None:
    """Let all time pass: each message once, and nothing else."""
    for _ in range(12):
        rig.pass_and_release(HOUR_MS)
    assert sorted(rig.bodies()) == sorted(due)
    rig.close()


def test_X3_a_backup_under_way_has_what_waits(tmp_path: Path) -> None:
    rig, due = waiting(tmp_path / "data")
    (tmp_path / "copy").mkdir()
    source, target = (OsDisk(str(tmp_path / name)) for name in ("data", "copy"))
    back_up(source, target, FakeClock(), link=lambda _: False)
    source.close()
    target.close()
    assert faults(tmp_path / "copy") == []
    copy = DelayRig(tmp_path / "copy", **OFTEN)
    copy.clock.pass_ms(2 * HOUR_MS + 10)
    copy.kill()
    finish(copy, due)
    finish(rig, due)


def test_B11_without_their_table_the_files_speak_for_themselves(tmp_path: Path) -> None:
    rig, due = waiting(tmp_path)
    rig.close()
    (tmp_path / layout.SCHEDULE_TABLE).unlink()
    rig.start()
    finish(rig, due)


def test_B11_without_table_and_files_all_is_made_again_from_the_log(tmp_path: Path) -> None:
    """Whatever the journal of entries says about the files that were there."""
    rig, due = waiting(tmp_path)
    rig.close()
    (tmp_path / layout.SCHEDULE_TABLE).unlink()
    for log in (layout.SCHEDULE, layout.DISPATCH):
        shutil.rmtree(tmp_path / log)
    rig.start()
    finish(rig, due)


def test_B11_a_table_that_is_damaged_is_made_again(tmp_path: Path) -> None:
    rig, due = waiting(tmp_path)
    rig.close()
    path = tmp_path / layout.SCHEDULE_TABLE
    path.write_bytes(path.read_bytes()[:-9] + b"00000000\n")
    assert faults(tmp_path) == [("rebuilt", layout.SCHEDULE_TABLE)]
    rig.start()
    finish(rig, due)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


@pytest.mark.parametrize("log", ["schedule", "dispatch"])
@pytest.mark.parametrize("harm", [Path.unlink, _cut], ids=["gone", "cut"])
def test_B4_a_file_that_is_shorter_than_its_table_says_stops_the_broker(
    tmp_path: Path, log: str, harm: Callable[[Path], None]
) -> None:
    rig, _ = waiting(tmp_path)
    rig.close()
    path = max((tmp_path / log).rglob("2*/*"))
    harm(path)
    name = str(path.relative_to(tmp_path))
    (told,) = [fault for fault in verified(tmp_path) if fault.file == name]
    assert (told.level, told.meaning) == (Level.DAMAGED, NOT_STARTED)
    with pytest.raises(CorruptionError) as caught:
        rig.start()
    assert caught.value.segment == name


def test_B4_a_damaged_record_is_held_and_named_and_others_continue(tmp_path: Path) -> None:
    rig, due = waiting(tmp_path)
    rig.close()
    path = sorted((tmp_path / "schedule").rglob("2*/*"))[-2]
    whole = path.read_bytes()
    data = bytearray(whole)
    data[data.index(b"7.1")] ^= 1
    path.write_bytes(data)
    (found,) = [fault for fault in verified(tmp_path) if fault.level == Level.DAMAGED]
    assert found.file == str(path.relative_to(tmp_path))
    assert found.meaning.startswith("The broker starts, and holds back")
    rig.start()
    for _ in range(12):
        rig.pass_and_release(HOUR_MS)
    assert b"7.1" not in rig.bodies()
    assert sorted(rig.bodies()) == sorted(set(due) - {b"7.1"})
    status = rig.broker.delayed.query.status()
    assert (status.damaged, status.pending) == (1, 1)
    (held,) = rig.find_all()
    (told,) = status.held
    assert told.startswith(f"message {format_message_id(held.message_id)}: ")
    assert str(path.relative_to(tmp_path)) in told
    rig.broker.delayed.releaser.look_again([held.bucket])
    path.write_bytes(whole)
    rig.release()
    assert b"7.1" in rig.bodies()
    assert rig.broker.delayed.query.status().held == []
    rig.close()


def test_files_of_a_bucket_go_when_it_is_done_with(tmp_path: Path) -> None:
    rig, due = waiting(tmp_path)
    before = len(list((tmp_path / "schedule").rglob("2*/*")))
    for _ in range(12):
        rig.pass_and_release(HOUR_MS)
        rig.send(b"x", subject="other")
        for _ in range(5):
            rig.store.step()
    assert before >= 5
    assert len(list((tmp_path / "schedule").rglob("2*/*"))) <= 2
    assert len(list((tmp_path / "dispatch").rglob("2*/*"))) <= 2
    rig.restart()
    assert rig.release() == 0
    assert sorted(rig.bodies()) == sorted(due)
    assert rig.broker.delayed.query.status().pending == 0
    rig.close()


def test_the_files_are_shown_row_by_row_while_no_broker_has_them(tmp_path: Path) -> None:
    rig, _ = waiting(tmp_path)
    rig.close()
    disk = OsDisk(str(tmp_path))
    scheduled = list(dump(disk, "schedule", DumpQuestion()))
    dispatched = list(dump(disk, "dispatch", DumpQuestion()))
    disk.close()
    assert len(scheduled) == 16
    assert {row["subject"] for row in scheduled} == {"orders"}
    states = [row["state"] for row in dispatched]
    assert (states.count("cancelled"), states.count("released")) == (1, 4)
