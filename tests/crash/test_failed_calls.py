"""Each call of the disk fails, one after the other: reads, openings and looks at names as well.

`tests/faults/test_store_syscalls.py` does the same to a whole process, for calls that change something.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import pytest

from qmq_broker.errors import (
    DiskError,
    DiskFullError,
    FilesFullError,
    NoRoomError,
    PoisonedError,
)
from qmq_broker.storage.store import Store
from tests.crash.enumeration import SEED
from tests.crash.promises import check
from tests.crash.recording_disk import Image, RecordingDisk, RecordingFile
from tests.crash.scenarios import (
    Scenario,
    checkpoints_and_flushes,
    clean_stops,
    first_start,
    kills_among_recycled_segments,
    snapshots,
)
from tests.crash.world import RETAINING, History, World
from tests.kit.clock import FakeClock

MakeError = Callable[[str, str], Exception]


def _no_room(operation: str, path: str) -> Exception:
    if operation == "open":
        return FilesFullError("too many open files")
    return DiskFullError("no space left")


def _failure(operation: str, path: str) -> Exception:
    return DiskError(operation=operation, path=path, reason="Input/output error")


#: No start and no life here makes so many.
CALLS_MAX = 10_000
EVERY = 7
ERRORS: dict[str, MakeError] = {"a failure": _failure, "no room": _no_room}


class FailingDisk(RecordingDisk):
    """A disk whose n-th call fails and leaves nothing behind; all others work."""

    def __init__(self, image: Image | None, number: int, make_error: MakeError) -> None:
        super().__init__(image)
        self._left = number
        self._make_error = make_error
        #: What was refused; empty while nothing was.
        self.failed = ""

    def ask(self, operation: str, path: str) -> None:
        """Count a call, and refuse it when it is the one."""
        self._left -= 1
        if not self._left:
            self.failed = f"{operation} {path}"
            raise self._make_error(operation, path)

    def open(self, path: str, *, is_new: bool = False) -> RecordingFile:
        self.ask("open", path)
        file = super().open(path, is_new=is_new)
        return _FailingFile(self, path, file.number)

    def names(self, directory: str) -> list[str]:
        self.ask("list", directory)
        return super().names(directory)

    def make_directory(self, path: str) -> None:
        self.ask("make", path)
        super().make_directory(path)

    def sync_directory(self, path: str) -> None:
        self.ask("sync of directory", path)
        super().sync_directory(path)

    def rename(self, old: str, new: str) -> None:
        self.ask("rename", old)
        super().rename(old, new)

    def unlink(self, path: str) -> None:
        self.ask("unlink", path)
        super().unlink(path)

    def free_bytes(self) -> int:
        self.ask("free space", "")
        return super().free_bytes()

    @property
    def is_locked(self) -> bool:
        """Whether somebody has the directory."""
        return self._is_locked


class _FailingFile(RecordingFile):
    def __init__(self, disk: FailingDisk, path: str, number: int) -> None:
        super().__init__(disk, path, number)
        self._ask = disk.ask

    def read(self, position: int, count: int) -> bytes:
        self._ask("read", self.path)
        return super().read(position, count)

    def write(self, position: int, parts: Sequence[bytes | memoryview]) -> None:
        self._ask("write", self.path)
        super().write(position, parts)

    def sync(self) -> None:
        self._ask("sync", self.path)
        super().sync()

    def allocate(self, length: int) -> None:
        self._ask("allocate", self.path)
        super().allocate(length)

    def truncate(self, length: int) -> None:
        self._ask("truncate", self.path)
        super().truncate(length)

    def length(self) -> int:
        self._ask("length", self.path)
        return super().length()

    def links(self) -> int:
        self._ask("look", self.path)
        return super().links()


def _numbers(request: pytest.FixtureRequest) -> range:
    """Which calls fail: each of them before a release, else some, by the seed."""
    if request.config.getoption("--release"):
        return range(1, CALLS_MAX)
    return range(1 + SEED % EVERY, CALLS_MAX, EVERY)


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize(
    "scenario",
    [first_start, checkpoints_and_flushes, clean_stops, snapshots, kills_among_recycled_segments],
    ids=lambda scenario: scenario.__name__,
)
def test_B3_B5_a_start_that_is_refused_a_call_ends_with_the_reason_and_harms_nothing(
    scenario: Scenario, error: str, request: pytest.FixtureRequest
) -> None:
    before = RecordingDisk()
    known = scenario(before).history
    for number in _numbers(request):
        disk = FailingDisk(before.image, number, ERRORS[error])
        with suppress(DiskError, NoRoomError):
            Store.open(disk, FakeClock(), known.options).close()
        assert not disk.is_locked, disk.failed
        check(disk.image.copy(), known)
        if not disk.failed:
            assert number > 30
            return
    pytest.fail("a start has no end")


def _live(disk: FailingDisk, history: History) -> None:
    """A life with all that a store does; goes on when there was no room, ends when something failed."""
    world = World(disk, history=history, options=RETAINING)
    store = world.store
    try:
        for round_ in range(4):
            for work in (
                lambda: world.send(world.frame(orders=[300] * 2)),
                lambda: world.send(world.frame(orders=500, invoices=[20] * 3)),
                lambda: world.act(2),
                world.sync_actions,
                lambda: store.index.step(10_000),
                lambda: store.summaries.step(10_000),
                lambda: store.spare_maker.step(is_busy=False),
                lambda: world.clock.pass_ms(1_100),
                store.step,
                world.note_groups if round_ % 2 else store.step,
                world.give_up if round_ % 2 else store.step,
            ):
                with suppress(NoRoomError):
                    work()
    except (PoisonedError, DiskError):
        assert disk.failed, "nothing else ends a life"
    with suppress(PoisonedError, DiskError, NoRoomError):
        store.close()


@pytest.mark.parametrize("error", ERRORS)
def test_B3_B5_B6_a_life_that_is_refused_a_call_acknowledges_nothing_that_is_lost(
    error: str, request: pytest.FixtureRequest
) -> None:
    for number in _numbers(request):
        disk = FailingDisk(None, number, ERRORS[error])
        history = History(options=RETAINING)
        with suppress(DiskError, NoRoomError):
            _live(disk, history)
        assert not disk.is_locked, disk.failed
        check(disk.image.copy(), history)
        if not disk.failed:
            assert number > 300
            return
    pytest.fail("a life has no end")
