"""Long retries: redeliveries after the horizon are kept as delayed messages and return once, to their group alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from qmq_broker.errors import BusyError, NoRoomError
from qmq_broker.service.delivery.in_group import MessageState
from qmq_broker.service.limits import ServiceLimits
from qmq_client.wire.errors import InvalidMessageError, InvalidNameError
from qmq_client.wire.names import COPIES
from qmq_client.wire.operations import DeadRequest
from qmq_client.wire.requests import Nack, Settlement
from qmq_client.wire.start import parse_start
from tests.broker.delay.delay_rig import HOUR_MS, LARGE
from tests.broker.delay.long_retry_rig import DAY_MS, MONTH_MS, LongRetryRig
from tests.broker.service.rig import GROUP, SUBJECT


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[LongRetryRig]:
    made = LongRetryRig.forgetful(tmp_path)
    yield made
    made.close()


def test_D3_a_message_nacked_for_a_month_returns_once_to_its_group_alone(
    rig: LongRetryRig,
) -> None:
    rig.start_long_retries(b"a", b"b")
    assert rig.pull(group="other").bodies == [b"a", b"b"]
    assert (rig.state.long_retries.count, rig.state.redeliveries.count, rig.state.unsettled) == (
        2,
        0,
        0,
    )
    rig.pass_and_turn(MONTH_MS - DAY_MS)
    assert rig.pull().bodies == []
    rig.pass_and_turn(DAY_MS)
    back = rig.pull()
    assert (back.bodies, back.attempts, back.sequences) == ([b"a", b"b"], [2, 2], [0, 1])
    rig.settle(back.ack())
    rig.pass_and_turn(MONTH_MS)
    assert rig.pull().bodies == []
    assert rig.state.long_retries.copies == {}


def test_D3_it_returns_after_retention_deleted_the_original(rig: LongRetryRig) -> None:
    rig.start_long_retries(LARGE)
    rig.let_segments_go()
    assert rig.store.first_offset > 0
    rig.restart()
    rig.pass_and_turn(MONTH_MS)
    back = rig.pull()
    assert (back.bodies, back.attempts) == ([LARGE], [2])
    assert rig.state.lost_count == 0


@pytest.mark.parametrize("end", ["acked", "moved"])
def test_B12_a_released_copy_holds_the_log_until_its_group_is_done_with_it(
    rig: LongRetryRig, end: str
) -> None:
    rig.start_long_retries(LARGE)
    rig.let_segments_go()
    rig.pass_and_turn(MONTH_MS)
    copies = rig.store.queue(COPIES)
    assert copies is not None
    (copy,) = copies.entries(rig.state.long_retries.copies[0], 1)
    assert rig.broker.delivery.needed_log.first_offset(rig.now_ms) == copy.physical_offset
    if end == "acked":
        rig.settle(rig.pull().ack())
    else:
        rig.broker.changes.seek(SUBJECT, GROUP, parse_start("latest"), rig.now_ms)
    assert rig.broker.delivery.needed_log.first_offset(rig.now_ms) > copy.physical_offset


def test_D3_a_kill_between_the_copy_and_its_action_begins_the_long_retry_again(
    rig: LongRetryRig,
) -> None:
    rig.send(b"a")
    rig.settle(rig.pull().nack(MONTH_MS))
    rig.broker.long_retries.step(rig.now_ms)
    rig.broker.writer.step()  # the copy is durable, and nobody was told
    rig.kill()
    assert rig.state.long_retries.count == 0
    rig.turn()
    assert rig.state.long_retries.count == 1
    assert rig.broker.delayed.query.status().subjects == {COPIES: 2}
    rig.pass_and_turn(MONTH_MS)
    assert rig.pull().attempts == [2]
    assert rig.state.waiting == 0


def test_D3_a_kill_between_the_release_and_its_action_redelivers_once(rig: LongRetryRig) -> None:
    rig.start_long_retries(b"a")
    rig.clock.pass_ms(MONTH_MS)
    rig.release()
    rig.kill()
    rig.turn()
    rig.kill()
    rig.turn()
    assert rig.pull().attempts == [2]
    assert rig.pull("two").bodies == []


def test_D1_a_copy_from_before_a_seek_redelivers_nothing_early(rig: LongRetryRig) -> None:
    rig.start_long_retries(b"a")
    rig.broker.changes.seek(SUBJECT, GROUP, parse_start("earliest"), rig.now_ms)
    rig.settle(rig.pull().nack(3 * MONTH_MS))
    rig.turn()
    rig.pass_and_turn(2 * MONTH_MS)
    assert rig.state.long_retries.count == 1
    assert rig.pull().bodies == []
    rig.pass_and_turn(MONTH_MS)
    assert rig.pull().bodies == [b"a"]


@pytest.mark.parametrize("change", ["seek", "remove"])
def test_D3_a_message_pulled_again_before_its_copy_is_durable_comes_at_its_retry_time(
    rig: LongRetryRig, change: str
) -> None:
    rig.send(b"a")
    rig.settle(rig.pull().nack(MONTH_MS))
    rig.broker.long_retries.step(rig.now_ms)
    if change == "seek":
        rig.broker.changes.seek(SUBJECT, GROUP, parse_start("earliest"), rig.now_ms)
    else:
        rig.broker.changes.remove(SUBJECT, GROUP, rig.now_ms)
    rig.settle(rig.pull().nack(10_000))
    rig.commit()
    assert (rig.state.waiting, rig.state.long_retries.count) == (1, 0)
    rig.kill()
    rig.clock.pass_ms(10_000)
    assert rig.pull().bodies == [b"a"]


@pytest.mark.parametrize("change", ["seek", "remove"])
def test_D4_a_moved_or_removed_group_gets_no_copy(rig: LongRetryRig, change: str) -> None:
    rig.start_long_retries(b"a", b"b")
    changes = rig.broker.changes
    if change == "seek":
        changes.seek(SUBJECT, GROUP, parse_start("sequence:1"), rig.now_ms)
    else:
        changes.remove(SUBJECT, GROUP, rig.now_ms)
    rig.kill()
    first = rig.pull()
    assert first.attempts == [1] * len(first.bodies)
    rig.settle(first.ack())
    rig.pass_and_turn(2 * MONTH_MS)
    assert rig.pull().bodies == []


def test_C4_after_the_last_attempt_it_is_a_dead_letter_with_its_body(rig: LongRetryRig) -> None:
    rig.start_long_retries(b"a")
    rig.pass_and_turn(MONTH_MS)
    rig.settle(rig.pull(max_attempts=2).nack(MONTH_MS, "never"))
    rig.restart()
    (letter,) = rig.broker.query.dead_letters(SUBJECT, GROUP, records_bytes=1_000_000)
    assert (letter.attempts, letter.error, len(letter.history)) == (2, "never", 2)
    assert letter.record is not None
    wanted = DeadRequest(subject=SUBJECT, group=GROUP)
    assert rig.broker.changes.replay(wanted, rig.now_ms).count == 1
    again = rig.pull()
    assert (again.bodies, again.attempts) == ([b"a"], [1])
    rig.settle(again.reject())
    assert rig.broker.changes.purge(wanted, rig.now_ms).count == 1
    assert rig.state.long_retries.copies == {}


def test_C4_an_untried_message_returns_with_all_its_attempts_left(rig: LongRetryRig) -> None:
    rig.send(b"a")
    rig.settle(rig.pull().nack_untried(MONTH_MS))
    rig.turn()
    assert rig.state.long_retries.count == 1
    rig.restart()
    rig.pass_and_turn(MONTH_MS)
    back = rig.pull()
    assert (back.bodies, back.attempts) == ([b"a"], [1])
    rig.settle(back.nack_untried())
    assert rig.pull().bodies == [], "untried twice in a row: not before a second"


def test_D3_a_message_may_have_many_long_retries(rig: LongRetryRig) -> None:
    rig.start_long_retries(b"a")
    for attempt in range(2, 5):
        rig.pass_and_turn(MONTH_MS)
        back = rig.pull()
        assert (back.bodies, back.attempts) == ([b"a"], [attempt])
        rig.settle(back.nack(MONTH_MS))
        rig.turn()
        rig.restart()
        assert (rig.state.long_retries.count, rig.state.long_retries.copies) == (1, {})


def test_C7_in_an_ordered_group_those_behind_it_wait_for_it(rig: LongRetryRig) -> None:
    for body in (b"1", b"2"):
        rig.send(body, key="k")
    rig.send(b"other", key="o")
    given = rig.pull(ordered=True)
    assert given.bodies == [b"1", b"other"]
    nack = Nack(range=given.part(0), delay_ms=MONTH_MS)
    rig.settle(Settlement(token=given.token, nacks=(nack,), acks=(given.part(1),)))
    rig.turn()
    rig.restart()
    assert rig.state.long_retries.count == 1
    assert rig.pull(ordered=True).bodies == []
    rig.pass_and_turn(MONTH_MS)
    back = rig.pull(ordered=True)
    assert back.bodies == [b"1"]
    rig.settle(back.ack())
    assert rig.pull(ordered=True).bodies == [b"2"]


def test_long_retries_are_shown(rig: LongRetryRig) -> None:
    rig.start_long_retries(b"a")
    (status,) = rig.broker.query.groups()
    assert (status.redelivery, status.long_retries, status.lag) == (1, 1, 0)
    (found,) = rig.broker.query.in_groups(SUBJECT, 0, b"", rig.now_ms)
    assert (found.state, found.attempts, found.error) == (
        MessageState.WAITING,
        1,
        "not before spring",
    )
    assert found.at_ms > rig.now_ms + MONTH_MS - DAY_MS
    (row,) = rig.broker.delayed.query.listed(None, 0, 2**63, 10)
    assert (row.subject, row.due_at_ms) == (COPIES, found.at_ms)


def test_the_subject_of_copies_belongs_to_the_broker(rig: LongRetryRig) -> None:
    rig.start_long_retries(b"a")
    rig.pass_and_turn(MONTH_MS)
    assert [one.subject for one in rig.broker.query.subjects()] == [SUBJECT]
    assert [one.subject for one in rig.broker.query.groups()] == [SUBJECT]
    with pytest.raises(InvalidNameError, match="the broker's own"):
        rig.send(b"a", subject=COPIES)
    with pytest.raises(InvalidNameError, match="the broker's own"):
        rig.pull(subject=COPIES)


def test_a_wait_beyond_two_years_is_refused(rig: LongRetryRig) -> None:
    rig.send(b"a")
    given = rig.pull()
    with pytest.raises(InvalidMessageError, match="delay_ms"):
        rig.settle(given.nack(3 * 366 * DAY_MS))
    rig.settle(given.nack(2 * 366 * DAY_MS))


def test_D3_an_action_log_without_room_loses_and_doubles_nothing(
    rig: LongRetryRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: object) -> None:
        raise NoRoomError("no space left on device")

    rig.send(b"a")
    rig.settle(rig.pull().nack(MONTH_MS))
    with monkeypatch.context() as patch:
        rig.broker.long_retries.step(rig.now_ms)
        patch.setattr(rig.store.actions, "append", full)
        rig.commit()
    assert (rig.state.long_retries.count, rig.state.redeliveries.count) == (0, 1)
    rig.clock.pass_ms(HOUR_MS)
    rig.turn()
    assert rig.state.long_retries.count == 1
    rig.clock.pass_ms(MONTH_MS)
    rig.release()
    with monkeypatch.context() as patch:
        patch.setattr(rig.store.actions, "append", full)
        rig.broker.long_retries.step(rig.now_ms)
    assert rig.state.long_retries.count == 1
    rig.turn()
    assert rig.pull().attempts == [2]
    assert rig.pull("two").bodies == []


def test_D3_a_refused_copy_is_tried_again_later(
    rig: LongRetryRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the first use of the group of the copies, which is made then."""

    def busy(*_: object) -> None:
        raise BusyError("the writer has enough", retry_after_s=0.1)

    rig.send(b"a")
    rig.settle(rig.pull().nack(MONTH_MS))
    with monkeypatch.context() as patch:
        patch.setattr(rig.broker.writer, "submit", busy)
        rig.broker.long_retries.step(rig.now_ms)
    assert rig.state.redeliveries.count == 1
    rig.clock.pass_ms(HOUR_MS)
    rig.turn()
    assert (rig.state.long_retries.count, rig.state.redeliveries.count) == (1, 0)


