"""Delivery through a real store: who gets what, and what becomes of it."""

from __future__ import annotations

from pathlib import Path

from qmq_broker.service.limits import ServiceLimits
from qmq_broker.service.query import SEEN_MS
from qmq_client.wire.requests import Extend, Settlement
from tests.broker.service.rig import GROUP, SUBJECT, Rig


def test_C1_a_message_is_leased_to_one_consumer_of_a_group_at_a_time(rig: Rig) -> None:
    rig.send(b"a", b"b", b"c")
    assert rig.pull("one", max_messages=2).bodies == [b"a", b"b"]
    assert rig.pull("two").bodies == [b"c"]
    assert rig.pull("three").bodies == []


def test_C1_every_group_gets_every_message(rig: Rig) -> None:
    rig.send(b"a", b"b")
    assert rig.pull(group="one").bodies == [b"a", b"b"]
    assert rig.pull(group="two").bodies == [b"a", b"b"]


def test_C1_a_hand_out_whose_answer_was_lost_comes_again(rig: Rig) -> None:
    rig.send(b"a")
    rig.pull("one", lease_ms=1_000)
    rig.restart()
    rig.pass_ms(1_000)
    rig.pass_ms(1_000)
    again = rig.pull("two")
    assert again.bodies == [b"a"]
    assert again.attempts == [2]


def test_a_pull_continues_where_the_last_one_ended(rig: Rig) -> None:
    rig.send(*[b"%d" % number for number in range(10)])
    first = rig.pull(max_messages=4)
    second = rig.pull(max_messages=4)
    assert (first.first, second.first) == (0, 4)
    assert second.bodies == [b"4", b"5", b"6", b"7"]


def test_a_new_group_starts_at_the_first_message_or_behind_the_last_one(rig: Rig) -> None:
    rig.send(b"old")
    assert rig.pull(group="late", start="latest").bodies == []
    assert rig.pull(group="early", start="earliest").bodies == [b"old"]
    rig.send(b"new")
    assert rig.pull(group="late", start="latest").bodies == [b"new"]


def test_where_a_latest_group_started_is_kept_over_a_restart(rig: Rig) -> None:
    rig.send(b"old")
    rig.pull(group="late", start="latest")
    rig.send(b"new")
    rig.restart()
    assert rig.pull(group="late", start="latest").bodies == [b"new"]


def test_an_answer_holds_at_most_the_bytes_asked_for_but_one_message_always(rig: Rig) -> None:
    rig.send(b"x" * 1000, b"y" * 1000, b"z" * 1000)
    assert len(rig.pull(max_bytes=2_200).bodies) == 2
    assert len(rig.pull(max_bytes=1).bodies) == 1


def test_acks_in_any_order_leave_only_what_was_not_acked(rig: Rig) -> None:
    rig.send(b"a", b"b", b"c", b"d")
    given = rig.pull(lease_ms=1_000)
    answer = rig.settle(given.ack(given.part(3), given.part(1)))
    assert (answer.settled, answer.stale) == (2, ())
    rig.pass_ms(1_000)
    rig.pass_ms(1_000)
    assert rig.pull().bodies == [b"a", b"c"]


def test_C3_a_silent_consumer_loses_its_messages_after_the_lease(rig: Rig) -> None:
    rig.send(b"a", b"b")
    rig.pull("silent", lease_ms=30_000)
    rig.pass_ms(29_999)
    assert rig.pull("other").bodies == []
    rig.pass_ms(1)
    rig.pass_ms(1_000)
    again = rig.pull("other")
    assert again.bodies == [b"a", b"b"]
    assert again.attempts == [2, 2]


def test_C3_a_late_ack_is_refused_as_stale_and_changes_nothing(rig: Rig) -> None:
    rig.send(b"a", b"b")
    late = rig.pull("late", lease_ms=1_000)
    rig.pass_ms(1_000)
    rig.pass_ms(1_000)
    again = rig.pull("other")
    answer = rig.settle(late.ack(), "late")
    assert answer.settled == 0
    assert answer.stale == ((late.token, late.first, late.next),)
    assert rig.settle(again.ack(), "other").settled == 2


def test_C3_an_extended_lease_ends_later(rig: Rig) -> None:
    rig.send(b"a")
    given = rig.pull(lease_ms=1_000)
    rig.pass_ms(900)
    assert rig.settle(given.extend(5_000)).settled == 1
    rig.pass_ms(4_999)
    assert rig.settle(given.extend(5_000)).settled == 1
    rig.pass_ms(5_000)
    assert rig.settle(given.ack()).settled == 0


def test_C3_no_number_of_extensions_keeps_a_message_forever(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "data", limits=ServiceLimits(held_ms=10_000))
    rig.send(b"a")
    given = rig.pull("stuck", lease_ms=4_000)
    for _ in range(3):
        rig.pass_ms(3_000)
        assert rig.settle(given.extend(4_000), "stuck").settled == 1
    rig.pass_ms(1_000)
    assert rig.settle(given.extend(4_000), "stuck").settled == 0
    rig.pass_ms(1_000)
    assert rig.pull("other").attempts == [2]
    rig.close()


