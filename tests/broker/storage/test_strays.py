"""Files of others in a data directory: nobody minds them, and nobody removes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from qmq_broker.storage.files import layout
from qmq_broker.storage.files.disk import OsDisk
from qmq_broker.storage.files.faults import Level
from qmq_broker.storage.upkeep.backup import back_up
from qmq_broker.storage.upkeep.quarantine import quarantine_damage
from qmq_broker.storage.upkeep.rebuild import rebuild_store
from qmq_broker.storage.upkeep.verify import verify_store
from tests.broker.delay.delay_rig import HOUR_MS, DelayRig
from tests.kit.clock import FakeClock

STRAYS: dict[str, Callable[[Path], object]] = {
    "file": lambda path: path.write_bytes(b"not ours"),
    "folder": lambda path: path.mkdir(),
    "link": lambda path: path.symlink_to("nowhere"),
}


def stopped(directory: Path) -> DelayRig:
    """A stopped broker with a message, and a delayed one in files of its own."""
    rig = DelayRig(directory)
    rig.send(b"now")
    rig.send_delayed({b"later": rig.now_ms + HOUR_MS})
    rig.close()
    for folder in (layout.SORTED, layout.QUARANTINE):
        (directory / folder).mkdir(exist_ok=True)
    return rig


@pytest.mark.parametrize("kind", STRAYS)
def test_strays_in_every_folder_change_nothing_and_stay(tmp_path: Path, kind: str) -> None:
    rig = stopped(tmp_path / "data")
    folders = [rig.directory, *(path for path in rig.directory.rglob("*") if path.is_dir())]
    assert len(folders) > 14
    strays = [folder / "Not ours.txt" for folder in folders]
    for stray in strays:
        STRAYS[kind](stray)
    disk, clock = OsDisk(str(rig.directory)), FakeClock()
    found = verify_store(disk, clock, check_groups=len)
    assert {fault.level for fault in found.faults} == {Level.IGNORED}
    assert quarantine_damage(disk, clock) == []
    copy = OsDisk(str(tmp_path / "copy"))
    assert back_up(disk, copy, clock, link=lambda path: False).next_offset
    assert rebuild_store(disk, clock, with_index=True).entries == 1
    disk.close()
    copy.close()
    rig.start()
    rig.pass_and_release(HOUR_MS)
    assert rig.pull().bodies == [b"now", b"later"]
    rig.close()
    assert [stray for stray in strays if not stray.is_symlink() and not stray.exists()] == []


def test_strays_do_not_count_as_delayed_messages_without_a_table(tmp_path: Path) -> None:
    rig = DelayRig(tmp_path / "data")
    rig.send(b"now")
    rig.close()
    (rig.directory / layout.SCHEDULE_TABLE).unlink(missing_ok=True)
    for log in (layout.SCHEDULE, layout.DISPATCH):
        (rig.directory / log / "notes").mkdir()
        (rig.directory / log / "notes" / "today").write_bytes(b"not ours")
    disk, copy = OsDisk(str(rig.directory)), OsDisk(str(tmp_path / "copy"))
    assert back_up(disk, copy, FakeClock(), link=lambda path: False).next_offset
    disk.close()
    copy.close()


def test_the_folder_for_sorted_buckets_is_one_of_ours(tmp_path: Path) -> None:
    rig = stopped(tmp_path / "data")
    disk = OsDisk(str(rig.directory))
    assert verify_store(disk, FakeClock(), check_groups=len).faults == []
    disk.close()
