"""A full disk in the broker's log: told when it begins, ever less often, and when it is over."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from qmq_broker.errors import DiskFullError
from qmq_broker.service.housekeeping import INTERVAL_MS
from qmq_broker.storage.refusals import PEACE_S, Refusals
from tests.broker.service.rig import SUBJECT, Rig, make_frame
from tests.kit.clock import FakeClock


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What was logged about refusals, without the reasons."""
    caplog.set_level(logging.INFO)

    def logged() -> list[str]:
        told = [one for one in caplog.messages if "refused" in one]
        caplog.clear()
        return [one.partition(" reason=")[0] for one in told]

    return logged


def full(*_: object) -> None:
    raise DiskFullError("0 bytes are free")


def test_each_kind_of_work_is_reported_once_then_every_second_power_and_the_end(
    lines: Callable[[], list[str]],
) -> None:
    clock = FakeClock()
    refusals = Refusals(clock)
    for work in ("messages", "messages", "journals", *["messages"] * 1_000):
        refusals.note(work, "full")
        refusals.look()
    assert lines() == [
        "refused: work=messages refusals=1 seconds=0",
        "refused: work=messages refusals=2 seconds=0",
        "refused: work=journals refusals=3 seconds=0",
        *[f"refused: work=messages refusals={2**power} seconds=0" for power in range(2, 10)],
    ]
    clock.pass_ms(2_000)
    refusals.note("journals", "full")
    clock.pass_ms(round(PEACE_S * 1000) - 1)
    refusals.look()
    assert lines() == []
    clock.pass_ms(1)
    refusals.look()
    refusals.look()
    assert lines() == ["nothing is refused any more: refusals=1004 seconds=2"]
    for work in ("journals", "journals", "messages"):
        refusals.note(work, "full")
    assert lines() == [
        "refused: work=journals refusals=1 seconds=0",
        "refused: work=journals refusals=2 seconds=0",
        "refused: work=messages refusals=3 seconds=0",
    ]


def test_a_broker_whose_disk_is_full_for_minutes_tells_it_in_few_lines(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, lines: Callable[[], list[str]]
) -> None:
    for number in range(20):
        rig.send(b"a")
        rig.pull(group=f"group-{number}", lease_ms=1_000)
    with monkeypatch.context() as patch:
        patch.setattr(rig.store.actions.log, "append", full)
        patch.setattr(rig.store._commit_log, "append", full)
        patch.setattr(rig.store._queues, "write_journal", full)
        for _ in range(300):
            rig.submit(make_frame([b"b"]))
            rig.broker.writer.step()
            rig.run_posted()
            rig.pass_ms(1_000)
            rig.broker.step()
    told = lines()
    works = {one.split()[1] for one in told}
    assert works >= {"work=messages", "work=ends_of_leases"}
    assert len(told) <= len(works) + 13, "two to the thirteenth are more than there were"
    for _ in range(round(PEACE_S) + 1):
        rig.pass_ms(INTERVAL_MS)
        rig.broker.step()
    (over,) = lines()
    assert over.startswith("nothing is refused any more: ")


def test_B12_where_no_group_can_be_ended_for_want_of_room_the_other_housekeeping_is_done(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among them is retention, which makes room."""
    rig.send(b"a")
    rig.pull(broadcast="ephemeral")
    retained: list[int] = []
    housekeeping = rig.broker._housekeeping
    monkeypatch.setattr(housekeeping, "_retain", retained.append)
    rig.clock.pass_ms(24 * 3_600_000)
    with monkeypatch.context() as patch:
        patch.setattr(rig.store.actions, "append", full)
        rig.broker.delivery.step(rig.now_ms)
        housekeeping.step(rig.now_ms)
    assert len(retained) == 1
    groups = [state.group for state in rig.broker.delivery.groups()]
    assert len(groups) == 1
    rig.clock.pass_ms(INTERVAL_MS)
    housekeeping.step(rig.now_ms)
    assert rig.broker.delivery.group(SUBJECT, groups[0]) is None
