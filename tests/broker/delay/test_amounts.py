"""Many delayed messages: bounded memory, everything due at once, what is overdue after a stop."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from qmq_broker.errors import BusyError, FilesFullError
from qmq_broker.service.delay.counts import LATE_BOUNDS_MS, DelayCounts
from qmq_broker.service.delay.near import Wheel
from qmq_broker.service.delay.releasing import IN_FLIGHT_MAX
from qmq_broker.service.delay.rows import Key, Pending, Rows, end_of
from qmq_broker.service.limits import ServiceLimits
from qmq_broker.storage.logs.segments import Segments
from qmq_broker.storage.schedule.states import DelayedState, DelayedStates
from tests.broker.delay.delay_rig import HOUR_MS, DelayRig, pending_of

COUNT = 100_000
PER_FRAME = 10_000


def fill(rig: DelayRig, due_at_ms: int, count: int = COUNT) -> None:
    for first in range(0, count, PER_FRAME):
        rig.send_delayed({f"{first + n}".encode(): due_at_ms for n in range(min(PER_FRAME, count))})


def test_F34_D3_a_hundred_thousand_messages_due_at_one_moment_come_once_each(
    tmp_path: Path,
) -> None:
    rig = DelayRig(tmp_path, limits=ServiceLimits(delayed_loaded=30_000))
    fill(rig, rig.now_ms + 2 * HOUR_MS)
    rig.pass_and_release(2 * HOUR_MS - 1)
    assert rig.bodies() == []
    assert rig.broker.delayed.releaser.near.loaded <= 37_500
    rig.clock.pass_ms(1)
    while rig.broker.delayed.query.status().pending:
        rig.release()
    assert len(set(rig.bodies())) == len(rig.bodies()) == COUNT
    rig.close()


def test_D2_D3_very_many_due_in_one_second_take_bounded_memory_and_hold_up_no_send(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    count = 1_000_000 if request.config.getoption("--release") else 40_000
    loaded_max = count // 4
    rig = DelayRig(tmp_path, limits=ServiceLimits(delayed_loaded=loaded_max))
    first_due_ms = rig.now_ms + 2 * HOUR_MS
    for first in range(0, count, PER_FRAME):
        numbers = range(first, first + PER_FRAME)
        rig.send_delayed({b"%d" % number: first_due_ms + number % 1_000 for number in numbers})
    rig.clock.pass_ms(2 * HOUR_MS + 1_000)
    releaser, sent = rig.broker.delayed.releaser, 0
    while rig.broker.delayed.query.status().pending:
        releaser.step()
        assert releaser.near.loaded <= loaded_max + PER_FRAME
        before = rig.store.queue("other")
        before_sequence = 0 if before is None else before.next_sequence
        rig.send(b"%d" % sent, subject="other")  # one commit, whatever else is in it
        sent += 1
        queue = rig.store.queue("other")
        assert queue is not None
        assert queue.next_sequence == before_sequence + 1
    assert sent > 4, "the releases came in portions"
    found = rig.bodies()
    assert len(set(found)) == len(found) == count
    rig.close()


def test_F34_D2_what_is_overdue_after_a_stop_goes_first_at_a_bounded_rate_and_holds_up_no_other(
    tmp_path: Path,
) -> None:
    rig = DelayRig(tmp_path, limits=ServiceLimits(overdue_per_s=1_000))
    fill(rig, rig.now_ms + 1_000, PER_FRAME)
    rig.restart()
    rig.send_delayed({b"old": rig.now_ms + 500 * HOUR_MS})
    rig.restart()
    rig.clock.pass_ms(600 * HOUR_MS)  # a stop of weeks: all of it is looked at, whatever its age
    rig.restart()
    rig.send_delayed({b"now": rig.now_ms + 100})
    rig.clock.pass_ms(100)
    for _ in range(10):
        rig.broker.delayed.releaser.step()
        rig.commit()
    assert b"now" in rig.bodies()
    assert 1_000 <= len(rig.bodies()) <= 1_400
    for _ in range(20):
        rig.pass_and_release(1_000)
    assert len(rig.bodies()) == PER_FRAME + 2
    assert rig.broker.delayed.query.status().late_max_ms < 1_000
    rig.close()


def test_D1_a_wheel_gives_everything_once_in_order_however_it_came() -> None:
    rng = random.Random(4)
    wheel = Wheel(end_of(-1), loaded_max=1_000)
    loaded = [Pending(rng.randrange(500), 0, n, n, n, 1, 0) for n in range(700)]
    rows = Rows(loaded)
    rows.sort()
    wheel.load(rows, end_of(400))
    late = [Pending(rng.randrange(900), 0, 700 + n, n, n, 1, 0) for n in range(600)]
    for one in late:
        wheel.add([one])
    expected = set(loaded) | {one for one in late if one.due_at_ms <= 400}
    expected = {one for one in expected if Key(*one[:3]) <= wheel.loaded_until}
    taken: list[Pending] = []
    for now in range(0, 1_000, 7):
        part = pending_of(wheel.take(now, 10_000))
        assert all(one.due_at_ms <= now for one in part)
        taken += part
    assert len(taken) == len(set(taken))
    assert set(taken) >= expected
    assert [one.due_at_ms for one in taken] == sorted(one.due_at_ms for one in taken)


def test_D1_rows_are_sorted_by_time_then_bucket_then_sequence_whatever_is_sorted_already() -> None:
    rng = random.Random(5)
    for buckets, sequences in ((1, 40), (3, 40), (3, 1)):
        rows = Rows(
            [
                Pending(
                    rng.randrange(5), rng.randrange(buckets), rng.randrange(sequences), n, 0, 1, 0
                )
                for n in range(200)
            ]
        )
        rows.sort()
        keys = [rows.key(index) for index in range(len(rows))]
        assert keys == sorted(keys)


def test_D2_lateness_is_counted_in_classes_up_to_and_with_their_upper_ends() -> None:
    counts = DelayCounts()
    for late_ms in ([0, 10, 11], [], [LATE_BOUNDS_MS[-1] + 1, LATE_BOUNDS_MS[-1]]):
        counts.note_late(late_ms)
    assert counts.late == [2, 1, *[0] * (len(LATE_BOUNDS_MS) - 3), 1, 1]
    assert counts.late_sum_ms == 21 + 2 * LATE_BOUNDS_MS[-1] + 1
    assert counts.late_max_ms == LATE_BOUNDS_MS[-1] + 1
    hundred = DelayCounts()
    hundred.note_late([5] * 99 + [15])
    assert [hundred.late_quantile_ms(share) for share in (0.5, 0.99, 0.999)] == [10, 10, 15]


def test_D2_lateness_ends_when_it_is_reported_that_the_release_is_durable(tmp_path: Path) -> None:
    rig = DelayRig(tmp_path)
    rig.send_delayed({b"one": rig.now_ms + 1_000})
    releaser = rig.broker.delayed.releaser
    rig.clock.pass_ms(1_030)
    releaser.step()
    rig.commit()
    rig.clock.pass_ms(70)  # nobody looks at what was told meanwhile
    releaser.step()
    assert (releaser.counts.released, releaser.counts.late_max_ms) == (1, 30)
    rig.close()


def test_a_wheel_that_is_over_its_bound_lets_go_of_what_is_due_last() -> None:
    wheel = Wheel(end_of(1_000_000), loaded_max=5_000)
    for first in range(0, 20_000, 100):
        wheel.add([Pending(20_000 - first - n, 0, first + n, 0, 0, 1, 0) for n in range(100)])
        assert len(wheel) <= 6_250 + 100
    until = wheel.loaded_until.due_at_ms
    taken = wheel.take(10**6, 10**6)
    assert list(taken.due_at_ms) == list(range(1, until + 1))


def test_D3_what_could_not_be_read_for_a_moment_is_released_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = DelayRig(tmp_path)
    rig.send_delayed({b"one": rig.now_ms + 1_000})
    rig.clock.pass_ms(1_000)
    with monkeypatch.context() as patch:

        def fail(*_: object) -> bytes:
            raise FilesFullError("no more files")

        patch.setattr(Segments, "read", fail)
        with pytest.raises(FilesFullError):
            rig.broker.delayed.releaser.step()
    assert rig.release() == 1
    assert rig.bodies() == [b"one"]
    rig.close()


def test_the_cost_of_an_arrival_does_not_grow_with_what_waits(tmp_path: Path) -> None:
    rig = DelayRig(tmp_path)
    fill(rig, rig.now_ms + 1_000, PER_FRAME)
    (bucket,) = [bucket for bucket, _, _ in rig.store.schedule.states()]
    parts = list(rig.store.schedule.columns(bucket, PER_FRAME - 1, PER_FRAME))
    assert [len(part) for part in parts] == [1]
    rig.close()


def test_D3_a_fate_is_given_once_however_many_are_given_together() -> None:
    states = DelayedStates()
    assert states.set_all((1, 6), DelayedState.CANCELLED) == [1, 6]
    assert states.set_all((0, 1, 1, 6, 9), DelayedState.RELEASED) == [0, 9]
    assert [states.get(sequence) for sequence in (0, 1, 6, 9)] == [
        DelayedState.RELEASED,
        DelayedState.CANCELLED,
        DelayedState.CANCELLED,
        DelayedState.RELEASED,
    ]


def test_large_messages_due_together_are_released_in_bounded_frames(tmp_path: Path) -> None:
    rig = DelayRig(tmp_path, segment_bytes=8 * 1024 * 1024)
    large = [bytes([number]) * (ServiceLimits().own_frame_bytes * 2 // 5) for number in range(5)]
    rig.send_delayed(dict.fromkeys(large, rig.now_ms + 1000))
    assert rig.pass_and_release(1_000) == 5
    assert rig.broker.delayed.releaser.counts.commits == 3
    assert sorted(rig.bodies()) == large
    rig.close()


def test_B10_large_messages_due_together_are_read_a_few_frames_at_a_time(tmp_path: Path) -> None:
    """Two thousand of the longest messages would be eight gigabytes."""
    frame_bytes = 10_000
    rig = DelayRig(tmp_path, limits=ServiceLimits(own_frame_bytes=frame_bytes))
    bodies = [b"%02d" % number + b"x" * 2_000 for number in range(60)]
    rig.send_delayed(dict.fromkeys(bodies, rig.now_ms + 1_000))
    rig.clock.pass_ms(1_000)
    releaser = rig.broker.delayed.releaser
    releaser.step()
    under_way = [len(release.messages) for release in releaser._in_flight]
    assert under_way == [frame_bytes // 2_100] * IN_FLIGHT_MAX
    assert rig.release() == len(bodies)
    assert rig.bodies() == bodies
    rig.close()


def test_releases_that_are_refused_together_are_one_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def busy(*_: object) -> None:
        raise BusyError("the disk is behind", retry_after_s=1.0)

    rig = DelayRig(tmp_path, limits=ServiceLimits(own_frame_bytes=1))
    bodies = [b"%d" % number for number in range(9)]
    rig.send_delayed(dict.fromkeys(bodies, rig.now_ms + 1_000))
    rig.clock.pass_ms(1_000)
    with monkeypatch.context() as patch:
        patch.setattr(rig.broker.writer, "submit", busy)
        for _ in range(3):
            rig.broker.delayed.releaser.step()
            rig.run_posted()
            rig.broker.delayed.releaser.step()
            rig.clock.pass_ms(1_000)
    assert rig.store.refusals._count == 3
    assert caplog.text.count("refused: work=releases") == 2, "the 1st and the 2nd"
    assert rig.release() == len(bodies)
    assert sorted(rig.bodies()) == bodies
    rig.close()
