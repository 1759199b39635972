"""Delayed messages wait for their time and are released once, whatever happens in between."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq_broker.errors import DiskError
from qmq_broker.storage.files.os_file import OsFile
from qmq_broker.storage.schedule import schedule
from qmq_broker.storage.schedule.columns import IN_SCHEDULE
from qmq_broker.storage.schedule.schedule import Arrival, marked_frame
from qmq_broker.storage.schedule.states import DelayedState
from qmq_broker.storage.store import Placed
from qmq_client.wire.frame import FrameKind
from qmq_client.wire.marks import Marks
from tests.broker.delay.delay_rig import HOUR_MS, DelayRig, delayed_frame
from tests.broker.service.rig import SUBJECT


def test_D1_a_delayed_message_is_not_visible_before_its_time(tmp_path: Path) -> None:
    rig = DelayRig(tmp_path)
    placed = rig.send_delayed({b"later": rig.now_ms + 5_000})
    assert placed.places == ()
    assert placed.duplicates == 0
    for _ in range(4_999):
        assert rig.pass_and_release(1) == 0
    assert rig.bodies() == []
    assert rig.pass_and_release(1) == 1
    assert rig.bodies() == [b"later"]
    assert rig.pull().bodies == [b"later"]
    rig.close()


def test_D3_a_message_is_released_once_across_stops_and_kills(tmp_path: Path) -> None:
    rig = DelayRig(tmp_path)
    due = {f"{minute}".encode(): rig.now_ms + minute * 60_000 for minute in range(1, 180)}
    rig.send_delayed(due)
    for round_ in range(20):
        rig.pass_and_release(10 * 60_000)
        if round_ % 3 == 0:
            rig.restart()
        elif round_ % 3 == 1:
            rig.kill()
        rig.release()
    assert sorted(rig.bodies()) == sorted(due)
    rig.close()


def test_D1_a_time_in_the_past_is_now(tmp_path: Path) -> None:
    rig = DelayRig(tmp_path)
    rig.send_delayed({b"past": rig.now_ms - 40 * HOUR_MS, b"long past": 0})
    assert rig.release() == 2
    rig.kill()
    assert rig.release() == 0
    assert rig.bodies() == [b"long past", b"past"]
    rig.close()


def test_a_delayed_message_that_is_sent_again_is_known(tmp_path: Path) -> None:
    rig = DelayRig(tmp_path)
    frame = delayed_frame({b"one": rig.now_ms + 1_000})
    rig.submit(frame)
    rig.commit()
    outcomes = rig.submit(frame)
    rig.commit()
    (again,) = outcomes
    assert isinstance(again, Placed)
    assert again.duplicates == 1
    assert rig.pass_and_release(1_000) == 1
    rig.submit(frame)
    rig.commit()
    assert rig.pass_and_release(10_000) == 0
    rig.close()


def test_D4_what_was_answered_cancelled_is_never_delivered(tmp_path: Path) -> None:
    rig = DelayRig(tmp_path)
    rig.send_delayed({b"stays": rig.now_ms + 1_000, b"goes": rig.now_ms + 1_000})
    (goes,) = [found for found in rig.find_all() if rig.body(found) == b"goes"]
    assert rig.cancel(goes) == [DelayedState.CANCELLED]
    assert rig.cancel(goes) == [DelayedState.CANCELLED]
    rig.kill()
    assert rig.pass_and_release(1_000) == 1
    assert rig.bodies() == [b"stays"]
    rig.close()


def test_D4_a_cancellation_that_comes_too_late_says_so(tmp_path: Path) -> None:
    rig = DelayRig(tmp_path)
    rig.send_delayed({b"one": rig.now_ms + 1_000})
    (found,) = rig.find_all()
    rig.pass_and_release(1_000)
    assert rig.cancel(found) == [DelayedState.RELEASED]
    rig.restart()
    assert rig.cancel(found) == [DelayedState.RELEASED]
    assert rig.bodies() == [b"one"]
    rig.close()


def test_D4_a_release_under_way_loses_against_a_cancellation_that_was_written_first(
    tmp_path: Path,
) -> None:
    rig = DelayRig(tmp_path)
    rig.send_delayed({b"one": rig.now_ms + 1_000, b"two": rig.now_ms + 1_000})
    one, _ = sorted(rig.find_all(), key=rig.body)
    rig.clock.pass_ms(1_000)
    rig.broker.delayed.releaser.step()  # read, and on its way to the writer
    assert rig.cancel(one) == [DelayedState.CANCELLED]
    assert rig.release() == 1
    assert rig.bodies() == [b"two"]
    assert rig.broker.delayed.releaser.counts.passed_over == 1
    rig.close()


def test_a_message_that_was_put_off_comes_at_its_new_time_once(tmp_path: Path) -> None:
    rig = DelayRig(tmp_path)
    rig.send_delayed({b"one": rig.now_ms + 1_000})
    for _ in range(3):
        (found,) = rig.find_all()
        rig.reschedule(found, found.due_at_ms + 2 * HOUR_MS)
        assert rig.pass_and_release(2 * HOUR_MS - 1) == 0
        rig.kill()
    assert rig.pass_and_release(1_010) == 1
    rig.restart()
    assert rig.release() == 0
    assert rig.bodies() == [b"one"]
    rig.close()


def test_D3_two_releases_of_one_message_in_one_commit_bring_it_once(tmp_path: Path) -> None:
    rig = DelayRig(tmp_path)
    rig.send_delayed({b"one": rig.now_ms + 1_000, b"two": rig.now_ms + 1_000})
    one, two = rig.find_all()
    outcomes: list[Placed | Exception] = []
    for wanted in ([one, one], [one, two], [two]):
        marks = Marks(
            buckets=(one.bucket,),
            sequences=[message.sequence for message in wanted],
            sources=[message.source for message in wanted],
        )
        read = [rig.broker.delayed.query.record(message) for message in wanted]
        frame = marked_frame(FrameKind.RELEASED, {SUBJECT: read}, marks)
        rig.broker.writer.submit(frame, outcomes.append)
    rig.commit()
    assert len(outcomes) == 3
    assert rig.bodies() == [rig.body(one), rig.body(two)]
    assert rig.broker.delayed.query.status().pending == 0
    assert rig.pass_and_release(1_000) == 0
    rig.close()


def test_D3_what_is_loaded_before_its_arrival_is_reported_comes_once(tmp_path: Path) -> None:
    rig = DelayRig(tmp_path)
    releaser, schedule = rig.broker.delayed.releaser, rig.store.schedule
    tell = schedule.on_arrivals

    def tell_late(arrivals: list[Arrival]) -> None:
        releaser.step()  # the thread that loads is faster than the writer
        tell(arrivals)

    schedule.on_arrivals = tell_late
    rig.send_delayed({b"one": rig.now_ms + 1_000})
    assert rig.pass_and_release(1_000) == 1
    assert rig.bodies() == [b"one"]
    assert releaser.counts.passed_over == 1, "it was in memory once: nothing was tested"
    rig.close()


def test_D3_B4_a_bad_sector_holds_the_message_on_it_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = DelayRig(tmp_path, queue_flush_bytes=1)
    rig.send_delayed({b"%d" % number: rig.now_ms + 1_000 for number in range(9)})
    rig.store.step()
    bad = next(one for one in rig.find_all() if rig.body(one) == b"4")
    real, sector = OsFile.read, bad.place & ~IN_SCHEDULE

    def read(self: OsFile, position: int, count: int) -> bytes:
        if self.path.startswith("schedule/") and position <= sector < position + count:
            raise DiskError(operation="read", path=self.path, reason="Input/output error")
        return real(self, position, count)

    with monkeypatch.context() as patch:
        patch.setattr(OsFile, "read", read)
        assert rig.pass_and_release(1_000) == 8
        assert rig.broker.delayed.query.status().damaged == 1
    rig.broker.delayed.releaser.look_again([bad.bucket])
    assert rig.release() == 1
    assert sorted(rig.bodies()) == [b"%d" % number for number in range(9)]
    rig.close()


def test_D2_neighbours_are_read_at_once_up_to_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule, "_READ_BYTES_MAX", 1_000)
    asked: list[int] = []
    real = OsFile.read

    def read(self: OsFile, position: int, count: int) -> bytes:
        asked.append(count)
        return real(self, position, count)

    rig = DelayRig(tmp_path)
    monkeypatch.setattr(OsFile, "read", read)
    rig.send_delayed({b"%d" % number: rig.now_ms + 1_000 for number in range(100)})
    assert rig.pass_and_release(1_000) == 100
    assert max(asked) <= 1_000
    assert len(asked) < 50
    rig.close()


def test_what_is_on_its_way_to_the_disk_is_not_told_as_released(tmp_path: Path) -> None:
    """Else a copy whose commit takes long would be taken for lost."""
    rig = DelayRig(tmp_path)
    due_at_ms = rig.now_ms + HOUR_MS
    rig.send_delayed({b"one": due_at_ms})
    releaser = rig.broker.delayed.releaser
    releaser.step()
    rig.clock.pass_ms(HOUR_MS)
    for _ in range(2):
        releaser.step()
        rig.clock.pass_ms(1_000)
    assert releaser.is_busy
    assert releaser.released_until_ms <= due_at_ms
    assert rig.release() == 1
    assert releaser.released_until_ms > due_at_ms
    rig.close()
