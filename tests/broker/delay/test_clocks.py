"""D1 under clocks that jump and drift, and months that pass in a second."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from qmq_broker.service.delay.releasing import ALARM_MS, CATCH_UP, STEP_MS, DelayClock
from qmq_client.wire.delayed import CLOCKS_MS
from qmq_client.wire.errors import InvalidMessageError
from qmq_client.wire.limits import DEFAULT_LIMITS
from tests.broker.delay.delay_rig import HOUR_MS, DelayRig
from tests.kit.clock import FakeClock

DAY_MS = 24 * HOUR_MS


def test_D1_a_clock_that_is_set_back_is_followed_with_an_alarm_until_it_has_caught_up() -> None:
    clock = FakeClock()
    time = DelayClock(clock)
    before = time.now_ms()
    clock.wall_ms -= HOUR_MS
    for _ in range(59):
        clock.pass_ms(60_000)
        assert time.now_ms() == clock.wall_ms
        assert time.alarm.startswith("the clock was set back")
        assert time.latest_ms == clock.wall_ms + HOUR_MS
    clock.pass_ms(61_000)
    assert time.now_ms() == clock.wall_ms == before + 1_000
    assert time.alarm == ""


def test_D1_a_clock_that_is_set_forward_is_followed_in_bounded_steps_with_an_alarm() -> None:
    clock = FakeClock()
    time = DelayClock(clock)
    before = time.now_ms()
    clock.wall_ms += HOUR_MS
    assert time.now_ms() == before + STEP_MS
    assert time.alarm.startswith("the clock was set forward")
    clock.pass_ms(1_000)
    assert time.now_ms() == before + STEP_MS + CATCH_UP * 1_000
    for _ in range(600):
        clock.pass_ms(1_000)
        assert time.now_ms() <= clock.wall_ms
    assert time.now_ms() == clock.wall_ms
    assert time.alarm == ""


def test_D1_drift_and_small_corrections_are_no_alarm() -> None:
    clock = FakeClock()
    time = DelayClock(clock)
    rng = random.Random(1)
    for _ in range(10_000):
        clock.pass_ms(100)
        clock.wall_ms += rng.choice((-ALARM_MS // 2, 0, 0, 1, ALARM_MS // 2))
        assert time.now_ms() <= clock.wall_ms
        if abs(time.ahead_ms) <= ALARM_MS:
            assert time.alarm == ""


def test_F35_D1_messages_are_held_while_the_clock_is_back_and_come_once(tmp_path: Path) -> None:
    rig = DelayRig(tmp_path)
    rig.send_delayed({b"soon": rig.now_ms + 10_000, b"later": rig.now_ms + 2 * HOUR_MS})
    rig.pass_and_release(5_000)
    rig.clock.wall_ms -= HOUR_MS
    assert rig.pass_and_release(HOUR_MS // 2) == 0
    assert rig.broker.delayed.query.status().clock.startswith("the clock was set back")
    assert rig.pass_and_release(HOUR_MS // 2) == 0
    assert rig.pass_and_release(6_000) == 1
    rig.clock.wall_ms += 3 * HOUR_MS  # forward: neither of it is early, and nothing comes twice
    assert rig.release() == 0
    assert rig.broker.delayed.query.status().clock.startswith("the clock was set forward")
    for _ in range(1_000):
        rig.pass_and_release(1_000)
    assert rig.bodies() == [b"soon", b"later"]
    rig.close()


def test_F34_D3_edges_of_buckets_and_years_and_changes_of_summer_time(tmp_path: Path) -> None:
    """All of it is UTC: nothing happens at these times, which is what must be shown."""
    rig = DelayRig(tmp_path)
    #: 2023-12-31T23:00Z, 2024-02-29, 2024-03-31T01:00Z and 2024-10-27T01:00Z: Europe's changes.
    moments = [1_704_063_600_000, 1_709_164_800_000, 1_711_846_800_000, 1_729_990_800_000]
    due = {
        f"{moment}{offset:+d}".encode(): moment + offset
        for moment in moments
        for offset in (-HOUR_MS, -1, 0, 1, HOUR_MS - 1, HOUR_MS, HOUR_MS + 1)
    }
    rig.send_delayed(due)
    for moment in moments:
        for offset in (-HOUR_MS - 1, -HOUR_MS, -2, -1, 0, 1, HOUR_MS - 2, HOUR_MS + 1):
            _go_to(rig, moment + offset)
            expected = [body for body, at in due.items() if at <= moment + offset]
            assert sorted(rig.bodies()) == sorted(expected)
        rig.kill()
    assert sorted(rig.bodies()) == sorted(due)
    rig.close()


def test_D1_D3_months_pass_in_a_second(tmp_path: Path) -> None:
    """A broker lives three months: sends, stops, kills, cancellations; each message once, in time."""
    rng = random.Random(20)
    rig = DelayRig(tmp_path, queue_flush_bytes=20_000)
    due: dict[bytes, int] = {}
    seen: set[bytes] = set()
    for step in range(50):
        new = {
            f"{step}.{n}".encode(): rig.now_ms + int(rng.expovariate(1 / (5 * DAY_MS)))
            for n in range(rng.randrange(6))
        }
        if new:
            rig.send_delayed(new)
            due |= new
        if step % 9 == 4 and (waiting := rig.find_all()):
            gone = rng.choice(waiting)
            del due[rig.body(gone)]
            rig.cancel(gone)
        before = rig.clock.wall_ms
        rig.clock.pass_ms(rng.randrange(DAY_MS))
        if step % 5 == 0:
            rig.restart() if step % 2 else rig.kill()
        _settle(rig)
        assert all(due[body] <= rig.clock.wall_ms for body in rig.bodies())
        seen = set(rig.bodies())
        assert seen >= {body for body, at in due.items() if at <= before}
    _go_to(rig, rig.clock.wall_ms + 400 * DAY_MS)
    assert sorted(rig.bodies()) == sorted(due)
    rig.close()


def test_F34_D5_at_the_edge_of_two_years_a_message_comes_once_and_behind_it_is_refused(
    tmp_path: Path,
) -> None:
    rig = DelayRig(tmp_path)
    # The broker leaves a day for clocks that differ.
    last_ms = rig.now_ms + DEFAULT_LIMITS.delay_ms + CLOCKS_MS
    rig.send_delayed({b"last": last_ms})
    with pytest.raises(InvalidMessageError, match="ms ahead"):
        rig.send_delayed({b"too far": last_ms + 1})
    rig.kill()
    _go_to(rig, last_ms - 1)
    assert rig.bodies() == []
    rig.kill()
    _go_to(rig, last_ms)
    rig.kill()
    _go_to(rig, last_ms + 2 * HOUR_MS)
    assert rig.bodies() == [b"last"]
    rig.close()


def test_D5_what_is_within_the_limit_is_taken_once_the_clock_is_put_right(tmp_path: Path) -> None:
    rig = DelayRig(tmp_path)
    start_ms = rig.clock.wall_ms
    rig.clock.wall_ms += 30 * DAY_MS  # it was a month behind when the broker started
    rig.send_delayed({b"last": rig.clock.wall_ms + DEFAULT_LIMITS.delay_ms})
    rig.clock.wall_ms = start_ms - 30 * DAY_MS  # and now it is wrong
    rig.send_delayed({b"last by the clock of the start": start_ms + DEFAULT_LIMITS.delay_ms})
    rig.close()


def _go_to(rig: DelayRig, moment: int) -> None:
    """Let time pass up to a moment, however far, in a life of its own so that it is no jump."""
    rig.clock.pass_ms(moment - rig.clock.wall_ms)
    _settle(rig)


def _settle(rig: DelayRig) -> None:
    rig.release()
    for _ in range(3):
        rig.store.step()


def one_stored_ahead(directory: Path) -> DelayRig:
    """A broker whose clock was two days ahead for one message, and is right again."""
    rig = DelayRig(directory)
    rig.clock.wall_ms += 2 * DAY_MS
    rig.pass_ms(0)
    rig.send(b"stored while the clock was ahead")
    rig.clock.wall_ms -= 2 * DAY_MS
    rig.restart()
    return rig


@pytest.mark.parametrize("is_restarted", [False, True])
def test_F35_D2_a_message_stored_while_the_clock_was_ahead_holds_no_delayed_one(
    tmp_path: Path, is_restarted: bool
) -> None:
    """Else all of them waited until the clock came to where it had been."""
    rig = one_stored_ahead(tmp_path)
    rig.send_delayed({b"soon": rig.now_ms + 1_000, b"then": rig.now_ms + HOUR_MS})
    rig.send_delayed({b"far": rig.now_ms + 3 * DAY_MS})
    if is_restarted:
        rig.restart()
    assert [rig.body(one) for one in rig.find_all()] == [b"soon", b"then", b"far"]
    assert rig.pass_and_release(900) == 0
    assert rig.pass_and_release(100) == 1
    assert rig.pass_and_release(HOUR_MS - 1_001) == 0
    assert rig.pass_and_release(1) == 1
    rig.restart()
    assert rig.pass_and_release(3 * DAY_MS) == 1
    assert rig.bodies()[1:] == [b"soon", b"then", b"far"]
    rig.close()


def test_F35_a_log_that_is_ahead_of_the_clock_is_reported_until_the_clock_is_there(
    tmp_path: Path,
) -> None:
    rig = one_stored_ahead(tmp_path)
    query = rig.broker.delayed.query
    status = query.status()
    assert status.log_ahead_ms == pytest.approx(2 * DAY_MS, abs=1_000)
    assert status.clock.startswith("the log is ahead of the clock")
    for _ in range(2):
        rig.pass_and_release(DAY_MS)
    assert (query.status().log_ahead_ms, query.status().clock) == (0, "")
    rig.close()


def test_D1_what_is_sent_after_the_clock_was_set_back_is_not_early(tmp_path: Path) -> None:
    rig = DelayRig(tmp_path)
    rig.pass_and_release(1_000)
    rig.clock.wall_ms -= HOUR_MS
    rig.send_delayed({b"new": rig.clock.wall_ms + 10_000})
    assert rig.pass_and_release(9_999) == 0
    assert rig.pass_and_release(1) == 1
    rig.clock.wall_ms += HOUR_MS  # to where it was: no jump that must be caught up with
    rig.send_delayed({b"newer": rig.clock.wall_ms + 1})
    assert rig.pass_and_release(1) == 1
    assert rig.broker.delayed.query.status().clock == ""
    rig.close()


def test_D1_messages_held_by_a_changed_clock_are_counted_until_the_clock_is_accepted(
    tmp_path: Path,
) -> None:
    rig = DelayRig(tmp_path)
    delayed = rig.broker.delayed
    first_ms = rig.clock.wall_ms
    rig.send_delayed({b"%d" % hours: first_ms + hours * HOUR_MS for hours in (1, 3, 5, 26)})
    rig.clock.wall_ms += 4 * HOUR_MS
    assert rig.release() == 0
    assert delayed.query.status().clock_held == 2
    delayed.releaser.accept_clock()
    assert rig.release() == 2
    assert (delayed.query.status().clock_held, delayed.query.status().clock) == (0, "")
    rig.clock.wall_ms -= 4 * HOUR_MS
    assert rig.release() == 0
    assert delayed.query.status().clock_held == 0
    rig.pass_and_release(2 * HOUR_MS)
    assert delayed.query.status().clock_held == 1  # b"5" would have come, were the clock as it was
    delayed.releaser.accept_clock()
    assert rig.release() == 0
    status = delayed.query.status()
    assert status.clock_held == 0
    assert status.clock.startswith("the log is ahead of the clock")
    assert rig.pass_and_release(3 * HOUR_MS) == 1
    assert rig.bodies() == [b"1", b"3", b"5"]
    rig.close()