def test_C3_a_lease_ends_at_its_deadline_even_when_nobody_looked(rig: Rig) -> None:
    rig.send(b"a")
    given = rig.pull("one", lease_ms=1_000)
    rig.clock.pass_ms(1_000)
    assert rig.settle(given.ack(), "one").settled == 0
    rig.clock.pass_ms(1_000)
    again = rig.pull("one", lease_ms=1_000)
    assert again.attempts == [2]
    rig.clock.pass_ms(1_000)
    assert rig.pull("two").bodies == [], "given back now, it waits for its backoff"
    rig.clock.pass_ms(2_000)
    assert rig.pull("two").attempts == [3]


def test_C3_extending_some_leaves_the_deadline_of_the_others(rig: Rig) -> None:
    rig.send(b"a", b"b", b"c", b"d")
    given = rig.pull(lease_ms=1_000)
    rig.settle(Settlement(token=given.token, extends=(Extend(range=(1, 2), lease_ms=60_000),)))
    rig.pass_ms(1_000)
    rig.pass_ms(1_000)
    assert rig.pull("two").bodies == [b"a", b"c", b"d"]


def test_C3_an_ack_under_another_token_is_stale(rig: Rig) -> None:
    rig.send(b"a")
    given = rig.pull()
    wrong = Settlement(token=given.token + 1, acks=((given.first, given.next),))
    assert rig.settle(wrong).stale == ((given.token + 1, given.first, given.next),)
    assert rig.settle(given.ack()).settled == 1


def test_C3_nobody_settles_what_another_consumer_holds(rig: Rig) -> None:
    rig.send(b"a")
    given = rig.pull("one")
    assert rig.settle(given.ack(), "two").settled == 0
    assert rig.settle(given.ack(), "one").settled == 1


def test_a_handle_stays_good_over_a_restart_of_the_broker(rig: Rig) -> None:
    rig.send(b"a", b"b")
    given = rig.pull(lease_ms=30_000)
    rig.restart()
    assert rig.store.hand_out_token != given.token
    assert rig.settle(given.ack()).settled == 2
    assert rig.pull().bodies == []


def test_C1_an_outcome_from_another_broker_at_the_same_address_settles_nothing(
    rig: Rig, tmp_path: Path
) -> None:
    rig.send(b"there")
    given_there = rig.pull()
    here = Rig(tmp_path / "new")
    here.send(b"here")
    given_here = here.pull()
    assert (given_here.first, given_here.next) == (given_there.first, given_there.next)
    assert here.store.epoch == rig.store.epoch
    assert here.settle(given_there.ack()).settled == 0
    assert here.settle(given_here.ack()).settled == 1
    here.close()


def test_an_ack_repeated_after_a_lost_answer_is_no_late_ack(rig: Rig) -> None:
    rig.send(b"a", b"b", b"c")
    given = rig.pull()
    rig.settle(given.ack(given.part(0, 2)))
    rig.restart()
    answer = rig.settle(given.ack())
    assert (answer.settled, answer.stale) == (3, ())


def test_ranges_named_twice_in_one_request_are_settled_once(rig: Rig) -> None:
    rig.send(b"a", b"b", b"c")
    given = rig.pull()
    twice = Settlement(token=given.token, acks=(given.part(0, 2), given.part(1, 2)))
    rig.settle(twice)
    (status,) = rig.broker.query.groups()
    assert (status.acked, status.in_flight) == (3, 0)


def test_a_consumer_that_is_gone_and_holds_nothing_is_not_counted(rig: Rig) -> None:
    def counted() -> int:
        (status,) = rig.broker.query.groups(now_ms=rig.now_ms)
        return status.consumers

    rig.send(b"a", b"b")
    rig.settle(rig.pull("gone", max_messages=1).ack(), "gone")
    rig.pull("holding", lease_ms=600_000)
    assert counted() == 2
    rig.pass_ms(SEEN_MS)
    assert counted() == 2
    rig.pass_ms(1)
    assert counted() == 1


def test_C4_attempts_are_counted_at_hand_out_whatever_became_of_them(rig: Rig) -> None:
    rig.send(b"poison")
    for attempt in range(1, 4):
        given = rig.pull(max_attempts=4, lease_ms=1_000)
        assert given.attempts == [attempt]
        if attempt == 2:
            rig.settle(given.nack(delay_ms=0))
        else:
            rig.restart()
            rig.pass_ms(1_000)
        rig.pass_ms(20_000)


