"""B13, B9: what is not known word for word is refused, and not a byte of the directory changes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from qmq_broker.errors import (
    CorruptionError,
    LockedError,
    SharedFilesError,
    StoreError,
    UnknownFormatError,
)
from qmq_broker.options import StoreOptions
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.disk import OsDisk
from qmq_broker.storage.files.small_file import replace_file, unseal
from qmq_broker.storage.store import Store
from qmq_broker.storage.upkeep.quarantine import quarantine_damage
from qmq_broker.storage.upkeep.rebuild import rebuild_store
from qmq_client.wire.message_id import MessageIds
from tests.crash.world import OPTIONS, make_frame
from tests.kit.clock import FakeClock


def tree(root: Path) -> dict[str, tuple[bytes, int]]:
    """Every file with its content and time of change, but the lock."""
    return {
        str(path.relative_to(root)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.name != layout.LOCK
    }


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A data directory with messages, stopped in order."""
    store = Store.open(OsDisk(str(tmp_path)), FakeClock(), OPTIONS)
    store.append([make_frame(MessageIds(7), {"orders": [10, 20]})])
    store.commit_and_step()
    store.close()
    return tmp_path


def refused(root: Path, options: StoreOptions = OPTIONS) -> StoreError:
    before = tree(root)
    with pytest.raises(StoreError) as caught:
        Store.open(OsDisk(str(root)), FakeClock(), options)
    assert tree(root) == before
    return caught.value


def rewrite(root: Path, change: Callable[[bytes], bytes]) -> None:
    """Give FORMAT other content with a right checksum."""
    content = unseal((root / layout.FORMAT).read_bytes())
    assert content is not None
    replace_file(OsDisk(str(root)), layout.FORMAT, change(content))


def test_B13_another_version_is_refused_and_named(root: Path) -> None:
    rewrite(root, lambda content: content.replace(b'"version":1', b'"version":2'))
    error = refused(root)
    assert isinstance(error, UnknownFormatError)
    assert (error.setting, error.found, error.known) == ("format version", "2", "1")


def test_B13_another_checksum_is_refused_and_named(root: Path) -> None:
    rewrite(root, lambda content: content.replace(b'"crc32c"', b'"crc64"'))
    error = refused(root)
    assert isinstance(error, UnknownFormatError)
    assert (error.setting, error.found, error.known) == ("checksum", "crc64", "crc32c")


@pytest.mark.parametrize(
    ("setting", "value"),
    [("segment_bytes", 4096), ("action_segment_bytes", 4096), ("queue_entries_per_file", 9)],
)
def test_B13_another_size_of_files_is_refused_and_named(
    root: Path, setting: str, value: int
) -> None:
    error = refused(root, replace(OPTIONS, **{setting: value}))  # type: ignore[arg-type]  # any one setting
    assert isinstance(error, UnknownFormatError)
    assert (error.setting, error.known) == (setting, str(value))
    assert error.found == str(getattr(OPTIONS, setting))


def test_a_directory_keeps_its_length_of_segments_where_none_is_said(root: Path) -> None:
    before = (root / layout.FORMAT).read_bytes()
    store = Store.open(OsDisk(str(root)), FakeClock(), replace(OPTIONS, segment_bytes=0))
    store.append([make_frame(MessageIds(7), {"orders": [10, 20]})])
    store.commit_and_step()
    store.close()
    assert (root / layout.FORMAT).read_bytes() == before
    Store.open(OsDisk(str(root)), FakeClock(), OPTIONS).close()


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"\xff" * 100, b'{"version":"1"}', b'{"version":1}', b"[1]"]
)
def test_B13_a_format_that_makes_no_sense_is_refused(root: Path, content: bytes) -> None:
    rewrite(root, lambda _: content)
    assert isinstance(refused(root), CorruptionError | UnknownFormatError)


def test_B13_any_altered_bit_of_the_format_is_refused(root: Path) -> None:
    path = root / layout.FORMAT
    content = path.read_bytes()
    for position in range(len(content)):
        altered = bytearray(content)
        altered[position] ^= 1 << position % 8
        path.write_bytes(bytes(altered))
        assert isinstance(refused(root), CorruptionError | UnknownFormatError), position


def test_B13_files_without_a_format_are_refused(root: Path) -> None:
    (root / layout.FORMAT).unlink()
    error = refused(root)
    assert isinstance(error, UnknownFormatError)
    assert "missing" in error.found


