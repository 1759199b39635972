"""Which call makes bytes durable, by what a system has."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from qmq_broker.errors import DiskError, DiskFullError
from qmq_broker.storage.files import disk, os_file
from qmq_broker.storage.files.disk import OsDisk
from qmq_broker.storage.files.os_file import choose_syncs


def test_B1_data_is_synced_without_times_and_names_with_everything() -> None:
    assert choose_syncs(None, os.fdatasync, os.fsync) == (os.fdatasync, os.fsync)


def test_B1_without_a_call_for_data_everything_is_synced() -> None:
    assert choose_syncs(None, None, os.fsync) == (os.fsync, os.fsync)


def test_B1_where_a_sync_leaves_the_drives_cache_alone_the_full_one_is_called(
    tmp_path: Path,
) -> None:
    # F_GETFD stands for the command of macOS: it shows that `fcntl` is called with it.
    for sync in choose_syncs(fcntl.F_GETFD, os.fdatasync, os.fsync):
        descriptor = os.open(tmp_path, os.O_RDONLY | os.O_CLOEXEC)
        assert sync(descriptor) == fcntl.FD_CLOEXEC
        os.close(descriptor)


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The directories that are synced, in order."""
    paths: list[Path] = []

    def sync(descriptor: int) -> None:
        paths.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        os.fsync(descriptor)

    monkeypatch.setattr(disk, "sync_all", sync)
    return paths


def test_B1_every_name_that_leads_to_a_new_data_directory_is_durable_before_anything_is_in_it(
    tmp_path: Path, synced: list[Path]
) -> None:
    root = tmp_path / "several" / "levels" / "data"
    OsDisk(str(root)).close()
    assert synced[:3] == list(root.parents)[:3]
    assert not list(root.iterdir())


def test_B1_names_that_a_killed_process_made_are_synced_by_the_next(
    tmp_path: Path, synced: list[Path]
) -> None:
    root = tmp_path / "level" / "data"
    root.mkdir(parents=True)
    OsDisk(str(root)).close()
    assert synced[:2] == list(root.parents)[:2]
    synced.clear()
    (root / "LOCK").touch()
    OsDisk(str(root)).close()
    assert not synced, "whoever made the first file in it had seen to that"


def test_names_above_a_directory_that_may_not_be_looked_into_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "mine" / "data"
    root.mkdir(parents=True)
    asked: list[str] = []

    def refuse(directory: str) -> None:
        asked.append(directory)
        raise PermissionError(13, "Permission denied", directory)

    monkeypatch.setattr(disk, "_sync_names", refuse)
    made = OsDisk(str(root))
    assert made.names("") == []
    assert asked == [str(root.parent)]
    made.close()


def test_a_look_at_a_directory_syncs_and_makes_nothing(tmp_path: Path, synced: list[Path]) -> None:
    OsDisk(str(tmp_path), is_read_only=True).close()
    assert not synced


#: What a sync may be asked of, once the directory is locked.
SYNCS: dict[str, Callable[[OsDisk], None]] = {
    "file": lambda made: made.open("a").sync(),
    "names": lambda made: made.sync_directory(""),
}


def _locked(root: Path) -> OsDisk:
    made = OsDisk(str(root))
    made.open("a", is_new=True).write(0, [b"accepted"])
    made.lock("LOCK", "pid 7")
    return made


@pytest.mark.parametrize("sync", SYNCS.values(), ids=SYNCS)
@pytest.mark.parametrize("number", [errno.EROFS, errno.EIO])
def test_B1_B5_a_sync_that_says_yes_on_a_file_system_that_takes_no_changes_is_not_believed(
    number: int,
    sync: Callable[[OsDisk], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = _locked(tmp_path)

    def refuse(descriptor: int, position: int, length: int) -> None:
        assert Path(os.readlink(f"/proc/self/fd/{descriptor}")).name == "LOCK"
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os_file, "_allocate", refuse)
    with pytest.raises(DiskError, match=os.strerror(number)):
        sync(made)


@pytest.mark.parametrize("sync", SYNCS.values(), ids=SYNCS)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EOPNOTSUPP])
def test_B6_a_sync_is_believed_on_a_full_disk_and_on_one_without_preallocation(
    number: int,
    sync: Callable[[OsDisk], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = _locked(tmp_path)
    asked: list[int] = []

    def refuse(descriptor: int, position: int, length: int) -> None:
        asked.append(length)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os_file, "_allocate", refuse)
    sync(made)
    assert asked == [1]


def test_B9_whether_syncs_are_believed_is_found_out_without_keeping_the_lock(
    tmp_path: Path,
) -> None:
    made = OsDisk(str(tmp_path))
    lock = made.lock("LOCK", "pid 7")
    file = made.open("a", is_new=True)
    lock.release()
    made.lock("LOCK", "pid 8").release()
    file.sync()
    assert (tmp_path / "LOCK").read_bytes().rstrip() == b"pid 8"


#: How long one thread is given for what it must not be able to do; ends at once when it can.
_CHANCE_S = 0.3


def test_B1_B5_a_failed_sync_that_the_system_reports_once_is_told_to_every_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = OsDisk(str(tmp_path))
    file = made.open("a", is_new=True)
    was_told = threading.Event()
    outcomes: list[str] = []

    def sync() -> None:
        try:
            file.sync()
            outcomes.append("synced")
        except DiskError as error:
            outcomes.append(error.reason)
        was_told.set()

    def fail_once(descriptor: int) -> None:
        monkeypatch.setattr(os_file, "sync_data", os.fdatasync)  # the error is reported by now
        second.start()
        was_told.wait(_CHANCE_S)  # as long as the kernel likes, before the first one is told
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    second = threading.Thread(target=sync)
    monkeypatch.setattr(os_file, "sync_data", fail_once)
    sync()
    second.join()
    assert len(outcomes) == 2
    assert all(os.strerror(errno.EIO) in outcome for outcome in outcomes), outcomes
    made.close()


def test_B5_a_file_whose_sync_failed_for_want_of_room_is_not_synced_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = OsDisk(str(tmp_path))
    file = made.open("a", is_new=True)

    def refuse(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os_file, "sync_data", refuse)
    with pytest.raises(DiskFullError):
        file.sync()
    monkeypatch.setattr(os_file, "sync_data", os.fdatasync)
    with pytest.raises(DiskError, match="not tried again"):
        file.sync()
    made.open("a").sync()
    made.close()
