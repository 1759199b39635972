"""What became of delayed messages, read at its first use and kept from then on."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from qmq_broker.errors import CorruptionError
from qmq_broker.storage.files import layout
from qmq_broker.storage.schedule.bucket import Bucket, BucketState
from qmq_broker.storage.schedule.columns import Subjects
from qmq_broker.storage.schedule.files import ScheduleFiles, dispatched_frames
from qmq_broker.storage.schedule.states import DelayedState, pack_state
from tests.broker.storage.damaged import flip
from tests.crash.recording_disk import RecordingDisk

HOUR = 1_700_002_800_000


def test_D3_a_fate_that_came_while_the_file_could_not_be_read_is_known_when_it_can() -> None:
    disk = RecordingDisk()
    files = ScheduleFiles(disk, bytes(16))
    files.epoch = 1
    for log in (layout.SCHEDULE, layout.DISPATCH):
        disk.make_directory(log)
    frames = dispatched_frames([pack_state(DelayedState.CANCELLED, 0)])
    dispatch_bytes = files.append(layout.DISPATCH, HOUR, 0, frames, stored_at_ms=1)
    files.sync()
    bucket = Bucket(BucketState(HOUR, 3, 0, 0, 1, dispatch_bytes))
    inode = disk.image.inodes[disk.image.names[layout.bucket_path(layout.DISPATCH, HOUR)] or 0]
    whole = inode.durable
    inode.durable = flip(dispatch_bytes - 4)(whole)
    with pytest.raises(CorruptionError):
        bucket.states(files)
    assert bucket.set_state(files, [1], DelayedState.RELEASED) == [1]
    bucket.settle(DelayedState.RELEASED, [1])
    inode.durable = whole
    states = bucket.states(files)
    assert [states.get(sequence) for sequence in range(3)] == [
        DelayedState.CANCELLED,
        DelayedState.RELEASED,
        DelayedState.PENDING,
    ]
    files.close()


def test_D3_a_reader_in_the_middle_of_a_copy_finds_each_fate_in_the_file_or_before_it() -> None:
    seen: list[tuple[int, int]] = []

    class Watched(Bucket):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if seen:  # what another thread would find now
                seen.append((len(self.undispatched), self.copied.dispatched))

    bucket = Watched(BucketState(HOUR, 3, 0, 0, 1, 100))
    bucket.settle(DelayedState.RELEASED, [1, 2])
    seen.append((2, 1))
    bucket.forget_waiting(BucketState(HOUR, 3, 0, 0, 3, 200), 2)
    assert seen[-1] == (0, 3)
    assert all(left + dispatched >= 3 for left, dispatched in seen), seen


#: How long one thread is given for what it must not be able to do; ends at once when it can.
_CHANCE_S = 0.3


def test_D1_two_threads_that_meet_new_subjects_at_once_give_each_a_number_of_its_own() -> None:
    subjects = Subjects()
    numbers: dict[str, int] = {}
    has_other = threading.Event()

    def meet_other() -> None:
        numbers["invoices"] = subjects.number("invoices")
        has_other.set()

    other = threading.Thread(target=meet_other)

    class Slow(str):
        """While it is put into a table, another thread runs, as the interpreter may let it."""

        looks = 0

        def __hash__(self) -> int:
            self.looks += 1
            if self.looks == 2:
                other.start()
                has_other.wait(_CHANCE_S)
            return super().__hash__()

    numbers["orders"] = subjects.number(Slow("orders"))
    other.join()
    assert {name: subjects.names[number] for name, number in numbers.items()} == {
        "orders": "orders",
        "invoices": "invoices",
    }
