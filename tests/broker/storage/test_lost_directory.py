"""B1, B9: a store whose data directory is taken away under it accepts nothing more.

A lock holds a file, not a path: what another process opens under the path may be something else.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from qmq_broker.errors import DiskError, PoisonedError
from qmq_broker.storage.files import os_file
from qmq_broker.storage.files.disk import OsDisk
from qmq_broker.storage.store import Store
from qmq_client.wire.frame import MessageFrame
from tests.crash.recording_disk import RecordingDisk
from tests.crash.world import OPTIONS, World, visible
from tests.kit.clock import FakeClock


def link_copy(data: Path, copy: Path) -> None:
    """Make what `cp -al` makes: a directory whose files are the same under second names."""
    shutil.copytree(data, copy, copy_function=os.link)


def remove_directory(data: Path) -> None:
    shutil.rmtree(data)


def remove_lock(data: Path) -> None:
    (data / "LOCK").unlink()


def replace_lock(data: Path) -> None:
    (data / "LOCK").unlink()
    (data / "LOCK").write_bytes(b"")


def move_directory(data: Path) -> None:
    data.rename(data.with_name("elsewhere"))


def replace_directory(data: Path) -> None:
    data.rename(data.with_name("elsewhere"))
    shutil.copytree(data.with_name("elsewhere"), data)


def replace_directory_by_links(data: Path) -> None:
    data.rename(data.with_name("elsewhere"))
    link_copy(data.with_name("elsewhere"), data)


def remove_segment(data: Path) -> None:
    (segment,) = (data / "commitlog").iterdir()
    segment.unlink()


LOSSES = [
    remove_directory,
    remove_lock,
    replace_lock,
    move_directory,
    replace_directory,
    replace_directory_by_links,
    remove_segment,
]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


def open_store(data: Path) -> Store:
    return Store.open(OsDisk(str(data)), FakeClock(), OPTIONS)


def send(store: Store, frame: MessageFrame) -> None:
    store.append([frame])
    store.commit_and_step()


@pytest.mark.parametrize("lose", LOSSES)
def test_B1_a_lost_directory_or_file_is_found_before_the_next_answer(
    data: Path, lose: Callable[[Path], None]
) -> None:
    store = open_store(data)
    frames = World(RecordingDisk())
    send(store, frames.frame(orders=10))
    lose(data)
    with pytest.raises(PoisonedError):
        send(store, frames.frame(orders=10))
    assert visible(store) == {"orders": 1}
    with pytest.raises(PoisonedError):
        store.append([frames.frame(orders=10)])
    store.close()


@pytest.mark.parametrize("lose", LOSSES)
def test_B1_what_is_lost_between_writing_and_syncing_is_not_answered(
    data: Path, lose: Callable[[Path], None]
) -> None:
    store = open_store(data)
    store.append([World(RecordingDisk()).frame(orders=10)])
    lose(data)
    with pytest.raises(PoisonedError, match=r"replaced|removed|No such file"):
        store.commit_and_step()
    assert visible(store) == {}
    store.close()


@pytest.mark.parametrize("lose", LOSSES)
def test_B1_what_is_lost_during_the_sync_is_not_answered(
    data: Path, lose: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(data)
    store.append([World(RecordingDisk()).frame(orders=10)])
    sync_data = os_file.sync_data

    def lose_meanwhile(descriptor: int) -> object:
        lose(data)
        return sync_data(descriptor)

    monkeypatch.setattr(os_file, "sync_data", lose_meanwhile)
    with pytest.raises(PoisonedError, match=r"replaced|removed|No such file"):
        store.commit()
    assert visible(store) == {}
    store.close()


def test_a_copy_of_links_made_meanwhile_is_no_loss(data: Path) -> None:
    store = open_store(data)
    link_copy(data, data.with_name("copy"))
    send(store, World(RecordingDisk()).frame(orders=10))
    assert visible(store) == {"orders": 1}
    store.close()


def test_B9_an_idle_store_finds_a_lost_lock_too_and_leaves_what_another_one_made(
    data: Path,
) -> None:
    store = open_store(data)
    remove_lock(data)
    other = open_store(data)
    with pytest.raises(PoisonedError, match="LOCK"):
        store.step()
    store.close()
    assert not (data / "CLEAN").exists()
    frame = World(RecordingDisk()).frame(orders=10)
    send(other, frame)
    other.close()
    assert (data / "CLEAN").exists()
    again = open_store(data)
    assert again.recovery.clean
    assert visible(again) == {"orders": 1}
    again.close()


def test_B9_a_store_that_was_replaced_makes_no_clean_mark(data: Path) -> None:
    store = open_store(data)
    remove_lock(data)
    with pytest.raises(PoisonedError):
        store.close()
    assert not (data / "CLEAN").exists()


def test_a_closed_disk_leaves_the_lock_its_own(data: Path) -> None:
    disk = OsDisk(str(data))
    lock = disk.lock("LOCK", "pid 1")
    disk.close()
    lock.check()
    remove_lock(data)
    with pytest.raises(DiskError):
        lock.check()
    lock.release()
