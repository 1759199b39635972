"""What the broker has to tell of dead letters: every one is counted, and few lines are made of them."""

from __future__ import annotations

from qmq_broker.service.delivery.journal import DeadLetterDigest, NewlyDead
from qmq_client.group.actions import Dead
from tests.broker.service.rig import GROUP, SUBJECT, Rig

MINUTE_S = 60.0


def dead(sequence: int, *, group: str = GROUP, reason: str = "expired") -> Dead:
    return Dead(
        at_ms=1,
        subject=SUBJECT,
        group=group,
        sequence=sequence,
        attempts=0,
        reason=reason,
        error="",
    )


def logged(digest: DeadLetterDigest, now_s: float) -> list[tuple[str, str, int, int]]:
    taken = digest.take(now_s)
    assert all(one.subject == SUBJECT for one in taken)
    return [(one.group, one.reason, one.messages, one.first_sequence) for one in taken]


def taken(rig: Rig) -> list[NewlyDead]:
    return rig.broker.delivery.journal.dead_letter_digest.take(0.0)


def newly(reason: str, messages: int, first_sequence: int) -> NewlyDead:
    return NewlyDead(
        subject=SUBJECT,
        group=GROUP,
        reason=reason,
        messages=messages,
        first_sequence=first_sequence,
    )


def test_O7_a_message_that_expires_is_reported(rig: Rig) -> None:
    rig.send(b"a")
    rig.send(b"b", b"c", expires_at_ms=rig.now_ms + 1)
    rig.pass_ms(1)
    assert rig.pull().sequences == [0]
    assert taken(rig) == [newly("expired", 2, 1)]


def test_O7_a_message_that_expires_and_leaves_nothing_to_hand_out_is_reported(rig: Rig) -> None:
    rig.send(b"a", expires_at_ms=rig.now_ms + 1)
    rig.pass_ms(1)
    assert rig.pull().sequences == []
    assert taken(rig) == [newly("expired", 1, 0)]


def test_O7_a_last_attempt_that_ends_in_silence_is_reported(rig: Rig) -> None:
    rig.send(b"a", b"b")
    rig.pull(max_attempts=1, lease_ms=1_000)
    rig.pass_ms(1_000)
    assert taken(rig) == [newly("attempts used up", 2, 0)]


def test_O7_what_consumers_end_is_told_too_and_nothing_again_after_a_restart(rig: Rig) -> None:
    rig.send(b"a")
    rig.settle(rig.pull().reject("not ours"))
    assert taken(rig) == [newly("rejected", 1, 0)]
    rig.restart()
    assert taken(rig) == []


def test_W8_the_same_group_and_reason_are_reported_once_a_minute_and_all_are_counted() -> None:
    digest = DeadLetterDigest()
    digest.note(dead(7))
    assert logged(digest, 0.0) == [(GROUP, "expired", 1, 7)]
    for sequence in range(100, 1_100):
        digest.note(dead(sequence))
    digest.note(dead(5, reason="rejected"))
    assert logged(digest, 1.0) == [(GROUP, "rejected", 1, 5)]
    assert logged(digest, MINUTE_S - 0.1) == []
    assert logged(digest, MINUTE_S) == [(GROUP, "expired", 1_000, 100)]
    assert logged(digest, 3 * MINUTE_S) == []
    digest.note(dead(2_000))
    assert logged(digest, 3 * MINUTE_S) == [(GROUP, "expired", 1, 2_000)], (
        "long ago: logged at once"
    )


def test_B10_many_groups_are_logged_one_after_the_other() -> None:
    digest = DeadLetterDigest()
    groups = [f"g{number}" for number in range(50)]
    for group in groups:
        digest.note(dead(1, group=group))
    takes = [logged(digest, second / 4) for second in range(4)]
    assert [len(one) for one in takes] == [20, 20, 10, 0]
    assert [group for one in takes for group, *_ in one] == groups
