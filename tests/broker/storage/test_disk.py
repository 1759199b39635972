"""The door to files: one contract for the machine's disk and for the double of the crash tests."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from qmq_broker.errors import DiskError, DiskFullError, FilesFullError, LockedError
from qmq_broker.options import StoreOptions
from qmq_broker.storage.files import layout, os_file
from qmq_broker.storage.files.disk import OsDisk
from qmq_broker.storage.files.disk_errors import translate
from qmq_broker.storage.files.disk_port import Disk, DiskFile
from qmq_broker.storage.files.os_file import IOV_MAX
from qmq_broker.storage.store import Store
from tests.crash.recording_disk import RecordingDisk
from tests.kit.clock import FakeClock


@pytest.fixture(params=["machine", "memory"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Disk:
    return OsDisk(str(tmp_path / "data")) if request.param == "machine" else RecordingDisk()


def test_what_was_written_is_read_and_reading_ends_with_the_file(disk: Disk) -> None:
    file = disk.open("a", is_new=True)
    file.write(3, [b"abc", memoryview(b"def")])
    assert file.length() == 9
    assert file.read(0, 100) == b"\0\0\0abcdef"
    assert file.read(4, 2) == b"bc"
    assert file.read(9, 5) == b""
    file.close()
    file.close()


def test_allocated_room_reads_as_zeros_and_nothing_is_shortened(disk: Disk) -> None:
    file = disk.open("a", is_new=True)
    file.write(0, [b"abc"])
    file.allocate(8)
    assert file.read(0, 100) == b"abc\0\0\0\0\0"
    file.allocate(2)
    assert file.length() == 8
    file.truncate(2)
    file.allocate(4)
    assert file.read(0, 100) == b"ab\0\0"
    file.sync()


def test_room_that_was_never_written_is_passed_over(disk: Disk) -> None:
    mib = 1024 * 1024
    file = disk.open("a", is_new=True)
    file.allocate(8 * mib)
    file.write(5 * mib, [b"abc"])
    for position in (0, 1, mib, 5 * mib - 1, 5 * mib, 5 * mib + 1):
        assert position <= file.data_from(position) <= max(position, 5 * mib)
    assert 6 * mib <= file.data_from(6 * mib) <= 8 * mib
    assert file.data_from(8 * mib) == 8 * mib
    file.sync()
    assert file.data_from(mib) == (mib if _knows_no_holes(file) else 5 * mib)
    file.close()


def _knows_no_holes(file: DiskFile) -> bool:
    return file.data_from(0) == 0


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP, errno.EIO])
def test_a_file_system_that_knows_no_holes_has_data_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    file = OsDisk(str(tmp_path)).open("a", is_new=True)
    file.allocate(100)
    with monkeypatch.context() as patched:
        patched.setattr(os, "lseek", refuse)
        if number == errno.EIO:
            with pytest.raises(DiskError, match="seek"):
                file.data_from(7)
        else:
            assert file.data_from(7) == 7
    monkeypatch.setattr(os_file, "_SEEK_DATA", None)
    assert file.data_from(7) == 7
    file.close()


def test_a_write_of_more_parts_than_one_call_takes_is_whole(disk: Disk) -> None:
    parts = [bytes([number % 251]) * 3 for number in range(IOV_MAX * 2 + 5)]
    file = disk.open("a", is_new=True)
    file.write(7, parts)
    assert file.read(7, 10**6) == b"".join(parts)


def test_a_file_that_is_not_there_is_an_error_unless_it_may_be_made(disk: Disk) -> None:
    with pytest.raises(DiskError) as caught:
        disk.open("a")
    assert (caught.value.operation, caught.value.path) == ("open", "a")
    disk.open("a", is_new=True).write(0, [b"x"])
    assert disk.open("a").read(0, 9) == b"x"


def test_names_are_sorted_and_of_one_directory(disk: Disk) -> None:
    assert disk.names("d") == []
    disk.make_directory("d")
    disk.make_directory("d")
    for path in ("d/b", "d/a", "c"):
        disk.open(path, is_new=True)
    assert disk.names("") == ["c", "d"]
    assert disk.names("d") == ["a", "b"]
    disk.sync_directory("d")
    disk.sync_directory("")


def test_a_renamed_file_replaces_what_had_the_name(disk: Disk) -> None:
    disk.open("old", is_new=True).write(0, [b"new content"])
    disk.open("name", is_new=True).write(0, [b"old content"])
    disk.rename("old", "name")
    assert disk.names("") == ["name"]
    assert disk.open("name").read(0, 99) == b"new content"
    disk.unlink("name")
    assert disk.names("") == []


def test_B9_a_second_lock_is_refused_and_the_first_stays(disk: Disk) -> None:
    lock = disk.lock("LOCK", "pid 123")
    with pytest.raises(LockedError):
        disk.lock("LOCK", "pid 456")
    lock.release()
    lock.release()
    disk.lock("LOCK", "pid 456").release()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_B9_a_file_system_without_locks_is_refused_with_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """As some network file systems are: nothing is made but the empty file to be locked."""

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(DiskError, match=r"lock.*use a local one"):
        Store.open(OsDisk(str(tmp_path)), FakeClock(), StoreOptions())
    assert [(path.name, path.stat().st_size) for path in tmp_path.iterdir()] == [("LOCK", 0)]


def test_B6_the_next_holder_of_a_lock_needs_no_more_room_than_the_one_before(
    tmp_path: Path,
) -> None:
    disk = OsDisk(str(tmp_path))
    lengths = set()
    for holder in ("pid 9", "pid 4194304 (store verify)", "pid 10"):
        lock = disk.lock("LOCK", holder)
        text = (tmp_path / "LOCK").read_text()
        lock.release()
        assert text.rstrip() == holder
        lengths.add(len(text))
    assert len(lengths) == 1


def test_B9_another_process_learns_who_holds_the_lock(tmp_path: Path) -> None:
    lock = OsDisk(str(tmp_path)).lock("LOCK", f"pid {os.getpid()}")
    program = (
        "import sys; from qmq_broker.storage.files.disk import OsDisk\n"
        "try: OsDisk(sys.argv[1]).lock('LOCK', 'pid 1')\n"
        "except Exception as error: print(type(error).__name__, error.holder)"
    )
    paths = os.pathsep.join(sys.path)
    outcome = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=60,
    )
    lock.release()
    assert outcome.stdout == f"LockedError pid {os.getpid()}\n", outcome.stderr


@pytest.mark.parametrize("path", ["link", "link/a", "d/link"])
def test_a_symbolic_link_is_not_followed(tmp_path: Path, path: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "a").write_bytes(b"untouched")
    root = tmp_path / "data"
    (root / "d").mkdir(parents=True)
    (root / "link").symlink_to(outside)
    (root / "d" / "link").symlink_to(outside / "a")
    disk = OsDisk(str(root))
    with pytest.raises(DiskError, match=r"symbolic|Not a directory"):
        disk.open(path, is_new=True)
    assert (outside / "a").read_bytes() == b"untouched"
    assert sorted(os.listdir(outside)) == ["a"]


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM])
def test_who_has_no_right_to_a_file_learns_who_has(number: int) -> None:
    error = translate(OSError(number, os.strerror(number)), "open", layout.LOCK)
    assert isinstance(error, DiskError)
    assert str(error).startswith("open of LOCK: ")
    assert "user who owns the data directory" in str(error)


def test_files_are_for_their_owner_only(tmp_path: Path) -> None:
    disk = OsDisk(str(tmp_path / "data"))
    disk.open("a", is_new=True)
    assert (tmp_path / "data" / "a").stat().st_mode & 0o077 == 0
    assert (tmp_path / "data").stat().st_mode & 0o077 == 0


def test_short_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwritev, pwrite = os.pwritev, os.pwrite
    monkeypatch.setattr(
        os,
        "pwritev",
        lambda descriptor, parts, position: pwritev(
            descriptor, [memoryview(b"".join(parts))[:5]], position
        ),
    )
    monkeypatch.setattr(
        os,
        "pwrite",
        lambda descriptor, data, position: pwrite(descriptor, data[:3], position),
    )
    file = OsDisk(str(tmp_path)).open("a", is_new=True)
    file.write(2, [b"abcd", b"efgh", b"ijkl"])
    assert file.read(2, 99) == b"abcdefghijkl"


def test_a_write_that_writes_nothing_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    with pytest.raises(DiskError):
        OsDisk(str(tmp_path)).open("a", is_new=True).write(0, [b"abc"])


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, DiskFullError),
        (errno.EDQUOT, DiskFullError),
        (errno.EMFILE, FilesFullError),
        (errno.ENFILE, FilesFullError),
        (errno.EIO, DiskError),
    ],
)
def test_errors_of_the_machine_become_errors_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception]
) -> None:
    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    disk = OsDisk(str(tmp_path))
    file = disk.open("a", is_new=True)
    monkeypatch.setattr(os, "pwritev", fail)
    with pytest.raises(kind, match="write of a"):
        file.write(0, [b"abc"])
    monkeypatch.setattr(os, "listdir", fail)
    with pytest.raises(kind, match="list of"):
        disk.names("")


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "Make room on the disk"),
        (errno.EDQUOT, "below this quota, or raise it"),
        (errno.EMFILE, "Raise the limit of open files"),
        (errno.EROFS, "mount it for writing"),
        (errno.EACCES, "as the user who owns"),
    ],
)
def test_an_error_of_the_machine_says_what_to_do(number: int, remedy: str) -> None:
    error = translate(OSError(number, os.strerror(number)), "write", "a")
    assert os.strerror(number) in str(error)
    assert remedy in str(error)


def test_without_preallocation_a_file_still_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    file = OsDisk(str(tmp_path)).open("a", is_new=True)
    for allocate in (unsupported, None):
        monkeypatch.setattr(os_file, "_allocate", allocate)
        file.allocate(file.length() + 4096)
    assert file.length() == 8192
    file.allocate(100)
    assert file.length() == 8192


def test_a_root_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    with pytest.raises(DiskError):
        OsDisk(str(tmp_path / "a"))


def test_free_space_is_counted(disk: Disk) -> None:
    assert disk.free_bytes() > 0


def test_a_read_only_disk_reads_what_nobody_may_write_and_makes_nothing(tmp_path: Path) -> None:
    OsDisk(str(tmp_path)).open("a", is_new=True).write(0, [b"abc"])
    os.chmod(tmp_path / "a", 0o400)
    disk = OsDisk(str(tmp_path), is_read_only=True)
    file = disk.open("a")
    assert file.read(0, 10) == b"abc"
    with pytest.raises(DiskError):
        file.write(0, [b"x"])
    with pytest.raises(DiskError):
        disk.open("b", is_new=True)
    with pytest.raises(DiskError):
        OsDisk(str(tmp_path / "none"), is_read_only=True)
    assert os.listdir(tmp_path) == ["a"]
    assert not (tmp_path / "none").exists()
    assert (tmp_path / "a").read_bytes() == b"abc"
