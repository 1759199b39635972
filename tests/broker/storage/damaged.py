"""A data directory whose files a test may damage."""

from __future__ import annotations

from collections.abc import Callable, Collection

import pytest

from qmq_broker.errors import CorruptionError
from qmq_broker.storage.files import layout
from qmq_broker.storage.store import Store
from tests.crash.recording_disk import RecordingDisk
from tests.crash.world import OPTIONS, World, records_of
from tests.kit.clock import FakeClock


class Directory:
    """A data directory whose files a test may damage."""

    def __init__(self, *, is_clean: bool, has_checkpoint: bool = True) -> None:
        self.world = World(RecordingDisk())
        for count in range(12):
            self.world.send(self.world.frame(orders=[60, 20 + count], Invoices=30))
            self.world.act(2)
        self.world.sync_actions()
        if has_checkpoint:
            self.world.clock.pass_ms(10_000)
            self.world.store.step()
            # The checkpoint began a flush of the queues; this finishes it.
            self.world.store.step()
        self.records = {
            subject: records_of(self.world.store, subject)
            for subject in self.world.store.subjects()
        }
        self.next_offset = self.world.store.durable_offset
        if is_clean:
            self.world.store.close()
        self.image = self.world.disk.image

    def content(self, path: str) -> bytes:
        number = self.image.names[path]
        assert number is not None
        return self.image.inodes[number].seen

    def put(self, path: str, content: bytes) -> None:
        number = self.image.names[path]
        assert number is not None
        self.image.inodes[number].durable = content
        self.image.inodes[number].versions.clear()

    def change(self, path: str, change: Callable[[bytes], bytes]) -> None:
        self.put(path, change(self.content(path)))

    def remove(self, path: str) -> None:
        for name in [name for name in self.image.names if f"{name}/".startswith(f"{path}/")]:
            del self.image.names[name]

    def forget_queues(self) -> None:
        """Let a start make the queues anew, so that it looks at every frame."""
        for path in (*layout.QUEUE_TABLES, layout.ENTRIES):
            self.remove(path)

    def files(self) -> dict[str, bytes]:
        return {
            path: self.content(path)
            for path, number in self.image.names.items()
            if number is not None and path != layout.LOCK
        }

    def open(self) -> Store:
        return Store.open(RecordingDisk(self.image), FakeClock(), OPTIONS)

    def refusal(self) -> CorruptionError:
        """The report of an opening that must fail and change nothing."""
        disk = RecordingDisk(self.image)
        before = self.files()
        with pytest.raises(CorruptionError) as caught:
            Store.open(disk, FakeClock(), OPTIONS)
        self.image = disk.image
        assert {path: content for path, content in self.files().items() if path in before} == before
        assert not set(self.files()) - set(before)
        return caught.value

    def assert_all_there(self) -> Store:
        store = self.open()
        assert {name: records_of(store, name) for name in store.subjects()} == self.records
        assert list(store.actions.replay()) == [a for a, _ in self.world.history.actions]
        return store


def flip(position: int) -> Callable[[bytes], bytes]:
    """Alter one bit of a byte."""

    def change(content: bytes) -> bytes:
        altered = bytearray(content)
        altered[position] ^= 1 << position % 8
        return bytes(altered)

    return change


#: What says up to where the commit log was synced.
WITNESSES: dict[str, tuple[str, ...]] = {
    "checkpoints": layout.CHECKPOINTS,
    "table of the queues": layout.QUEUE_TABLES,
    "journal of entries": (layout.ENTRIES,),
    "journal of ids": (layout.IDS,),
    "table of delayed messages": (layout.SCHEDULE_TABLE,),
}


def without_its_last_frame(*, witnesses: Collection[str]) -> Directory:
    """A stopped directory whose log ends too early, as if it had ended there, with these witnesses."""
    directory = Directory(is_clean=True)
    last_offset = directory.world.history.sent[-1].placed.physical_offset
    position = last_offset % OPTIONS.segment_bytes
    path = layout.segment_path(layout.COMMIT_LOG, last_offset - position)
    directory.change(path, lambda content: content[:position])
    for paths in [WITNESSES[name] for name in WITNESSES.keys() - set(witnesses)]:
        for path in paths:
            directory.remove(path)
    return directory