def test_B6_a_long_retry_without_room_in_the_action_log_begins_later(
    rig: LongRetryRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What else is driven by time goes on meanwhile."""

    def full(_: object) -> None:
        raise NoRoomError("no space left on device")

    rig.send(b"a")
    rig.settle(rig.pull().nack(MONTH_MS))
    with monkeypatch.context() as patch:
        patch.setattr(rig.store.actions, "append", full)
        rig.broker.step()
    assert rig.state.redeliveries.count == 1
    rig.clock.pass_ms(HOUR_MS)
    rig.turn()
    assert (rig.state.long_retries.count, rig.state.redeliveries.count) == (1, 0)


def test_what_is_over_the_limit_waits_in_the_heap(tmp_path: Path) -> None:
    rig = LongRetryRig(tmp_path, limits=ServiceLimits(long_retries_per_group=2))
    rig.start_long_retries(b"a", b"b", b"c")
    assert (rig.state.long_retries.count, rig.state.redeliveries.count) == (2, 1)
    rig.pass_and_turn(MONTH_MS)
    back = rig.pull()
    assert (sorted(back.bodies), back.attempts) == ([b"a", b"b", b"c"], [2, 2, 2])
    rig.close()


def test_D3_a_clock_set_back_delays_no_message_nacked_since(rig: LongRetryRig) -> None:
    rig.clock.wall_ms -= 7 * DAY_MS
    rig.start_long_retries(b"a")
    rig.pass_and_turn(MONTH_MS)
    assert rig.pull().bodies == [b"a"]