def test_C4_poison_that_never_answers_becomes_a_dead_letter(rig: Rig) -> None:
    rig.send(b"poison", b"good")
    for _ in range(2):
        rig.pull(max_attempts=2, max_messages=1, lease_ms=1_000)
        rig.pass_ms(1_000)
        rig.pass_ms(10_000)
    (letter,) = rig.broker.query.dead_letters(SUBJECT, GROUP)
    assert (letter.sequence, letter.attempts) == (0, 2)
    assert (letter.reason, letter.error) == ("attempts used up", "lease ended")
    assert rig.pull(max_attempts=2).bodies == [b"good"]


def test_C4_a_dead_letter_keeps_reason_and_last_error_over_a_restart(rig: Rig) -> None:
    rig.send(b"a", b"b")
    rig.settle(rig.pull(max_messages=1, max_attempts=1).nack(error="ValueError: no such flight"))
    rig.settle(rig.pull(max_messages=1, max_attempts=1).reject("not ours"))
    before = rig.broker.query.dead_letters(SUBJECT, GROUP)
    assert [(letter.reason, letter.error) for letter in before] == [
        ("attempts used up", "ValueError: no such flight"),
        ("rejected", "not ours"),
    ]
    rig.restart()
    assert rig.broker.query.dead_letters(SUBJECT, GROUP) == before
    assert rig.pull().bodies == []


def test_C4_a_group_may_change_its_number_of_attempts(rig: Rig) -> None:
    rig.send(b"a", b"b")
    rig.settle(rig.pull(max_messages=1, max_attempts=5).nack(delay_ms=0))
    rig.restart()
    rig.settle(rig.pull(max_messages=1, max_attempts=2).nack(delay_ms=0))
    rig.restart()
    (status,) = rig.broker.query.groups()
    assert (status.max_attempts, status.dead, status.cursor) == (2, 1, 1)


def test_B8_sequences_are_dense_for_each_subject_and_never_change(rig: Rig) -> None:
    for number in range(6):
        rig.send(b"%d" % number, b"%d" % number, subject="even" if number % 2 else "odd")
    before = [rig.pull(subject=subject, group="one") for subject in ("even", "odd")]
    rig.restart()
    after = [rig.pull(subject=subject, group="two") for subject in ("even", "odd")]
    for one, two in zip(before, after, strict=True):
        assert one.sequences == two.sequences == list(range(6))
        assert one.bodies == two.bodies


def test_a_nack_comes_back_after_its_delay_or_after_the_backoff(rig: Rig) -> None:
    rig.send(b"a")
    rig.settle(rig.pull().nack(delay_ms=7_000))
    rig.pass_ms(6_999)
    assert rig.pull().bodies == []
    rig.pass_ms(1)
    rig.settle(rig.pull().nack())
    rig.pass_ms(1_999)
    assert rig.pull().bodies == [], "the second attempt failed: two seconds"
    rig.pass_ms(1)
    assert rig.pull().attempts == [3]


def test_what_waits_for_redelivery_waits_on_after_a_restart(rig: Rig) -> None:
    rig.send(b"a")
    rig.settle(rig.pull().nack(delay_ms=5_000))
    rig.restart()
    assert rig.pull().bodies == []
    rig.pass_ms(5_000)
    assert rig.pull().attempts == [2]


def test_redeliveries_go_first_and_leave_every_fourth_place_to_new_messages(rig: Rig) -> None:
    rig.send(*[b"old%d" % number for number in range(8)])
    rig.settle(rig.pull().nack(delay_ms=0))
    rig.send(*[b"new%d" % number for number in range(8)])
    bodies = [body for _ in range(8) for body in rig.pull(max_messages=1).bodies]
    assert [body[:3] for body in bodies] == [b"old", b"old", b"old", b"new"] * 2
    mixed = rig.pull(max_messages=4).bodies
    assert [body[:3] for body in mixed] == [b"old", b"old", b"new", b"new"]


def test_settlements_of_a_pull_are_taken_before_it_is_served(rig: Rig) -> None:
    rig.send(b"a", b"b")
    given = rig.pull(max_messages=1)
    again = rig.pull(settlements=(given.nack(delay_ms=0),))
    assert again.bodies == [b"a", b"b"]
    late = rig.pull(settlements=(given.ack(),))
    assert late.head.stale == ((given.token, given.first, given.next),)


def test_setting_the_clock_of_the_machine_ends_no_lease(rig: Rig) -> None:
    rig.send(b"a")
    given = rig.pull(lease_ms=30_000)
    rig.clock.wall_ms += 86_400_000
    rig.pass_ms(1_000)
    assert rig.settle(given.ack()).settled == 1


def test_a_clock_set_back_before_a_restart_keeps_no_message_from_its_group(rig: Rig) -> None:
    rig.send(b"a")
    rig.pull(lease_ms=30_000)
    rig.close()
    rig.clock.wall_ms -= 86_400_000
    rig.start()
    rig.pass_ms(30_000)
    rig.pass_ms(1_000)
    assert rig.pull().bodies == [b"a"]
