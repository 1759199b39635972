"""Spare segments made ahead of need: taken up at a roll, harmless at any crash, never in the way."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qmq_broker.errors import DiskError, DiskFullError, PoisonedError
from qmq_broker.options import StoreOptions
from qmq_broker.storage.files import layout
from qmq_broker.storage.logs import spares
from qmq_broker.storage.store import Store
from tests.broker.storage.test_failures import FailingDisk
from tests.crash.enumeration import crash_everywhere
from tests.crash.recording_disk import Operation, RecordingDisk
from tests.crash.world import OPTIONS, History, World
from tests.kit.clock import FakeClock

SEGMENT = OPTIONS.segment_bytes
#: One segment in the middle of being filled takes four of these.
BODY = 420


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spares, "STEP_BYTES", 700)


class WatchingDisk(RecordingDisk):
    """Notes which calls change the commit log."""

    def __init__(self) -> None:
        super().__init__()
        self.log_calls: list[str] = []

    def perform(self, call: str, path: str, operation: Operation) -> None:
        if path.startswith(layout.COMMIT_LOG):
            self.log_calls.append(call)
        super().perform(call, path, operation)


def names(disk: RecordingDisk) -> list[str]:
    return [name for name in disk.names(layout.COMMIT_LOG) if name.startswith("spare")]


def make(store: Store, *, is_busy: bool = False) -> int:
    """Step until there is nothing to do at once; how many steps that took."""
    for count in range(100):
        if not store.spare_maker.step(is_busy=is_busy):
            return count
    raise AssertionError("the spare is never finished")


def half_full(disk: RecordingDisk | None = None, options: StoreOptions = OPTIONS) -> World:
    world = World(RecordingDisk() if disk is None else disk, history=History(options=options))
    for _ in range(2):
        world.send(world.frame(orders=BODY))
    return world


def test_a_spare_is_made_when_the_segment_is_half_full_and_the_roll_takes_it() -> None:
    disk = WatchingDisk()
    world = World(disk)
    world.send(world.frame(orders=BODY))
    assert make(world.store) == 0
    assert names(world.disk) == []
    world.send(world.frame(orders=BODY))
    assert make(world.store) > 2, "bit by bit"
    assert names(world.disk) == ["spare.0"]
    assert make(world.store) == 0, "one is enough"
    world.send(world.frame(orders=BODY))
    disk.log_calls.clear()
    for _ in range(2):
        world.send(world.frame(orders=BODY))
    assert world.store.written_offset > SEGMENT
    assert "rename" in disk.log_calls
    assert not {"open", "allocate"} & set(disk.log_calls), "the roll takes no room"
    assert names(world.disk) == []
    assert world.visible() == {"orders": 5}
    world.store.close()
    assert Store.open(world.disk, FakeClock(), OPTIONS).recovery.clean


def test_nothing_is_filled_while_much_is_written_and_what_there_is_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(spares, "NEEDED_AT", 0.3)
    world = half_full()
    assert world.store.spare_maker.step(is_busy=True)
    assert make(world.store, is_busy=True) == 0
    assert names(world.disk) == ["spare.new"]
    world.send(world.frame(orders=BODY))
    make(world.store, is_busy=True)
    assert names(world.disk) == ["spare.0"], "needed soon"
    world.send(world.frame(orders=BODY))
    assert names(world.disk) == []


@pytest.mark.parametrize("why", ["switched off", "no room", "one is there"])
def test_none_is_made(why: str) -> None:
    options = replace(OPTIONS, spare_segments=0) if why == "switched off" else OPTIONS
    world = half_full(options=options)
    if why == "no room":
        world.disk.capacity_bytes -= 1  # now what is used counts
        world.disk.capacity_bytes -= world.disk.free_bytes() - SEGMENT
    elif why == "one is there":
        make(world.store)
    before = len(world.disk.operations)
    assert make(world.store) == 0
    assert len(world.disk.operations) == before


@pytest.mark.parametrize(("more_bytes", "made"), [(-1, []), (0, ["spare.0"])])
def test_a_spare_leaves_the_reserve_and_room_for_another_segment(
    more_bytes: int, made: list[str]
) -> None:
    reserve_bytes = 10_000
    world = half_full(options=replace(OPTIONS, reserve_bytes=reserve_bytes))
    disk = world.disk
    disk.capacity_bytes -= 1  # now what is used counts
    disk.capacity_bytes -= disk.free_bytes() - (reserve_bytes + 2 * SEGMENT + more_bytes)
    make(world.store)
    assert names(disk) == made


@pytest.mark.parametrize("reserve_bytes", [0, 10_000])
def test_B6_on_a_full_disk_spares_make_room_for_the_segment_that_is_written(
    reserve_bytes: int,
) -> None:
    def fill(world: World) -> None:
        world.disk.capacity_bytes = 2**39 - 1  # now what is used counts
        world.disk.capacity_bytes -= world.disk.free_bytes() - reserve_bytes

    def send_many(world: World) -> None:
        for _ in range(100):
            world.send(world.frame(orders=6_000))

    def life(disk: RecordingDisk) -> World:
        world = half_full(disk, options)
        while world.store.written_offset <= 2 * step_bytes:
            world.send(world.frame(orders=6_000))
        make(world.store)
        assert names(disk) == ["spare.0"]
        fill(world)
        before = world.store.written_offset
        while world.store.written_offset < before + step_bytes:
            world.send(world.frame(orders=6_000))
        assert names(disk) == []
        fill(world)
        with pytest.raises(DiskFullError):
            send_many(world)
        return world

    step_bytes = 16 * 1024
    options = replace(
        OPTIONS,
        growth_bytes=step_bytes,
        segment_bytes=4 * step_bytes,
        spare_segments=2,
        reserve_bytes=reserve_bytes,
    )
    assert crash_everywhere(life, RecordingDisk()) > 200


@pytest.mark.parametrize("there", ["spare.0", "spare.new"])
def test_B6_where_the_log_cannot_grow_a_spare_is_given_back_whether_finished_or_not(
    there: str,
) -> None:
    reserve_bytes = 10_000
    needed_bytes = reserve_bytes + OPTIONS.growth_bytes
    assert OPTIONS.growth_bytes < SEGMENT

    def life(disk: RecordingDisk) -> World:
        world = half_full(disk, replace(OPTIONS, reserve_bytes=reserve_bytes))
        world.store.spare_maker.step(is_busy=False)
        if there == "spare.0":
            make(world.store)
        disk.capacity_bytes -= 1  # now what is used counts
        disk.capacity_bytes -= disk.free_bytes() - needed_bytes
        make(world.store, is_busy=True)
        assert names(disk) == [there], "not yet below it"
        disk.capacity_bytes -= 1
        make(world.store, is_busy=True)
        assert names(disk) == []
        assert disk.free_bytes() >= needed_bytes
        world.send(world.frame(orders=BODY), world.frame(orders=BODY))
        return world

    assert crash_everywhere(life, RecordingDisk()) > 50


def test_the_draft_of_a_life_before_is_cleared_away() -> None:
    world = half_full()
    world.store.spare_maker.step(is_busy=False)
    assert names(world.disk) == ["spare.new"]
    world.disk.unlock()
    store = Store.open(world.disk, FakeClock(), OPTIONS)
    make(store)
    assert names(world.disk) == ["spare.0"]


def test_B10_a_disk_that_fills_up_meanwhile_gets_its_room_back() -> None:
    disk = FailingDisk()
    world = half_full(disk)
    world.store.spare_maker.step(is_busy=False)
    disk.failing, disk.error = ("write", layout.SPARE_DRAFT), DiskFullError("full")
    make(world.store)
    assert names(disk) == []
    disk.failing = None
    make(world.store)
    assert names(disk) == ["spare.0"]


def test_a_failed_call_on_a_draft_stops_nothing_but_the_making() -> None:
    disk = FailingDisk()
    world = half_full(disk)
    disk.failing = ("write", layout.SPARE_DRAFT)
    make(world.store)
    assert "I/O error" in world.store.spare_maker.fault
    disk.failing = None
    assert make(world.store) == 0
    world.send(world.frame(orders=BODY), world.frame(orders=BODY))
    world.store.close()


def test_B5_names_of_the_log_that_may_not_be_durable_are_believed_by_nobody() -> None:
    disk = FailingDisk()
    world = half_full(disk)
    disk.failing = ("sync_directory", layout.COMMIT_LOG)
    make(world.store)
    disk.failing = None
    with pytest.raises(PoisonedError):
        world.append(world.frame(orders=BODY))
    assert isinstance(disk.error, DiskError)


def test_B3_a_power_cut_at_any_moment_of_it_loses_nothing() -> None:
    def life(disk: RecordingDisk) -> World:
        world = half_full(disk)
        make(world.store)
        for _ in range(4):
            world.send(world.frame(orders=BODY))
            world.store.spare_maker.step(is_busy=False)
        world.clock.pass_ms(2_000)
        world.store.step()
        make(world.store)
        world.send(world.frame(orders=BODY))
        return world

    assert crash_everywhere(life, RecordingDisk()) > 200
