"""Reading while the writer writes, and syncing actions while they are written."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from qmq_broker.storage.files import layout
from qmq_broker.storage.files.disk import OsDisk
from qmq_broker.storage.logs.segments import Segments
from qmq_broker.storage.store import Store
from qmq_client.group.actions import Acked
from qmq_client.wire.message_id import MessageIds
from tests.crash.recording_disk import Operation, RecordingDisk
from tests.crash.world import OPTIONS, World, make_frame
from tests.kit.clock import FakeClock

COMMITS = 150
#: Small queue files and few open ones, so that readers meet flushes and closed files.
SETTINGS = replace(OPTIONS, open_files=4, queue_flush_bytes=1, checkpoint_ms=1)
JOIN_S = 60


def test_B2_readers_beside_the_writer_see_whole_runs_of_durable_messages(tmp_path: Path) -> None:
    clock = FakeClock()
    store = Store.open(OsDisk(str(tmp_path)), clock, SETTINGS)
    expected: dict[str, list[bytes]] = {"orders": [], "Orders": [], "invoices": []}
    has_ended = threading.Event()
    faults: list[str] = []

    def read() -> None:
        rounds = 0
        try:
            while not has_ended.is_set() or not rounds:
                rounds += 1
                for subject in store.subjects():
                    queue = store.queue(subject)
                    assert queue is not None
                    count = queue.next_sequence
                    first = max(0, count - 2_000) if rounds % 3 else 0
                    entries = queue.entries(first, count - first)
                    records = store.read_records(entries, subject=subject)
                    assert records == expected[subject][first:count], subject
        except Exception as error:  # the top of this thread
            faults.append(repr(error))

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    ids = MessageIds(7)
    for number in range(COMMITS):
        frame = make_frame(ids, {"orders": [number % 90] * 3, "Orders": 20, "invoices": [5] * 2})
        for subject, record in frame.records():
            expected[subject].append(record)
        store.append([frame])
        store.commit_and_step()
        clock.pass_ms(2)
    has_ended.set()
    for reader in readers:
        reader.join(JOIN_S)
        assert not reader.is_alive()
    assert faults == []
    store.close()


def test_actions_may_be_synced_while_they_are_written(tmp_path: Path) -> None:
    store = Store.open(OsDisk(str(tmp_path)), FakeClock(), SETTINGS)
    has_ended = threading.Event()
    faults: list[str] = []

    def sync() -> None:
        try:
            while not has_ended.is_set():
                store.actions.sync()
                log = store.actions.log
                assert log.durable_offset <= log.written_offset
        except Exception as error:  # the top of this thread
            faults.append(repr(error))

    helper = threading.Thread(target=sync)
    helper.start()
    actions = [Acked(1, "orders", "billing", "one", n, n + 1) for n in range(2_000)]
    for action in actions:
        store.actions.append([action])
    has_ended.set()
    helper.join(JOIN_S)
    assert not helper.is_alive()
    assert faults == []
    store.close()
    store = Store.open(OsDisk(str(tmp_path)), FakeClock(), SETTINGS)
    assert list(store.actions.replay()) == actions
    store.close()


class _ReadMeanwhile(RecordingDisk):
    """Before each operation takes effect, somebody reads: as another thread may."""

    def __init__(self) -> None:
        super().__init__()
        self.read: Callable[[], None] = lambda: None

    def perform(self, call: str, path: str, operation: Operation) -> None:
        self.read()
        super().perform(call, path, operation)


def test_what_a_log_says_is_written_is_there_for_whoever_reads_meanwhile() -> None:
    disk = _ReadMeanwhile()
    world = World(disk)
    log = world.store.actions.log

    def content() -> bytes:
        end = log.written_offset
        return b"".join(
            log.read(base, min(end - base, log.segment_bytes)) for base in log.bases() if base < end
        )

    seen: list[bytes] = []
    disk.read = lambda: seen.append(content())
    for count in range(40):
        world.act(1 + count % 3)
    disk.read = lambda: None
    assert len(log.bases()) > 2
    assert all(content().startswith(one) for one in seen)
    world.store.close()


def test_a_sync_that_ends_behind_a_roll_takes_back_nothing_of_what_the_roll_made_durable() -> None:
    disk = _ReadMeanwhile()
    world = World(disk)
    log = world.store.actions.log
    world.act()

    def roll() -> None:
        disk.read = lambda: None
        while len(log.bases()) < 2:
            world.act(3)

    disk.read = roll
    world.store.actions.sync()
    assert log.durable_offset > log.bases()[-1]
    world.store.close()


def test_a_segment_given_up_meanwhile_hides_no_other_from_a_reader() -> None:
    world = World(RecordingDisk())
    while len(world.store.actions.log.bases()) < 3:
        world.act(3)
    world.store.close()
    segments = Segments(world.disk, layout.ACTION_LOG, OPTIONS.segment_bytes)
    first, second, *_ = segments.bases

    class Shifting(list[int]):
        """Before a part of it is taken the writer runs, as the interpreter may let it."""

        def __getitem__(self, key: Any) -> Any:
            if isinstance(key, slice) and first in self:
                segments.give_up(first)
            return super().__getitem__(key)

    segments.bases = Shifting(segments.bases)
    assert second in segments.bases_from(second)
    segments.close()
