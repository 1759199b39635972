"""Loading in slices: releases go on meanwhile, and who arrives meanwhile is neither lost nor doubled."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq_broker.service.delay.damage import Damage
from qmq_broker.service.delay.near import Load, Wheel, frozen_sequences
from qmq_broker.service.delay.rows import end_of
from qmq_broker.service.limits import ServiceLimits
from qmq_broker.storage.schedule.copy import ScheduleCopier
from qmq_broker.storage.schedule.sorted import SortedBuckets
from tests.broker.delay.delay_rig import HOUR_MS, DelayRig

MINUTE_MS = 60_000
PER_MINUTE = 40


def filled(directory: Path, **limits: int) -> tuple[DelayRig, int]:
    """Messages of every minute of an hour, each minute a portion of its own; and when it begins."""
    rig = DelayRig(directory, limits=ServiceLimits(**limits))
    first_ms = (rig.now_ms // HOUR_MS + 2) * HOUR_MS
    for minute in range(60):
        due = {
            f"{minute}-{n}".encode(): first_ms + minute * MINUTE_MS + n for n in range(PER_MINUTE)
        }
        rig.send_delayed(due)
        copy(rig)
    return rig, first_ms


def copy(rig: DelayRig) -> None:
    ScheduleCopier(rig.store.schedule, epoch=rig.store.epoch).copy_all()


def hurry(rig: DelayRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each look at the clock take longer than a slice."""

    def monotonic_s() -> float:
        rig.clock.steady_s += 1.0
        return rig.clock.steady_s

    monkeypatch.setattr(rig.clock, "monotonic_s", monotonic_s)


def test_D2_what_is_due_while_a_load_is_under_way_is_released_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, first_ms = filled(tmp_path)
    releaser = rig.broker.delayed.releaser
    rig.clock.pass_ms(first_ms - rig.clock.wall_ms - 2 * MINUTE_MS)
    rig.release()
    rig.send_delayed({b"soon": rig.now_ms + 1_000})
    rig.clock.pass_ms(9 * MINUTE_MS + 30_000)  # the next load is near
    hurry(rig, monkeypatch)
    releaser.step()
    rig.commit()
    assert releaser.near.is_loading
    assert b"soon" in rig.bodies()
    rig.release()
    assert not releaser.near.is_loading
    rig.close()


def test_D3_who_arrives_while_a_load_is_under_way_is_released_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, first_ms = filled(tmp_path)
    releaser = rig.broker.delayed.releaser
    rig.clock.pass_ms(first_ms - rig.clock.wall_ms - 2 * MINUTE_MS)
    with monkeypatch.context() as patch:
        hurry(rig, patch)
        steps = 0
        while True:
            releaser.step()
            rig.commit()
            if not releaser.near.is_loading:
                break
            steps += 1
            due_ms = first_ms + steps * MINUTE_MS // 8
            rig.send_delayed({f"late-{steps}".encode(): due_ms})
            copy(rig)
    assert steps > 5
    rig.clock.pass_ms(2 * HOUR_MS)
    rig.release()
    bodies = rig.bodies()
    assert len(bodies) == len(set(bodies)) == 60 * PER_MINUTE + steps
    assert rig.broker.delayed.releaser.counts.passed_over == 0
    rig.close()


def test_D3_a_load_that_is_overtaken_by_arrivals_takes_nothing_out_of_sight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, first_ms = filled(tmp_path, delayed_loaded=100)
    releaser = rig.broker.delayed.releaser
    rig.clock.pass_ms(first_ms - rig.clock.wall_ms - 2 * MINUTE_MS)
    rig.release()
    rig.clock.pass_ms(90_000)
    with monkeypatch.context() as patch:
        hurry(rig, patch)
        releaser.step()
        rig.commit()
        due_ms = rig.clock.wall_ms + 1_000
        rig.send_delayed({f"many-{n}".encode(): due_ms + n for n in range(300)})
        for _ in range(200):
            releaser.step()
            rig.commit()
    rig.clock.pass_ms(2 * HOUR_MS)
    while rig.broker.delayed.query.status().pending:
        rig.release()
    bodies = rig.bodies()
    assert len(bodies) == len(set(bodies)) == 60 * PER_MINUTE + 300
    rig.close()


def test_D3_a_load_whose_wheel_let_go_of_something_meanwhile_leaves_no_gap(tmp_path: Path) -> None:
    rig, first_ms = filled(tmp_path)
    schedule = rig.store.schedule
    wheel = Wheel(end_of(first_ms + 10 * MINUTE_MS), loaded_max=10_000)
    loading = Load(
        schedule,
        wheel,
        frozen_sequences(schedule),
        until_ms=first_ms + 20 * MINUTE_MS,
        damage=Damage(),
        sorted_=SortedBuckets(schedule, messages_min=1_000_000),
    )
    assert not loading.advance(lambda: False)
    wheel.let_go_after(end_of(first_ms + 5 * MINUTE_MS))
    assert loading.advance()
    assert (loading.count, len(wheel)) == (0, 0)
    assert wheel.loaded_until == end_of(first_ms + 5 * MINUTE_MS)
    rig.close()


def test_frames_without_a_wanted_time_are_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, first_ms = filled(tmp_path)
    schedule = rig.store.schedule
    seen: list[int] = []
    read = schedule.files.read

    def counted(log: str, bucket: int, position: int, count: int) -> bytes:
        seen.append(position)
        return read(log, bucket, position, count)

    monkeypatch.setattr(schedule.files, "read", counted)
    counts = []
    for minute in (0, 0, 30):
        seen.clear()
        wheel = Wheel(end_of(first_ms + minute * MINUTE_MS - 1), loaded_max=10_000)
        until_ms = first_ms + minute * MINUTE_MS + PER_MINUTE
        loading = Load(
            schedule,
            wheel,
            frozen_sequences(schedule),
            until_ms=until_ms,
            damage=Damage(),
            sorted_=SortedBuckets(schedule, messages_min=1_000_000),
        )
        assert loading.advance()
        assert loading.count == PER_MINUTE
        counts.append(len(seen))
    assert counts[0] > 20 * counts[1]
    assert counts[1] == counts[2]
    rig.close()