@pytest.mark.parametrize(
    "name",
    [
        *(layout.COMMIT_LOG, layout.ACTION_LOG, layout.CONSUME_QUEUES, layout.SCHEDULE),
        *(layout.DISPATCH, layout.SORTED, layout.INDEX, layout.SUMMARIES, layout.IDS),
        *(layout.ENTRIES, layout.STATE, layout.QUARANTINE, layout.CLEAN, *layout.CHECKPOINTS),
    ],
)
def test_B13_what_is_left_of_a_store_without_its_format_is_refused(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / name).write_bytes(b"")
    error = refused(tmp_path)
    assert isinstance(error, UnknownFormatError)
    assert error.found.endswith(name)


def test_B9_a_second_broker_is_refused_before_it_touches_anything(tmp_path: Path) -> None:
    first = Store.open(OsDisk(str(tmp_path)), FakeClock(), OPTIONS)
    first.append([make_frame(MessageIds(7), {"orders": 10})])
    before = tree(tmp_path)
    lock_text = (tmp_path / layout.LOCK).read_bytes()
    with pytest.raises(LockedError) as caught:
        Store.open(OsDisk(str(tmp_path)), FakeClock(), OPTIONS)
    assert caught.value.holder == f"pid {os.getpid()}"
    assert tree(tmp_path) == before
    assert (tmp_path / layout.LOCK).read_bytes() == lock_text
    first.commit_and_step()
    first.close()
    Store.open(OsDisk(str(tmp_path)), FakeClock(), OPTIONS).close()


def test_B9_a_second_broker_is_refused_while_the_first_one_has_made_nothing_yet(
    tmp_path: Path,
) -> None:
    first = OsDisk(str(tmp_path))
    lock = first.lock(layout.LOCK, "another")
    with pytest.raises(LockedError):
        Store.open(OsDisk(str(tmp_path)), FakeClock(), OPTIONS)
    assert [path.name for path in tmp_path.iterdir()] == [layout.LOCK]
    lock.release()


def linked_copy(root: Path, target: Path) -> Path:
    """As `cp -al` makes it, without its lock file."""
    shutil.copytree(root, target, copy_function=os.link)
    (target / layout.LOCK).unlink()
    return target


def test_B9_a_hard_linked_copy_is_refused_beside_its_original_and_alone(tmp_path: Path) -> None:
    root = tmp_path / "original"
    first = Store.open(OsDisk(str(root)), FakeClock(), OPTIONS)
    first.append([make_frame(MessageIds(7), {"orders": 10})])
    first.commit_and_step()
    copy = linked_copy(root, tmp_path / "copy")
    error = refused(copy)
    assert isinstance(error, SharedFilesError)
    assert (error.path, error.names) == (layout.CHECKPOINTS[0], 2)
    first.close()
    for directory in (root, copy):
        assert isinstance(refused(directory), SharedFilesError)
        for work in (quarantine_damage, rebuild_store):
            before = tree(directory)
            with pytest.raises(SharedFilesError):
                work(OsDisk(str(directory)), FakeClock())
            assert tree(directory) == before
    shutil.copytree(copy, tmp_path / "whole")
    shutil.rmtree(copy)
    for directory in (root, tmp_path / "whole"):
        store = Store.open(OsDisk(str(directory)), FakeClock(), OPTIONS)
        assert store.subjects() == ["orders"]
        store.close()


def test_a_store_that_did_not_open_gives_the_lock_back(root: Path) -> None:
    refused(root, replace(OPTIONS, segment_bytes=4096))
    Store.open(OsDisk(str(root)), FakeClock(), OPTIONS).close()


def test_strangers_files_beside_ours_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "notes.txt").write_bytes(b"mine")
    store = Store.open(OsDisk(str(tmp_path)), FakeClock(), OPTIONS)
    store.append([make_frame(MessageIds(7), {"orders": 10})])
    store.commit_and_step()
    store.close()
    for name in ("note", "123", "0" * 19 + "1", "0" * 20 + ".bak"):
        (tmp_path / layout.COMMIT_LOG / name).write_bytes(b"mine")
    world = Store.open(OsDisk(str(tmp_path)), FakeClock(), OPTIONS)
    assert world.subjects() == ["orders"]
    world.close()
    assert (tmp_path / "notes.txt").read_bytes() == b"mine"
    assert (tmp_path / layout.COMMIT_LOG / "123").read_bytes() == b"mine"
