"""What comes back untried, because its consumer stopped or no handler could begin, was no attempt (C4).

Whatever may stand behind the hand-out: a restart, a snapshot, another group of rules."""

from __future__ import annotations

import pytest

from qmq_broker.service.delivery.snapshot import decode_groups, encode_groups
from qmq_client.group.settling import UNTRIED_WAIT_MS
from qmq_client.wire.requests import Nack, Settlement
from tests.broker.service.rig import GROUP, SUBJECT, Given, Rig

LEASE_MS = 1_000


def give_back_untried(rig: Rig, times: int = 1, **changes: int) -> None:
    """A consumer after the other takes what is there, and stops."""
    for time in range(times):
        rig.settle(rig.pull(f"stopping-{time}", **changes).nack_untried(), f"stopping-{time}")
        rig.pass_ms(UNTRIED_WAIT_MS)


def crash(rig: Rig, times: int = 1) -> None:
    """Consumers that take what is there and are never heard of again."""
    for time in range(times):
        rig.pull(f"crashed-{time}", lease_ms=LEASE_MS)
        rig.pass_ms(LEASE_MS)
        rig.pass_ms(60_000)


def restart(rig: Rig, how: str) -> None:
    if how == "snapshot":
        offset, content = rig.broker.delivery.snapshot(rig.now_ms)
        rig.store.actions.write_snapshot(offset, content())
    if how == "kill":
        rig.kill()
        rig.start()
    elif how != "none":
        rig.restart()


@pytest.mark.parametrize("how", ["none", "stop", "kill", "snapshot"])
def test_C4_what_came_back_untried_has_all_its_attempts_before_it(rig: Rig, how: str) -> None:
    rig.send(b"a")
    give_back_untried(rig, 5, max_attempts=2)
    restart(rig, how)
    first = rig.pull(max_attempts=2)
    assert first.attempts == [1]
    rig.settle(first.nack(delay_ms=0, error="tried"))
    give_back_untried(rig, 5, max_attempts=2)
    restart(rig, how)
    second = rig.pull(max_attempts=2)
    assert second.attempts == [2]
    rig.settle(second.nack(delay_ms=0, error="tried again"))
    (letter,) = rig.broker.query.dead_letters(SUBJECT, GROUP)
    assert (letter.attempts, letter.error) == (2, "tried again")
    told = [(one.attempt, one.outcome, one.error) for one in letter.history]
    assert told == [(1, "nacked", "tried"), (2, "nacked", "tried again")]


def test_C4_a_snapshot_taken_while_it_is_held_or_waits_says_the_same(rig: Rig) -> None:
    rig.send(b"held", b"waits")
    crash(rig)
    give_back_untried(rig)
    rig.pull(max_messages=1)
    before = rig.broker.delivery.group(SUBJECT, GROUP)
    assert before is not None
    (again,) = decode_groups(encode_groups([before], rig.now_ms), rig.now_ms)
    assert list(again.redeliveries.runs()) == list(before.redeliveries.runs())
    leases = [[list(log.leases()) for _, log in state.consumers()] for state in (again, before)]
    assert leases[0] == leases[1]
    (held,) = leases[0][-1]
    assert (held.attempt, held.error, held.untried) == (2, "lease ended", 1)


def test_C4_a_lease_that_ends_after_it_came_back_untried_is_an_attempt(rig: Rig) -> None:
    rig.send(b"a")
    give_back_untried(rig)
    crash(rig)
    assert rig.pull().attempts == [2]


def test_C4_the_backoff_does_not_grow_by_it(rig: Rig) -> None:
    rig.send(b"a")
    give_back_untried(rig, 6)
    rig.settle(rig.pull().nack(error="the first failure"))
    rig.pass_ms(999)
    assert rig.pull().bodies == []
    rig.pass_ms(1)
    assert rig.pull().attempts == [2]


def test_C4_what_came_back_untried_comes_in_batches_like_new(rig: Rig) -> None:
    rig.send(b"a", b"b")
    give_back_untried(rig, 3)
    rig.send(b"new")
    assert rig.pull().attempts == [1, 1, 1]


def test_C4_a_suspect_that_came_back_untried_is_one_still(rig: Rig) -> None:
    rig.send(b"a", b"b")
    crash(rig, 2)
    for _ in range(2):
        alone = rig.pull()
        assert (alone.bodies, alone.attempts) == ([b"a"], [3])
        rig.settle(alone.nack_untried())
        other = rig.pull()
        assert (other.bodies, other.attempts) == ([b"b"], [3])
        rig.settle(other.nack_untried())
        rig.pass_ms(UNTRIED_WAIT_MS)


def test_C8_it_comes_at_once_the_first_time_and_later_not_before_a_second(rig: Rig) -> None:
    """Who gives back all that it is given does not go round and round."""
    rig.send(b"a")
    rig.settle(rig.pull().nack_untried())
    for _ in range(3):
        rig.settle(rig.pull().nack_untried())
        rig.pass_ms(UNTRIED_WAIT_MS - 1)
        assert rig.pull().bodies == []
        rig.pass_ms(1)
    rig.settle(rig.pull().nack_untried(5 * UNTRIED_WAIT_MS))
    rig.pass_ms(5 * UNTRIED_WAIT_MS - 1)
    assert rig.pull().bodies == []
    rig.pass_ms(1)
    rig.settle(rig.pull().nack(0))
    rig.settle(rig.pull().nack_untried())
    assert rig.pull().attempts == [2], "it was tried in between: at once again"


def test_C4_some_of_a_hand_out_come_back_untried_and_others_tried(rig: Rig) -> None:
    rig.send(b"a", b"b", b"c", b"in hand")
    given = rig.pull()
    nacks = (
        Nack(range=given.part(0, 2), delay_ms=0, was_begun=False),
        Nack(range=given.part(1, 2), delay_ms=0),
    )
    answer = rig.settle(Settlement(token=given.token, nacks=nacks))
    assert (answer.settled, answer.stale) == (3, ((given.token, *given.part(1)),))
    again = rig.pull()
    assert dict(zip(again.sequences, again.attempts, strict=True)) == {0: 1, 1: 1, 2: 2}


def test_C7_in_an_ordered_group_the_next_of_its_key_waits_for_it(rig: Rig) -> None:
    rig.send(b"first", b"second", key="k")

    def pull() -> Given:
        return rig.pull(ordered=True)

    rig.settle(pull().nack_untried())
    rig.restart()
    again = pull()
    assert (again.bodies, again.attempts) == ([b"first"], [1])
    assert pull().bodies == []
    rig.settle(again.ack())
    assert pull().bodies == [b"second"]


def test_the_story_of_a_message_tells_what_came_back_untried(rig: Rig) -> None:
    placed_at_ms = rig.now_ms
    rig.send(b"a")
    given = rig.pull()
    rig.pass_ms(10)
    rig.settle(given.nack_untried(error="consumer stopped"))
    (found,) = rig.broker.query.in_groups(SUBJECT, 0, b"", rig.now_ms)
    assert (found.state, found.attempts, found.error, found.history) == ("waiting", 0, "", ())
    rig.settle(rig.pull().ack())
    told = rig.broker.query.trace(SUBJECT, 0, placed_at_ms).events[GROUP]
    assert [(one.event, one.attempt, one.error) for one in told] == [
        ("given", 1, ""),
        ("nacked untried", 1, "consumer stopped"),
        ("given", 1, ""),
        ("acked", 1, ""),
    ]
