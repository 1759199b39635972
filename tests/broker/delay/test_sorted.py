"""Large buckets are sorted on the disk: nothing else changes, whatever becomes of the files."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from qmq_broker.service.delay.damage import Damage
from qmq_broker.service.delay.near import Load, Wheel, frozen_sequences
from qmq_broker.service.delay.rows import end_of
from qmq_broker.service.limits import ServiceLimits
from qmq_broker.storage.schedule import sorted as sorted_files
from qmq_broker.storage.schedule.sorted import BLOCK_MESSAGES, SortedBuckets
from tests.broker.delay.delay_rig import HOUR_MS, DelayRig, pending_of
from tests.broker.delay.test_loading import copy

MESSAGES = 3_000
UNSORTED_MAX = 600
LOADED_MAX = 400


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[DelayRig]:
    limits = ServiceLimits(delayed_unsorted=UNSORTED_MAX, delayed_loaded=LOADED_MAX)
    made = DelayRig(tmp_path, limits=limits)
    yield made
    made.close()


def fill(rig: DelayRig, *, count: int = MESSAGES, seed: int = 1) -> dict[bytes, int]:
    """Messages of one bucket, in no order, some of them at the same time, in its files."""
    first_ms = (rig.now_ms // HOUR_MS + 1) * HOUR_MS
    draw = random.Random(seed)
    due = {f"{seed}.{n}".encode(): first_ms + draw.randrange(0, HOUR_MS, 500) for n in range(count)}
    for first in range(0, count, 250):
        rig.send_delayed(dict(list(due.items())[first : first + 250]))
    copy(rig)
    return due


def files(rig: DelayRig) -> list[Path]:
    return list(rig.directory.glob("sorted/*"))


def load(rig: DelayRig, wheel: Wheel, sorted_: SortedBuckets, until_ms: int) -> None:
    schedule = rig.store.schedule
    frozen = frozen_sequences(schedule)
    whole = Load(schedule, wheel, frozen, until_ms=until_ms, damage=Damage(), sorted_=sorted_)
    assert whole.advance()


def in_time(bodies: list[bytes], due: dict[bytes, int]) -> bool:
    times = [due[body] for body in bodies]
    return times == sorted(times)


def pass_hours(rig: DelayRig, hours: int) -> None:
    for _ in range(hours * 12):
        rig.pass_and_release(HOUR_MS // 12)


def test_D3_a_bucket_that_is_sorted_comes_once_in_time_with_who_came_late_and_without_who_left(
    rig: DelayRig,
) -> None:
    due = fill(rig)
    pass_hours(rig, 1)
    assert files(rig)
    due |= fill_late(rig)
    gone, later, *_ = rig.find_all()[-40:]
    del due[rig.body(gone)]
    rig.cancel(gone)
    due[rig.body(later)] = rig.now_ms + 3 * HOUR_MS
    assert rig.reschedule(later, rig.now_ms + 3 * HOUR_MS)
    pass_hours(rig, 5)
    assert sorted(rig.bodies()) == sorted(due)
    assert in_time(rig.bodies(), due)
    pass_hours(rig, 1)
    assert not files(rig)


def fill_late(rig: DelayRig) -> dict[bytes, int]:
    """More of the hour that is under way: some are sorted as well, some only in the commit log."""
    draw = random.Random(2)
    due = {f"late-{n}".encode(): rig.now_ms + draw.randrange(HOUR_MS // 3) for n in range(900)}
    for first in range(0, 900, 300):
        rig.send_delayed(dict(list(due.items())[first : first + 300]))
        if first < 600:
            copy(rig)
    return due


def test_D3_a_kill_while_a_bucket_is_sorted_leaves_nothing_behind(rig: DelayRig) -> None:
    due = fill(rig)
    pass_hours(rig, 1)
    assert files(rig)
    before = rig.bodies()
    rig.kill()
    assert not files(rig)
    pass_hours(rig, 3)
    assert rig.bodies()[: len(before)] == before
    assert sorted(rig.bodies()) == sorted(due)


@pytest.mark.parametrize("seed", range(4))
def test_a_sorted_bucket_is_loaded_as_one_that_is_not(rig: DelayRig, seed: int) -> None:
    due = fill(rig, count=1_500, seed=seed)
    loaded = []
    for unsorted_max in (10_000, 10 * (seed + 3)):
        wheel = Wheel(end_of(0), loaded_max=LOADED_MAX)
        sorted_ = SortedBuckets(rig.store.schedule, messages_min=unsorted_max)
        taken = []
        while wheel.loaded_until < end_of(2**62):
            load(rig, wheel, sorted_, 2**62)
            taken += pending_of(wheel.take(2**62, 10_000))
        loaded.append(taken)
    assert loaded[0] == loaded[1]
    assert len(loaded[0]) == len(due)


def test_a_part_of_a_sorted_bucket_is_read_without_the_rest(
    rig: DelayRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(rig, count=40 * BLOCK_MESSAGES)
    schedule = rig.store.schedule
    sorted_ = SortedBuckets(schedule, messages_min=8 * BLOCK_MESSAGES)
    ((bucket, messages),) = frozen_sequences(schedule).items()
    for _ in sorted_.sort(bucket, messages):
        pass
    positions: list[int] = []
    real = schedule.files.read

    def read(log: str, bucket: int, position: int, count: int) -> bytes:
        positions.append(position)
        return real(log, bucket, position, count)

    monkeypatch.setattr(schedule.files, "read", read)
    wheel = Wheel(end_of(bucket - 1), loaded_max=BLOCK_MESSAGES)
    load(rig, wheel, sorted_, bucket + HOUR_MS)
    assert len(wheel) == BLOCK_MESSAGES
    (path,) = rig.directory.glob("schedule/*/*")
    assert min(positions) > 0.75 * path.stat().st_size, (
        "only what is not sorted yet is looked through"
    )
    within = bucket, wheel.loaded_until.due_at_ms
    blocks = list(sorted_.columns(bucket, messages, within=within))
    assert sum(map(len, blocks)) < messages / 4, (
        "a block or two of each run, and what is not sorted"
    )


@pytest.mark.parametrize("harm", ["no room", "damage", "cut"])
def test_B6_what_cannot_be_sorted_is_looked_through_as_it_is(
    rig: DelayRig, harm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    due = fill(rig)
    if harm == "no room":
        monkeypatch.setattr(rig.store.disk, "free_bytes", lambda: 0)
    pass_hours(rig, 1)
    assert bool(files(rig)) is (harm != "no room")
    for path in files(rig):
        path.write_bytes(bytes(path.stat().st_size) if harm == "damage" else b"")
    pass_hours(rig, 3)
    assert not files(rig)
    assert sorted(rig.bodies()) == sorted(due)
    assert in_time(rig.bodies(), due)


def test_a_portion_of_a_sorted_bucket_reaches_as_far_as_there_is_room(rig: DelayRig) -> None:
    fill(rig)
    schedule = rig.store.schedule
    sorted_ = SortedBuckets(schedule, messages_min=UNSORTED_MAX)
    wheel = Wheel(end_of(0), loaded_max=2 * BLOCK_MESSAGES)
    load(rig, wheel, sorted_, rig.now_ms + 9 * HOUR_MS)
    assert len(wheel) == 2 * BLOCK_MESSAGES
    sorted_.keep(())


def test_how_far_so_many_messages_reach_is_known_to_a_few_blocks(
    rig: DelayRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    block, wanted, runs = 4, 403, MESSAGES // UNSORTED_MAX
    monkeypatch.setattr(sorted_files, "BLOCK_MESSAGES", block)
    due_ms = sorted(fill(rig).values())
    schedule = rig.store.schedule
    sorted_ = SortedBuckets(schedule, messages_min=UNSORTED_MAX)
    ((bucket, messages),) = frozen_sequences(schedule).items()
    for _ in sorted_.sort(bucket, messages):
        pass
    for after_ms in range(bucket, due_ms[-wanted - runs * block], HOUR_MS // 50):
        reach_ms = sorted_.reach_ms(bucket, after_ms, wanted)
        assert reach_ms is not None
        count = sum(after_ms < due <= reach_ms for due in due_ms)
        assert wanted <= count <= wanted + (2 * runs + 1) * block
    assert sorted_.reach_ms(bucket, due_ms[-wanted], wanted) is None
    sorted_.keep(())
